"""What a scrape holds: every series is documented, bounded, and says what happened."""

from __future__ import annotations

import re
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvstore
from kvstore.engine.counters import BUCKET_SECONDS, Counters, UsageCounts
from kvstore.index import SpaceIndex
from kvstore.server.metric_series import COUNTS, SERIES, TIMINGS, Kind, renewed
from kvstore.server.metrics import _CALLS, EngineCollector

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_world import World, chain, spec_of, until
from world_fixture import make_world

__all__ = ["make_world"]

ROOT = Path(__file__).parents[2]
SPACES = 10_000

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(world: World) -> str:
    registry = CollectorRegistry()
    registry.register(EngineCollector(world.engine))
    return generate_latest(registry).decode()


def test_the_documented_table_is_that_of_the_code() -> None:
    document = (ROOT / "docs" / "metrics.md").read_text()
    assert renewed(document) == document, "run `make metrics-table`"
    for expression in re.findall(r"(?<!vllm:)\bkvstore_\w+", document.split("## All series")[0]):
        name = re.sub(r"_(total|bucket|sum|count)$", "", expression)
        assert name in SERIES or expression in ("kvstore_hit_", "kvstore_miss_"), expression


def test_every_count_and_timing_in_the_code_has_a_series() -> None:
    source = "\n".join(
        path.read_text()
        for folder in ("kvstore/engine", "kvstore/server")
        for path in sorted((ROOT / folder).glob("*.py"))
        if path.name != "metric_series.py"
    )
    counted = set(re.findall(r'counts\["(\w+)"\] (?:\+=|=)', source))
    assert len(counted) > 25
    assert counted <= set(COUNTS) | {
        f"{what}_{tier}"
        for what in ("hit_blocks", "hit_tokens", "evicted_blocks", "quota_evicted_blocks")
        for tier in ("gpu", "host", "disk")
    }
    timed = set(re.findall(r'counters\.record\("(\w+)"', source))
    assert len(timed) > 5
    assert timed <= set(TIMINGS)
    # And nothing is documented that nobody counts.
    for name in (*COUNTS, *TIMINGS):
        assert f'"{name}"' in source or re.fullmatch(
            "flush_skipped_(budget|no_room|quota)_blocks", name
        )


def test_a_scrape_shows_what_happened(make_world: Callable[..., World]) -> None:
    async def story(world: World) -> None:
        keys = chain("told", 4)
        player = world.player()
        await player.put(keys)
        await world.evict_host(keys[2:])
        lease, _ = player.acquire([*keys, *chain("unseen", 1)], deadline=60)
        await player.lease_done(lease)
        counters = world.engine.counters
        for seconds in (0.5e-6, 3e-6, 3e-6, 0.02, 1e3):
            counters.record("lookup", seconds)
        world.engine.report_usage(
            world.space.id, UsageCounts(requests=1, prompt_tokens=80, reused_tokens_host=32)
        )
        world.engine.report_usage(
            world.space.id, UsageCounts(reused_tokens_disk=8, local_tokens=20)
        )
        found = samples(scrape(world))

        def value(name: str, **labels: str) -> float:
            return found[(name, tuple(sorted(labels.items())))]

        assert value("kvstore_effective_hit_ratio") == 0.75
        assert value("kvstore_client_reused_tokens_total", tier="disk") == 8
        assert value("kvstore_hit_blocks_total", tier="host") == 2
        assert value("kvstore_hit_tokens_total", tier="disk") == 32
        assert value("kvstore_miss_tokens_total", reason="never_seen") == 16
        assert value("kvstore_miss_blocks_total", reason="corrupt") == 0
        assert value("kvstore_stored_blocks_total") == 4
        assert value("kvstore_waits_begun_total") == value("kvstore_waits_ended_total") == 1
        assert value("kvstore_path_bytes_per_second", path="disk") > 0
        assert value("kvstore_promotion_queue_bytes") == 0
        assert value("kvstore_leases") == 1
        assert value("kvstore_leased_bytes") == 4 * 4096
        assert value("kvstore_attachments", state="active") == 1
        assert value("kvstore_tier_blocks", tier="disk") == 4

        def upto(limit: str) -> float:
            return value("kvstore_call_seconds_bucket", call="lookup", le=limit)

        assert [upto(le) for le in ("1e-06", "2e-06", "5e-06", "0.01", "0.02")] == [1, 1, 3, 3, 4]
        assert [upto("60"), upto("+Inf")] == [4, 5]
        assert value("kvstore_call_seconds_count", call="lookup") == 5
        assert value("kvstore_longest_seconds", timing="lookup") == 1e3
        player.release(lease)

    make_world().run(story)


