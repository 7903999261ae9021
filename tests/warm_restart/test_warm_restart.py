"""Stories of daemons that stop in order, and of what the next one serves from memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from restart_stories import (
    BLOCK,
    SHARDS,
    WORKER,
    Start,
    Until,
    chain,
    checked,
    counter,
    disk_of,
    go_on,
    host_hits,
    index_of,
    load,
    pool_of,
    restart,
    spec_of,
    stop,
    store,
)

from kvstore import Client
from kvstore.engine.host_index import read_host_index


def test_the_same_blocks_come_from_memory_to_the_same_client(daemon: Any, until: Until) -> None:
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 24)
        store(space, "b", 8)
        boot = client.stats().boot_id
        stop(daemon)
        assert index_of(daemon).exists()
        go_on(daemon, client)
        assert not index_of(daemon).exists()
        # The handle of before the restart; nobody tells it anything.
        assert load(space, "a", 24) == 24
        assert load(space, "b", 8) == 8
        assert client.stats().boot_id != boot
        assert host_hits(client) == 32
        assert space.lookup(chain("a", 24)[0]).blocks == 24
        until(lambda: checked(client))
        # Slots that were free are: the pool takes what it could take before.
        store(space, "c", 80)
        assert load(space, "c", 80) == 80
        assert load(space, "a", 24) == 24


def test_memory_survives_any_number_of_restarts_and_goes_on_being_used(daemon: Any) -> None:
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        pool = None
        for i in range(3):
            store(space, f"boot {i}", 10)
            stop(daemon)
            assert pool in (None, pool_of(daemon))
            pool = pool_of(daemon)
            go_on(daemon, client)
            for j in range(i + 1):
                assert load(space, f"boot {j}", 10) == 10
        assert host_hits(client) == 30


def test_a_process_waits_for_one_run_of_the_daemon_and_for_none_that_is_over(
    daemon: Any, until: Until
) -> None:
    with Client(daemon.address, timeout_s=20) as client:
        attachment = client.attachment
        until(lambda: attachment.alive, 60)
        first = attachment.boot_id
        assert attachment.wait_run(first, 0.0)
        assert not attachment.wait_run(b"of somebody else", 0.01)
        stop(daemon)
        until(lambda: not attachment.alive, 60)
        # Not for an hour: this process has seen its end.
        assert not attachment.wait_run(first, 3600.0)
        daemon.start()
        with Client(daemon.address, timeout_s=20) as other:
            second = bytes(other.hello().boot_id)
        assert attachment.wait_run(second, 60.0)
        assert not attachment.wait_run(first, 3600.0)


def test_two_shards(daemon: Any) -> None:
    spec = spec_of("two", SHARDS)
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec)
        store(space, "s", 12, sum(SHARDS))
        store(client.open_space(spec_of()), "one", 3)
        restart(daemon, client)
        assert load(space, "s", 12, sum(SHARDS)) == 12
        assert load(client.open_space(spec_of()), "one", 3) == 3
        assert host_hits(client) == 15


def test_streams_wait_for_the_check_too(daemon: Any) -> None:
    with Client(daemon.tcp, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "streamed", 12)
        restart(daemon, client)
        assert load(space, "streamed", 12) == 12
        assert host_hits(client) == 12


def test_what_is_on_disk_as_well_comes_from_memory(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(*disk_of(tmp_path))
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 12)
        restart(daemon, client)
        assert load(space, "a", 12) == 12
        assert host_hits(client) == 12
        assert counter(client, "promoted_blocks") == 0
        # A head that is on disk only is parent enough for what lies in memory.
        keys, _ = chain("a", 12)
        assert space.evict(keys[8:], tier="host").copies == 4
        restart(daemon, client)
        assert counter(client, "adopted_blocks") == 8
        assert load(space, "a", 12) == 12
        assert counter(client, "promoted_blocks") == 4


def test_a_bumped_epoch_wins(daemon: Any) -> None:
    """Also when the bump was later than the saving."""
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        other = client.open_space(spec_of("other"))
        store(space, "a", 4)
        store(other, "b", 4)
        stop(daemon)
        data = index_of(daemon).read_bytes()
        go_on(daemon, client)
        assert load(space, "a", 4) == 4
        space.bump_epoch()
        stop(daemon)
        saved = read_host_index(index_of(daemon))
        assert saved is not None
        assert saved.blocks == 4
        index_of(daemon).write_bytes(data)
        go_on(daemon, client)
        fresh = client.open_space(spec_of())
        assert load(fresh, "a", 4) == 0
        assert load(other, "b", 4) == 4


def test_a_smaller_pool_keeps_the_hottest_groups_and_a_larger_one_all(daemon: Any) -> None:
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        for i in range(6):
            store(space, f"{i}", 16)
        assert load(space, "5", 16) == 16
        for size, least in (("512MiB", 96), ("64MiB", 48)):
            stop(daemon)
            daemon.options = ("--host-pool", size)
            go_on(daemon, client)
            found = sum(load(space, f"{i}", 16) for i in range(6))
            assert least <= found <= int(size[:-3])
            assert load(space, "5", 16) == 16
            store(space, "new", 16)
            assert load(space, "new", 16) == 16


class Worker:
    """A writer that holds at a sync point in the middle of its copy."""

    def __init__(self, directory: Path, address: str, name: str, count: int) -> None:
        self.point = directory / "point"
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), address, "put", name, str(count)],
            stdout=subprocess.DEVNULL,
            env={
                **os.environ,
                "KVSTORE_SYNC_POINT": f"put.copied_half:{self.point}",
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
        )

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a writer and stops it in the middle of its copy."""
    started: list[Worker] = []

    def start(until: Until, daemon: Any, name: str, count: int) -> Worker:
        made = Worker(tmp_path, daemon.address, name, count)
        started.append(made)
        until(made.point.exists, 30)
        made.signal(signal.SIGSTOP)
        return made

    yield start
    for made in started:
        made.end()


