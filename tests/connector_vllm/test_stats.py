"""What the connector counts for vLLM's own metrics, from the hooks to a scrape."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_store import FakeDaemon
from mini_engine import MiniEngine, Shell
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvstore.connectors.vllm import KVStoreConnector, guard
from kvstore.connectors.vllm.stats import KVStorePromMetrics, KVStoreStats, LoadTimer, StatsLog

PROMPT = list(range(64))
BLOCK_BYTES = 8 * 3 * 8 * 8  # tokens, layers, width, bytes of an int64: of one rank


@pytest.fixture(autouse=True)
def _no_hook_fails() -> Iterator[None]:
    guard.failures.clear()
    guard.take_failures()
    yield
    guard.failures.clear()
    guard.take_failures()


def taken(engine: MiniEngine) -> KVStoreStats:
    """What vLLM makes of all processes' stats."""
    parts = [rank.shell.get_kv_connector_stats() for rank in engine.ranks]
    total = None
    for part in [*parts, engine.top.get_kv_connector_stats()]:
        carried = pickle.loads(pickle.dumps(part))
        if carried is not None and not carried.is_empty():
            total = carried if total is None else total.aggregate(carried)
    return total or KVStoreStats()


def run(engine: MiniEngine, until: Callable[..., None]) -> KVStoreStats:
    engine.run(engine.add(PROMPT, 1))

    def over() -> bool:
        engine.step()
        return not engine.scheduler.pending()

    until(over)
    return taken(engine)


@pytest.mark.parametrize("shards", [1, 2])
def test_every_rank_and_the_scheduler_are_added_up(shards: int, until: Callable[..., None]) -> None:
    daemon = FakeDaemon()
    cold = run(MiniEngine(daemon, shards=shards), until).data
    stored = sum(outcome in (1, 2) for outcome in daemon.commits) // shards
    assert stored == 8
    assert cold["counts"] == {
        "requests": 1,
        "prompt_tokens": 64,
        "stored_bytes": stored * BLOCK_BYTES * shards,
    }
    assert set(cold["seconds"]) == {"lookup", "store"}
    assert len(cold["seconds"]["lookup"]) == 1
    warm_engine = MiniEngine(daemon, shards=shards)
    warm = run(warm_engine, until).data
    assert warm["counts"] == {
        "requests": 1,
        "prompt_tokens": 64,
        "hit_tokens/host": 64,
        "loaded_bytes": 8 * BLOCK_BYTES * shards,
    }
    assert len(warm["seconds"]["load"]) == shards
    told = [name for name, _ in daemon.times]
    assert (told.count("lookup"), told.count("load")) == (2, shards), "the daemon, too"
    assert all(seconds > 0 for samples in warm["seconds"].values() for seconds in samples)
    assert taken(warm_engine).is_empty(), "taken twice"


def test_failures_are_counted_and_not_timed(until: Callable[..., None]) -> None:
    daemon = FakeDaemon()
    run(MiniEngine(daemon), until)
    daemon.faults |= {"generation", "commit"}
    counts = run(MiniEngine(daemon), until).data["counts"]
    assert counts["load_failures"] == 1
    assert counts["store_failures"] >= 1
    assert counts.get("hit_tokens/host", 0) == counts.get("stored_bytes", 0) == 0
    daemon.stop()
    engine = MiniEngine(daemon)
    found = run(engine, until).data
    assert "lookup" not in found["seconds"]
    Shell(SimpleNamespace(), None).get_num_new_matched_tokens(None, 0)  # type: ignore[arg-type]
    failed = engine.top.get_kv_connector_stats()
    assert failed is not None
    assert failed.data["counts"] == {"hook_failures": 1}
    assert engine.ranks[0].shell.get_kv_connector_stats() is None, "counted twice"


