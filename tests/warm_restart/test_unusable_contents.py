"""Contents of memory that must not be used, or only with care: killed starts, damage, other machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from restart_stories import (
    Start,
    Until,
    chain,
    counter,
    disk_of,
    go_on,
    host_hits,
    index_of,
    load,
    log_of,
    pool_of,
    restart,
    spec_of,
    stop,
    store,
)

from kvstore import Client
from kvstore.engine.host_index import encode, read_host_index
from kvstore.miss import MissReason


def test_a_flipped_byte_in_memory_comes_from_disk(start_daemon: Start, tmp_path: Path) -> None:
    daemon = start_daemon(*disk_of(tmp_path))
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 12)
        stop(daemon)
        flip(daemon, 7)
        go_on(daemon, client)
        assert load(space, "a", 12) == 12
        assert counter(client, "corrupt_blocks") == 1


def test_what_was_not_on_disk_yet_is_flushed_by_the_next_daemon(
    start_daemon: Start, tmp_path: Path
) -> None:
    """And what is damaged by then is not."""
    daemon = start_daemon()
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 12)
        stop(daemon)
        flip(daemon, 9)
        daemon.options = (*daemon.options, *disk_of(tmp_path))
        go_on(daemon, client)
        answer = client.flush(20)
        assert (answer.done, answer.skipped) == (True, 0)
        daemon.options = (*daemon.options, "--discard-host")
        restart(daemon, client)
        assert load(space, "a", 12) == 9
        assert counter(client, "promoted_blocks") == 9


def test_memory_that_is_killed_right_after_it_was_adopted_is_not_used_again(
    start_daemon: Start, tmp_path: Path
) -> None:
    """The third daemon starts clean, and serves what is on disk."""
    daemon = start_daemon(*disk_of(tmp_path))
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 8)
        assert client.flush(20).done
        stop(daemon)
        pool = pool_of(daemon)
        go_on(daemon, client)
        daemon.kill()
        go_on(daemon, client)
        assert counter(client, "adopted_blocks") == 0
        assert not pool.exists()
        assert load(space, "a", 8) == 8
        assert counter(client, "promoted_blocks") == 8
        store(space, "b", 8)
        assert load(space, "b", 8) == 8


@pytest.mark.parametrize(
    ("point", "kept"),
    [("adoption.adopted", True), ("adoption.invalidated", False)],
)
def test_a_start_that_is_killed_keeps_the_contents_until_it_invalidates_them(
    start_daemon: Start, tmp_path: Path, until: Until, point: str, kept: bool
) -> None:
    """Before that it has granted nothing, so the index is still true; afterwards nobody uses it."""
    daemon = start_daemon(*disk_of(tmp_path))
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 8)
        assert client.flush(20).done
        stop(daemon)
        pool = pool_of(daemon)
        reached = tmp_path / "reached"
        command = [sys.executable, "-m", "kvstore", "serve", "--state", str(daemon.directory / "s")]
        second = subprocess.Popen(
            [*command, "--listen", daemon.address, *daemon.options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "KVSTORE_SYNC_POINT": f"{point}:{reached}"},
        )
        try:
            until(reached.exists, 60)
        finally:
            second.kill()
            second.wait()
        assert index_of(daemon).exists() is kept
        go_on(daemon, client)
        assert pool.exists() is kept
        assert load(space, "a", 8) == 8
        assert host_hits(client) == (8 if kept else 0)
        assert counter(client, "promoted_blocks") == (0 if kept else 8)


def test_a_start_that_fails_leaves_the_contents_for_the_next_one(daemon: Any) -> None:
    with Client(daemon.address, timeout_s=20) as client, socket.socket() as taken:
        space = client.open_space(spec_of())
        store(space, "a", 8)
        stop(daemon)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (daemon.directory / "file").touch()
        command = [sys.executable, "-m", "kvstore", "serve", "--state", str(daemon.directory / "s")]
        for options, why in (
            # Before and after the memory was adopted.
            (("--disk", str(daemon.directory / "file")), "disk"),
            (("--listen", f"127.0.0.1:{taken.getsockname()[1]}"), "cannot bind"),
        ):
            failed = subprocess.run(
                [*command, "--host-pool", "128MiB", *options],
                check=False,
                capture_output=True,
                text=True,
            )
            assert failed.returncode != 0
            assert why in failed.stderr
            assert "Traceback" not in failed.stderr
        go_on(daemon, client)
        assert load(space, "a", 8) == 8
        assert host_hits(client) == 8


def test_memory_of_a_daemon_that_was_killed_once_it_had_saved_is_used(
    daemon: Any, until: Until
) -> None:
    """Whatever it still did after saving, it gave no slot to anybody."""
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 8)
        daemon.signal(signal.SIGTERM)
        until(index_of(daemon).exists)
        daemon.kill()
        go_on(daemon, client)
        assert load(space, "a", 8) == 8
        assert host_hits(client) == 8


def flip(daemon: Any, block: int) -> None:
    """Change one byte of a block, as a fault of the memory would."""
    saved = read_host_index(index_of(daemon))
    assert saved is not None
    [space] = saved.spaces
    slot = space.blocks[block].slot
    [group] = [g for g in saved.groups if g.group == slot.group]
    path = saved.pool / f"slab-{slot.group}-0"
    offset = group.lengths[0] - (group.slots - slot.index) * group.shape.slot_bytes
    with path.open("r+b") as file:
        file.seek(offset + 4321)
        byte = file.read(1)[0]
        file.seek(offset + 4321)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_byte_is_a_miss_and_is_counted(daemon: Any) -> None:
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 12)
        stop(daemon)
        flip(daemon, 7)
        go_on(daemon, client)
        assert load(space, "a", 12) == 7
        assert counter(client, "corrupt_blocks") == 1
        assert space.lookup(chain("a", 12)[0]).miss.reason is MissReason.CORRUPT
        store(space, "a", 12)
        assert load(space, "a", 12) == 12


@pytest.mark.parametrize("what", ["empty", "garbage", "cut", "flipped"])
def test_a_damaged_index_is_an_empty_start(daemon: Any, what: str) -> None:
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 4)
        stop(daemon)
        path, pool = index_of(daemon), pool_of(daemon)
        data = path.read_bytes()
        middle = len(data) // 2
        path.write_bytes(
            {
                "empty": b"",
                "garbage": os.urandom(5000),
                "cut": data[:middle],
                "flipped": data[:middle] + bytes([data[middle] ^ 8]) + data[middle + 1 :],
            }[what]
        )
        go_on(daemon, client)
        assert log_of(daemon).count("saved contents of host memory are discarded") == 1
        assert load(space, "a", 4) == 0
        assert not pool.exists()
        assert not path.exists()


def rewrite(daemon: Any, **changes: Any) -> None:
    saved = read_host_index(index_of(daemon))
    assert saved is not None
    index_of(daemon).write_bytes(encode(replace(saved, **changes)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"machine": "another boot"}, "booted since"),
        ({"pool": Path("/dev/shm/kvstore-0-000000000000-0")}, "no pool of this state directory"),
        ({"control_inode": 1}, "not the directory that it was"),
    ],
)
def test_what_another_machine_or_pool_left_is_not_used(
    daemon: Any, changes: dict[str, Any], why: str
) -> None:
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 4)
        stop(daemon)
        pool = pool_of(daemon)
        rewrite(daemon, **changes)
        go_on(daemon, client)
        assert why in log_of(daemon)
        assert load(space, "a", 4) == 0
        assert not pool.exists()


def test_discarding_is_asked_for(daemon: Any) -> None:
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 4)
        stop(daemon)
        pool = pool_of(daemon)
        daemon.options = (*daemon.options, "--discard-host")
        go_on(daemon, client)
        assert load(space, "a", 4) == 0
        assert not pool.exists()
        assert not index_of(daemon).exists()


def test_nothing_is_kept_when_nothing_is_to_be_or_there_is_nothing(start_daemon: Start) -> None:
    daemon = start_daemon("--no-save-host")
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 4)
        [pool] = daemon._pools
        stop(daemon)
        assert not pool.exists()
        assert not index_of(daemon).exists()
        daemon.options = ("--host-pool", "128MiB")
        go_on(daemon, client)
        assert load(space, "a", 4) == 0
        stop(daemon)
        assert not any(pool.exists() for pool in daemon._pools)