def test_slots_of_a_stopped_writer_are_nobody_s_across_two_restarts(
    daemon: Any, writer: Callable[..., Worker], until: Until
) -> None:
    stopped = writer(until, daemon, "stopped", 8)
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "before", 8)
        for boot in range(2):
            stop(daemon)
            saved = read_host_index(index_of(daemon))
            assert saved is not None
            busy = {slot for slot, _ in saved.busy}
            assert len(busy) == 8
            go_on(daemon, client)
            assert load(space, "before", 8) == 8
            assert client.stats().stuck_slots == 8
            assert client.stats().stuck_bytes == 8 * BLOCK
            # More than everything: each slot that can be had is had.
            for i in range(3):
                store(space, f"fill {boot}.{i}", 100)
            assert load(space, f"fill {boot}.2", 100) == 100
            assert client.stats().stuck_slots == 8
            store(space, "before", 8)
        stop(daemon)
        saved = read_host_index(index_of(daemon))
        assert saved is not None
        assert {slot for slot, _ in saved.busy} == busy
        assert not busy & {b.slot for s in saved.spaces for b in s.blocks}
        go_on(daemon, client)
        stopped.signal(signal.SIGKILL)
        begun = time.monotonic()
        until(lambda: client.stats().stuck_slots == 0, 3)
        assert time.monotonic() - begun < 1


def test_a_writer_that_wakes_up_after_the_restart_harms_nobody(
    daemon: Any, writer: Callable[..., Worker], until: Until
) -> None:
    woken = writer(until, daemon, "woken", 8)
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "before", 8)
        restart(daemon, client)
        assert client.stats().stuck_slots == 8
        store(space, "fill", 100)
        woken.point.with_name("point.go").touch()
        woken.signal(signal.SIGCONT)
        until(lambda: client.stats().stuck_slots == 0)
        assert load(space, "fill", 100) == 100
        assert load(space, "before", 8) in (0, 8)
