"""Engines with processes of their own sharing a daemon that dies in the middle of a load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import chosen, generate, make_engine, prompt

from kvstore import Client

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

LENGTH = 530  # four stored blocks of 128 tokens, 18 left


@pytest.fixture(scope="module")
def daemon(new_daemon: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    running = new_daemon(tmp_path_factory.mktemp("d"), "--host-pool", "256MiB").start()
    yield running
    running.end()


@pytest.fixture(scope="module")
def point(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("point") / "half"


@pytest.fixture(scope="module")
def llm(daemon: Any, point: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("KVSTORE_SYNC_POINT", f"load.copied_half:{point}")
        # Scheduler and worker in processes of their own, as with several ranks.
        engine = make_engine({"target": daemon.address}, distributed_executor_backend="mp")
    yield engine
    engine.llm_engine.engine_core.shutdown()


def blocks(daemon: Any) -> int:
    with Client(daemon.address) as client:
        return next(int(t.blocks) for t in client.stats().tiers if t.tier == 2)


def clients(daemon: Any) -> list[str]:
    with Client(daemon.address) as client:
        return [c.client for c in client.stats().clients if c.state == "active"]


def test_daemon_killed_inside_a_worker_s_load(
    llm: Any, daemon: Any, point: Path, until: Callable[..., None]
) -> None:
    cold = chosen(generate(llm, prompt(LENGTH, 1)))
    until(lambda: blocks(daemon) == 4)
    assert llm.reset_prefix_cache() is True
    go = point.with_name(point.name + ".go")

    def replace() -> None:
        until(point.exists, 60)
        daemon.kill()
        daemon.start()
        # The worker is attached to the next run before its load goes on.
        until(lambda: any("worker" in name for name in clients(daemon)))
        go.touch()

    replacer = threading.Thread(target=replace)
    replacer.start()
    try:
        assert chosen(generate(llm, prompt(LENGTH, 1))) == cold
    finally:
        go.touch()
        replacer.join()
    assert point.exists()
    # That request has been computed, and stored with the next daemon by now or by the next one.
    assert llm.reset_prefix_cache() is True
    assert chosen(generate(llm, prompt(LENGTH, 1))) == cold
    until(lambda: blocks(daemon) == 4)
    assert llm.reset_prefix_cache() is True
    warm = generate(llm, prompt(LENGTH, 1))
    assert warm[0].num_cached_tokens == 512
    assert chosen(warm) == cold


def checked(daemon: Any) -> bool:
    """Return whether all that was adopted has been compared with its digests."""
    with Client(daemon.address) as client:
        counts = client.stats().counters
        return bool(counts["adopted_checked_blocks"] == counts["adopted_blocks"] > 0)


def test_the_next_request_after_a_warm_restart_is_warm(
    llm: Any, daemon: Any, point: Path, until: Callable[..., None]
) -> None:
    point.with_name(point.name + ".go").touch()
    cold = chosen(generate(llm, prompt(LENGTH, 4)))
    until(lambda: blocks(daemon) >= 4)
    assert llm.reset_prefix_cache() is True
    assert daemon.stop() == 0
    daemon.start()
    for process in ("scheduler", "worker"):
        until(lambda name=process: any(name in client for client in clients(daemon)), 60)
    until(lambda: checked(daemon), 60)
    warm = generate(llm, prompt(LENGTH, 4))
    assert warm[0].num_cached_tokens == 512
    assert chosen(warm) == cold


def test_the_first_request_of_a_second_engine_is_warm(
    llm: Any, daemon: Any, point: Path, until: Callable[..., None]
) -> None:
    before = blocks(daemon)
    cold = chosen(generate(llm, prompt(LENGTH, 2)))
    until(lambda: blocks(daemon) == before + 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        second = make_engine({"target": daemon.address})
    try:
        warm = generate(second, prompt(LENGTH, 2))
        assert warm[0].num_cached_tokens == 512
        assert chosen(warm) == cold
        # And the other way round.
        before = blocks(daemon)
        cold = chosen(generate(second, prompt(LENGTH, 3)))
        until(lambda: blocks(daemon) == before + 4)
        warm = generate(llm, prompt(LENGTH, 3))
        assert warm[0].num_cached_tokens == 512
        assert chosen(warm) == cold
    finally:
        second.llm_engine.engine_core.shutdown()