def test_ten_thousand_spaces_do_not_make_a_scrape_longer(
    make_world: Callable[..., World],
) -> None:
    async def story(world: World) -> None:
        # All that there can be: each timing, each count.
        for name in (*TIMINGS, *_CALLS):
            world.engine.counters.record(name, 1e-4)
        for number in range(SPACES):
            spec = spec_of(f"model {number}")
            space = SpaceIndex(spec.fingerprint, spec, 0)
            world.engine.index.spaces[space.id] = space
            world.engine.usage[space.id] = UsageCounts(
                requests=10**12, prompt_tokens=10**12, reused_tokens_host=10**12
            )
        text = scrape(world)
        assert len(text.encode()) < 200_000
        names = {family.name for family in text_string_to_metric_families(text)}
        assert names <= set(SERIES)
        # GPU pool, budget: the parts that this world lacks.
        absent = {name for name in set(SERIES) - names if not re.search("gpu|budget", name)}
        assert absent <= {"kvstore_path_bytes_per_second", "kvstore_path_latency_seconds"}

    make_world().run(story)


def test_usage_adds_up_to_what_the_wire_can_carry() -> None:
    parts = [UsageCounts(requests=1, prompt_tokens=(1 << 64) - 2, loaded_bytes=n) for n in range(4)]
    added = UsageCounts()
    for part in parts:
        added.add(part)
    assert UsageCounts.total(parts) == added
    assert (added.prompt_tokens, added.loaded_bytes) == ((1 << 64) - 1, 6)
    assert UsageCounts.total([]) == UsageCounts()


def test_histograms_begin_at_a_microsecond_and_keep_every_sample() -> None:
    assert BUCKET_SECONDS[0] == 1e-6
    assert list(BUCKET_SECONDS) == sorted(set(BUCKET_SECONDS))
    counters = Counters()
    for limit in BUCKET_SECONDS:
        counters.record("x", limit)
    counters.record("x", 1e9)
    [histogram] = counters.histograms()
    assert histogram.buckets == (1,) * (len(BUCKET_SECONDS) + 1)
    assert all(series.unit for series in SERIES.values())
    assert {series.kind for series in SERIES.values()} == set(Kind)


def test_a_daemon_serves_them(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon("--metrics", "127.0.0.1:0")
    said = re.search(r"metrics: port (\d+)", daemon.log.read_text())
    assert said is not None
    with kvstore.Client(daemon.address) as client:
        space = client.open_space(
            kvstore.SpaceSpec(model="m", dtype="f", block_tokens=16, shard_bytes=(4096,))
        )
        keys = kvstore.chain_keys(list(range(64)), 16)
        assert space.put(keys, np.zeros((4, 4096), np.uint8)) == 4
        assert space.lookup(keys).blocks == 4
        with urllib.request.urlopen(f"http://127.0.0.1:{said[1]}/metrics", timeout=60) as answer:
            found = samples(answer.read().decode())
    assert found[("kvstore_stored_blocks_total", ())] == 4
    assert found[("kvstore_call_seconds_count", (("call", "lookup"),))] >= 1


def test_spaces_with_and_over_their_quotas_are_counted(make_world: Callable[..., World]) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("pinned", 4)
        await player.put(keys)
        await world.engine.pin(world.space, keys, 0)
        size = world.space.shape.block_bytes
        await world.engine.limits.change(world.space, {"host_bytes": 2 * size})
        found = samples(scrape(world))
        assert found["kvstore_spaces_with_quota", (("tier", "host"),)] == 1
        assert found["kvstore_spaces_over_quota", (("tier", "host"),)] == 1
        assert found["kvstore_pinned_blocks", ()] == 4
        await world.engine.pins.unpin(world.space, None)
        await until(lambda: world.space.host_blocks == 2)
        found = samples(scrape(world))
        assert found["kvstore_spaces_over_quota", (("tier", "host"),)] == 0
        assert found["kvstore_quota_evicted_blocks_total", (("tier", "host"),)] == 2
        assert found["kvstore_pinned_blocks", ()] == 0

    make_world(disk_blocks=0).run(story)
