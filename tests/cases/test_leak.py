"""Stories of what was taken and never given back: memory, pins, disk, descriptors."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_file_system import small_file_system
from told_blocks import bytes_of, spec_of

from kvstore import Client, SpaceSpec, chain_keys
from kvstore.client import Space
from kvstore.proto import kvstore_pb2 as pb

Until = Callable[..., None]

REPOSITORY = Path(__file__).parents[2]
HOLDER = Path(__file__).with_name("holder.py")
# Of the index in memory: about 640 bytes each, by `KVSTORE_TEST_METADATA_BLOCKS=1000000`.
METADATA_BLOCKS = int(os.environ.get("KVSTORE_TEST_METADATA_BLOCKS", "20000"))
METADATA_BYTES = 2048


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _mappings(pid: int, of: str = "/dev/shm/") -> int:
    return sum(of in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def _files(daemon: Any) -> tuple[list[str], int]:
    """Return what lies in the pool beside slabs, and the number of slabs."""
    names = sorted(path.name for pool in daemon._pools for path in pool.iterdir())
    others = [name for name in names if not name.startswith("slab-")]
    return others, len(names) - len(others)


def _disk(client: Client) -> Any:
    [tier] = [t for t in client.stats().tiers if t.tier == pb.TIER_DISK]
    return tier


@pytest.mark.parametrize("first", [None, signal.SIGSTOP])
def test_a_dead_client_s_mapping_held_memory(
    daemon: Any, until: Until, first: signal.Signals | None
) -> None:
    """Killed at once, or stopped and then killed: it leaves neither mapping nor descriptor."""
    with Client(daemon.address) as client:
        space = client.open_space(spec_of())
        assert space.put(chain_keys(range(32), 4), bytes_of(range(32))) == 8
        descriptors, (files, _) = _descriptors(daemon.pid), _files(daemon)
        holders = [
            subprocess.Popen(
                [sys.executable, str(HOLDER), daemon.address, "wait"],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
            for _ in range(2)
        ]
        try:
            for holder in holders:
                assert holder.stdout is not None
                assert holder.stdout.readline().split() == [b"8", b"6", b"0"]
                assert _mappings(holder.pid) > 0
            # That of its last read is given back a moment after the read.
            until(lambda: client.stats().leases == 10, 60)
            assert client.stats().granted_slots == 12
        finally:
            for holder in holders:
                if first is not None:
                    holder.send_signal(first)
                holder.kill()
                holder.wait()
                assert holder.stdout is not None
                holder.stdout.close()
        until(lambda: len(client.stats().clients) == 1, 60)
        stats = client.stats()
        assert (stats.leases, stats.grants, stats.granted_slots) == (0, 0, 0)
        assert (stats.stuck_slots, stats.stuck_bytes) == (0, 0)
        until(lambda: _descriptors(daemon.pid) <= descriptors, 60)
        # Whoever opens a space may have a slab made, which stays.
        until(lambda: _mappings(daemon.pid) == _files(daemon)[1], 60)
        assert _files(daemon)[0] == files


@pytest.mark.slow
def test_disk_never_reclaimed_and_full_then_it_recovers_without_a_restart(
    start_daemon: Any, tmp_path: Path, until: Until
) -> None:
    """Somebody else fills the file system: serving goes on, the tier says so, and comes back."""
    with small_file_system(tmp_path) as (small, kind):
        daemon = start_daemon("--disk", str(small / "kv"), "--disk-capacity", "40MiB")
        early, late = list(range(400)), list(range(10_000, 12_000))
        with Client(daemon.address) as client:
            space = client.open_space(spec_of())
            _store(space, early)
            answer = client.flush(60)
            assert answer.done
            assert not answer.skipped_blocks
            # On disk only, where it must stay: the others may not have its room.
            assert space.evict(chain_keys(early, 4), "host").copies == 100
            assert space.pin(chain_keys(early, 4)) == 100
            held = _fill(small / "somebody-else")
            _store(space, late)
            answer = client.flush(60)
            assert len(answer.skipped_blocks) > 0, f"{kind} has room that it did not say"
            assert _disk(client).state.startswith("degraded: ")
            # What is on disk is served from there, what is not from memory.
            _check(space, early)
            _check(space, late)
            # Somebody gives the room back.
            os.close(held)
            (small / "somebody-else").unlink()
            until(lambda: not client.flush(60).skipped_blocks, 60)
            until(lambda: _disk(client).state == "ok", 60)
            assert space.evict(chain_keys(late, 4), "host").copies == 500
            _check(space, late)
            assert space.unpin() == 100
            # More than fits: the coldest chains leave the disk, nothing grows beyond its limit.
            for turn in range(4):
                more = list(range(20_000 + 1000 * turn, 20_000 + 1000 * turn + 1000))
                _store(space, more)
                client.flush(60)
                _check(space, more[:100])
            assert _disk(client).evicted_blocks > 0
            assert _disk(client).allocated_bytes <= 40 << 20
        assert daemon.stop() == 0
        names = [path.name for path in (small / "kv").iterdir()]
        orphans = [n for n in names if not re.fullmatch(r"seg-\d{6}\.kvs|store-id|lock", n)]
        assert not orphans
        taken = sum(path.stat().st_blocks * 512 for path in (small / "kv").iterdir())
        assert taken <= 41 << 20


def _store(space: Space, tokens: list[int]) -> None:
    keys = chain_keys(tokens, 4)
    assert space.put(keys, bytes_of(tokens), timeout_s=60.0) == len(keys)


def _check(space: Space, tokens: list[int]) -> None:
    got = space.get(chain_keys(tokens, 4), timeout_s=60.0)
    assert np.array_equal(got, bytes_of(tokens))


def _fill(path: Path) -> int:
    """Take all the room that there is; return the open file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    size = 0
    for step in (1 << 20, 1 << 16, 1 << 12):
        with contextlib.suppress(OSError):
            while True:
                os.posix_fallocate(fd, size, step)
                size += step
    return fd


