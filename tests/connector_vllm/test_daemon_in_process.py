"""A real engine in this process, on a real daemon: killed, stopped, and started again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import chosen, generate, make_engine, prompt

from kvstore import Client
from kvstore.connectors.vllm import guard
from kvstore.engine.speeds import Speeds

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

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
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("KVSTORE_SYNC_POINT", f"load.copied_half:{point}")
        engine = make_engine({"target": daemon.address}, block_size=32, max_num_batched_tokens=256)
        yield engine
        engine.llm_engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def _no_hook_fails(llm: Any) -> Iterator[None]:
    guard.failures.clear()
    assert llm.reset_prefix_cache() is True
    yield
    assert not guard.failures


def blocks(daemon: Any) -> int:
    with Client(daemon.address) as client:
        return next(int(t.blocks) for t in client.stats().tiers if t.tier == 2)


def test_usage_and_leases_as_the_daemon_sees_them(
    llm: Any, daemon: Any, point: Path, until: Callable[..., None]
) -> None:
    """The first of these tests: usage comes with heartbeats, and none of another test's is due."""
    go = point.with_name(point.name + ".go")
    go.touch()
    cold = chosen(generate(llm, prompt(LENGTH, 2)))
    until(lambda: blocks(daemon) == 4)
    assert llm.reset_prefix_cache() is True
    with Client(daemon.address) as client:
        assert chosen(generate(llm, prompt(LENGTH, 2))) == cold
        until(lambda: client.stats().usage.reused_tokens_host == 512)
        until(lambda: client.stats().leases == 0)
        assert client.stats().stuck_slots == 0
    for path in (go, point):
        path.unlink(missing_ok=True)


def test_daemon_killed_half_way_through_a_load(
    llm: Any, daemon: Any, point: Path, until: Callable[..., None]
) -> None:
    """The load counts as failed, the tokens stay the same, and the next daemon makes it warm."""
    before = blocks(daemon)
    cold = chosen(generate(llm, prompt(LENGTH, 1)))
    until(lambda: blocks(daemon) == before + 4)
    assert llm.reset_prefix_cache() is True

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    attachment = get_kv_transfer_group()._worker._client.attachment
    go = point.with_name(point.name + ".go")

    def kill() -> None:
        until(point.exists)
        daemon.kill()
        until(lambda: not attachment.alive)
        go.touch()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert chosen(generate(llm, prompt(LENGTH, 1))) == cold
    finally:
        go.touch()
        killer.join()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    assert not scheduler._loads
    assert llm.reset_prefix_cache() is True

    daemon.start()
    until(lambda: attachment.alive)
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


def test_daemon_stopped_half_way_through_a_load_and_warm_for_the_next_request(
    llm: Any, daemon: Any, point: Path, until: Callable[..., None]
) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    go = point.with_name(point.name + ".go")
    before = blocks(daemon)
    cold = chosen(generate(llm, prompt(LENGTH, 3)))
    until(lambda: blocks(daemon) == before + 4)
    assert llm.reset_prefix_cache() is True
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    attachments = (
        scheduler._client.attachment,
        get_kv_transfer_group()._worker._client.attachment,
    )

    def restart() -> None:
        assert daemon.stop() == 0
        until(lambda: not any(a.alive for a in attachments))
        daemon.start()
        until(lambda: all(a.alive for a in attachments), 60)

    def restart_inside() -> None:
        until(point.exists, 60)
        try:
            restart()
        finally:
            go.touch()

    for path in (go, point):
        path.unlink(missing_ok=True)
    restarter = threading.Thread(target=restart_inside)
    restarter.start()
    try:
        assert chosen(generate(llm, prompt(LENGTH, 3))) == cold
    finally:
        go.touch()
        restarter.join()
    assert not scheduler._loads

    # Idle now: no step tells the scheduler anything about the workers.
    assert llm.reset_prefix_cache() is True
    restart()
    until(lambda: checked(daemon), 60)
    warm = generate(llm, prompt(LENGTH, 3))
    assert warm[0].num_cached_tokens == 512
    assert chosen(warm) == cold


def test_what_was_declined_is_computed_once_and_loaded_the_next_time(
    llm: Any, daemon: Any, point: Path, until: Callable[..., None]
) -> None:
    """All is on disk after a start, and the disk is said to be slower than any engine."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    point.with_name(point.name + ".go").touch()  # no load is held
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    attachments = (
        scheduler._client.attachment,
        get_kv_transfer_group()._worker._client.attachment,
    )
    disk = daemon.directory / "disk"

    def restart(*options: str, between: Callable[[], None] = lambda: None) -> None:
        assert daemon.stop() == 0
        until(lambda: not any(a.alive for a in attachments))
        between()
        daemon.options = ("--host-pool", "256MiB", "--discard-host", *options)
        daemon.start()
        until(lambda: all(a.alive for a in attachments), 60)
        assert llm.reset_prefix_cache() is True

    def slow() -> None:
        speeds = Speeds(daemon.directory / "s" / "speeds")
        store_id = (disk / "store-id").read_text().split()[2]
        speeds.read_from(bytes.fromhex(store_id), 1000.0, 0.0)
        line = speeds.line()
        assert line is not None
        speeds.write(line)

    on_disk = ("--disk", str(disk), "--disk-capacity", "512MiB")
    restart(*on_disk)
    cold = chosen(generate(llm, prompt(LENGTH, 5)))
    until(lambda: blocks(daemon) == 4)
    with Client(daemon.address) as client:
        assert client.flush(60).done
    restart(*on_disk, between=slow)
    declined = generate(llm, prompt(LENGTH, 5))
    assert (declined[0].num_cached_tokens, chosen(declined)) == (0, cold)
    with Client(daemon.address) as client:
        # One of them may have come because the disk's speed was looked at.
        until(lambda: client.stats().counters.get("promoted_blocks") == 4)
        assert client.stats().counters["afterwards_blocks"] > 0
    assert llm.reset_prefix_cache() is True
    warm = generate(llm, prompt(LENGTH, 5))
    assert (warm[0].num_cached_tokens, chosen(warm)) == (512, cold)
