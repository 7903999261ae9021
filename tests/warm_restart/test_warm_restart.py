"""Stories of daemons that stop in order, and of what the next one serves from memory."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import Client, Keys, SpaceSpec, chain_keys
from kvstore.engine.host_index import HOST_INDEX_NAME, encode, read_host_index
from kvstore.errors import ServerUnavailable
from kvstore.miss import MissReason

Until = Callable[..., None]
Start = Callable[..., Any]

BLOCK = 1 << 20
_WORKER = Path(__file__).parents[1] / "client" / "worker.py"
SHARDS = (BLOCK, BLOCK // 2)


def spec_of(model: str = "warm", shards: tuple[int, ...] = (BLOCK,)) -> SpaceSpec:
    return SpaceSpec(model=model, dtype="d", block_tokens=4, shard_bytes=shards)


def chain(name: str, count: int, block_bytes: int = BLOCK) -> tuple[Keys, NDArray[np.uint8]]:
    """Return a chain and its bytes; equal names give equal ones."""
    rng = np.random.default_rng(list(name.encode()))
    blocks = rng.integers(0, 256, (count, block_bytes), np.uint8)
    return chain_keys(range(4 * count), 4, salt=name.encode()), blocks


def store(space: Any, name: str, count: int, block_bytes: int = BLOCK) -> None:
    keys, blocks = chain(name, count, block_bytes)
    assert space.put(keys, blocks, timeout_s=10) == count


def load(space: Any, name: str, count: int, block_bytes: int = BLOCK) -> int:
    """Return how many blocks come; whatever comes must be right."""
    keys, blocks = chain(name, count, block_bytes)
    got = space.get(keys, timeout_s=10)
    assert np.array_equal(got, blocks[: len(got)]), "a wrong byte"
    return len(got)


def host_hits(client: Client) -> int:
    [host] = [t for t in client.stats().tiers if t.tier == 2]
    return int(host.hit_blocks)


def counter(client: Client, name: str) -> int:
    return int(client.stats().counters[name])


def index_of(daemon: Any) -> Path:
    state: Path = daemon.directory / "s"
    return state / HOST_INDEX_NAME


def pool_of(daemon: Any) -> Path:
    saved = read_host_index(index_of(daemon))
    assert saved is not None
    return saved.pool


def log_of(daemon: Any) -> str:
    text: str = daemon.log.read_text()
    assert "Traceback" not in text, text
    return text


def stop(daemon: Any) -> None:
    assert daemon.stop() == 0


def go_on(daemon: Any, client: Client) -> None:
    """Start the daemon again, and wait until the client has found it."""
    daemon.start()
    client.attachment.wait_active(10)
    end = time.monotonic() + 10
    while True:
        try:
            client.hello()
        except ServerUnavailable:
            assert time.monotonic() < end
            time.sleep(0.01)
        else:
            return


def restart(daemon: Any, client: Client) -> None:
    stop(daemon)
    go_on(daemon, client)


def checked(client: Client) -> bool:
    """Return whether everything that was adopted has been compared with its digests."""
    counts = client.stats().counters
    done = counts["adopted_checked_blocks"] + counts["adopted_damaged_blocks"]
    return bool(done == counts["adopted_blocks"])


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


def disk_of(tmp_path: Path) -> tuple[str, ...]:
    return ("--disk", str(tmp_path / "disk"), "--disk-capacity", "256MiB")


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
    daemon: Any, until: Until
) -> None:
    with Client(daemon.address, timeout_s=20) as client:
        space = client.open_space(spec_of())
        store(space, "a", 8)
        stop(daemon)
        pool = pool_of(daemon)
        go_on(daemon, client)
        daemon.kill()
        go_on(daemon, client)
        assert load(space, "a", 8) == 0
        assert not pool.exists()
        store(space, "a", 8)
        assert load(space, "a", 8) == 8


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
            [sys.executable, str(_WORKER), address, "put", name, str(count)],
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