def test_a_question_without_an_answer_is_a_failure() -> None:
    daemon = FakeDaemon()
    engine = MiniEngine(daemon)
    log = StatsLog(lambda *_: None)
    daemon.hold = True
    asked = daemon.answer(lambda: 1)
    log.lookup(asked)
    assert log.take() is None, "there is no answer yet"
    daemon.stop()
    daemon.let_go()
    found = log.take()
    assert found is not None
    assert found.data == {"counts": {"lookup_failures": 1}, "seconds": {}}
    assert engine.top.get_kv_connector_stats() is None


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("done_first", [False, True])
def test_a_load_is_timed_once_when_its_bytes_are_there(early: bool, done_first: bool) -> None:
    log = StatsLog(lambda *_: None)
    timer = LoadTimer(log)
    if done_first:
        timer.done(10)
    timer.submitted(early=early)
    if not done_first:
        timer.done(10)
    if early:
        found = log.take()
        assert found is not None
        assert found.data["seconds"] == {}
        timer.landed()
    found = log.take()
    assert found is not None
    assert len(found.data["seconds"]["load"]) == 1
    failed = LoadTimer(log)
    failed.submitted(early=False)
    failed.done(0)
    assert log.take() is None


def test_what_nobody_takes_is_bounded() -> None:
    log = StatsLog(lambda *_: None)
    for number in range(10_000):
        log.time("load", number)
    first = log.take()
    assert first is not None
    assert first.data["seconds"]["load"] == list(range(10_000 - 4096, 10_000))
    log.time("load", 1.0)
    assert len(first.aggregate(log.take()).data["seconds"]["load"]) == 4096


def prom(engines: int = 1) -> tuple[KVStorePromMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    types = {
        kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)
    }
    config: Any = SimpleNamespace(kv_transfer_config=None)
    labels: dict[int, list[object]] = {index: ["model", str(index)] for index in range(engines)}
    made = KVStoreConnector.build_prom_metrics(config, types, ["model_name", "engine"], labels)
    assert isinstance(made, KVStorePromMetrics)
    return made, registry


def test_a_scrape_of_the_engine_shows_them() -> None:
    metrics, registry = prom(engines=2)
    stats = KVStoreStats(
        {
            "counts": {"hit_tokens/disk": 128, "prompt_tokens": 530, "what a newer one counts": 1},
            "seconds": {"load": [0.003, 0.004, 7.5], "newer": [1.0]},
        }
    )
    # As vLLM carries it to the API server.
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    metrics.observe(data, engine_idx=1)
    metrics.observe({}, engine_idx=0)

    def value(name: str, engine: int = 1, **labels: str) -> float | None:
        all_labels = {"model_name": "model", "engine": str(engine)} | labels
        return registry.get_sample_value(name, all_labels)

    assert value("vllm:kvstore_hit_tokens_total", tier="disk") == 128
    assert value("vllm:kvstore_hit_tokens_total", tier="host") == 0
    assert value("vllm:kvstore_prompt_tokens_total") == 530
    assert value("vllm:kvstore_prompt_tokens_total", engine=0) == 0
    assert value("vllm:kvstore_load_failures_total") == 0
    assert value("vllm:kvstore_load_seconds_count") == 3
    assert value("vllm:kvstore_load_seconds_bucket", le="0.005") == 2
    assert value("vllm:kvstore_store_seconds_count") == 0


def test_vllm_s_own_log_says_what_an_interval_held() -> None:
    stats = KVStoreConnector.build_kv_connector_stats(
        {"counts": {"loaded_bytes": 5}, "seconds": {"load": [0.002, 0.001, 0.003]}}
    )
    assert stats.reduce() == {"loads": 3, "load P50 (ms)": 2.0, "loaded bytes": 5}
    stats.reset()
    assert stats.is_empty()
    assert KVStoreConnector.build_kv_connector_stats(None).is_empty()


def test_metrics_that_cannot_be_made_do_not_stop_the_engine() -> None:
    assert KVStoreConnector.build_prom_metrics(None, {}, [], {}) is None
    assert guard.failures["build_prom_metrics"] == 1


def test_the_documented_series_are_those_of_the_code() -> None:
    _, registry = prom()
    document = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    for family in registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"| `{name}` | {family.type} |" in document, name


def test_memory_that_could_not_be_faulted_in_is_counted_once() -> None:
    engine = MiniEngine(FakeDaemon())
    worker: Any = engine.ranks[0].shell._worker
    attachment = worker._client.attachment
    attachment.unfilled = 3
    assert taken(engine).data["counts"]["unfilled"] == 3
    assert taken(engine).is_empty()
    attachment.unfilled = 5
    assert taken(engine).data["counts"]["unfilled"] == 2
    # Another attachment counts from 0.
    attachment.unfilled = 1
    assert taken(engine).data["counts"]["unfilled"] == 1