@pytest.mark.slow
def test_metadata_grew_and_descriptors_leaked(start_daemon: Any, tmp_path: Path) -> None:
    """Bytes of the daemon's memory per block on disk; open files do not follow the blocks."""
    size = METADATA_BLOCKS * 4096
    daemon = start_daemon(
        *("--host-pool", "64MiB", "--disk", str(tmp_path / "disk")),
        *("--disk-capacity", str(size + (64 << 20))),
    )
    spec = SpaceSpec(model="small", dtype="d", block_tokens=1, shard_bytes=(64,))
    with Client(daemon.address, timeout_s=60) as client:
        space = client.open_space(spec)
        sizes: list[tuple[int, int, int]] = []
        step = METADATA_BLOCKS // 4
        for turn in range(4):
            keys = chain_keys(np.arange(turn * step, (turn + 1) * step), 1)
            rows = np.arange(step * 64, dtype=np.uint32).astype(np.uint8).reshape(step, 64)
            for at in range(0, step, 8000):
                part = keys[at : at + 8000]
                assert space.put(part, rows[at : at + len(part)], timeout_s=120.0) == len(part)
                assert client.flush(120).done
            blocks = _disk(client).blocks
            sizes.append((blocks, _own_memory(daemon.pid), _descriptors(daemon.pid)))
        print([(b, f"{m >> 20} MiB", f"{d} files") for b, m, d in sizes])
        assert sizes[-1][0] == METADATA_BLOCKS
        grown = (sizes[-1][1] - sizes[0][1]) / (sizes[-1][0] - sizes[0][0])
        print(f"{grown:.0f} bytes of memory a block on disk")
        assert grown < METADATA_BYTES
        # One segment file is opened after the other, within a bound; no file per block.
        assert sizes[-1][2] - sizes[0][2] < 70


def _own_memory(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")
