"""Stories of processes that stop, die, fork and restart in the middle of something."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.typing import NDArray

from kvstore import (
    Client,
    ClientClosed,
    DeadlineExceeded,
    Keys,
    ServerUnavailable,
    SpaceSpec,
    StaleEpoch,
    chain_keys,
)
from kvstore.attach import Lease
from kvstore.errors import AttachmentLost
from kvstore.miss import MissReason

Until = Callable[..., None]

# Shared with the processes that run it as a program; the test directories are no package.
_WORKER = Path(__file__).with_name("worker.py")
_spec = importlib.util.spec_from_file_location("client_worker", _WORKER)
assert _spec is not None
assert _spec.loader is not None
_worker: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_worker)
SPEC: SpaceSpec = _worker.SPEC
chain: Callable[[str, int], tuple[Keys, NDArray[np.uint8]]] = _worker.chain


class Worker:
    """A `worker.py` that holds at a sync point."""

    def __init__(self, directory: Path, point: str, *arguments: str) -> None:
        self._point = directory / "point"
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), *arguments],
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "KVSTORE_SYNC_POINT": f"{point}:{self._point}",
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            text=True,
        )
        self.pid = self._process.pid

    @property
    def there(self) -> bool:
        """Whether it waits at its point."""
        return self._point.exists()

    def go(self) -> None:
        """Let it go on."""
        self._point.with_name("point.go").touch()

    def result(self) -> tuple[int, bool]:
        """Return what it printed."""
        out, _ = self._process.communicate(timeout=30)
        blocks, right = out.split()
        return int(blocks), right == "True"

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Return a function that starts a worker and waits until it is at its sync point."""
    started: list[Worker] = []

    def start(until: Until, point: str, *arguments: str) -> Worker:
        made = Worker(tmp_path, point, *arguments)
        started.append(made)
        until(lambda: made.there, 20)
        return made

    yield start
    for made in started:
        made.end()


def stored(space: Any, name: str, count: int) -> int:
    keys, blocks = chain(name, count)
    put: int = space.put(keys, blocks, timeout_s=10.0)
    return put


def right(space: Any, name: str, count: int) -> int:
    """Return how many blocks come back; all of them must be right."""
    keys, blocks = chain(name, count)
    got = space.get(keys, timeout_s=30.0)
    assert np.array_equal(got, blocks[: len(got)])
    return len(got)


def test_half_written_key_blocks_nobody_when_its_writer_is_killed(
    daemon: Any, hold: Callable[..., Worker], until: Until
) -> None:
    writer = hold(until, "put.copied_half", daemon.address, "put", "story", "8")
    with Client(daemon.address) as client:
        space = client.open_space(SPEC)
        assert right(space, "story", 8) == 0
        # The same keys at once, while the other still holds its slots.
        assert stored(space, "story", 8) == 8
        assert client.stats().granted_slots == 8
        os.kill(writer.pid, signal.SIGKILL)
        until(lambda: client.stats().granted_slots == 0, 3)
        assert right(space, "story", 8) == 8


@pytest.mark.parametrize("point", ["put.copied_half", "put.before_commit"])
def test_a_block_is_committed_only_after_its_fill_has_finished(
    daemon: Any, hold: Callable[..., Worker], until: Until, point: str
) -> None:
    """`put` is the only way to fill and commit without naming slots: nothing shows before."""
    writer = hold(until, point, daemon.address, "put", "filling", "8")
    with Client(daemon.address) as client:
        space = client.open_space(SPEC)
        keys = chain("filling", 8)[0]
        assert space.lookup(keys).blocks == 0
        assert len(space.get(keys)) == 0
        assert client.stats().counters.get("stored_blocks", 0) == 0
        writer.go()
        assert writer.result() == (8, True)
        assert right(space, "filling", 8) == 8


def test_slots_of_a_stopped_writer_are_nobody_else_s(
    start_daemon: Any, hold: Callable[..., Worker], until: Until
) -> None:
    daemon = start_daemon("--lease-ttl", "1", "--heartbeat", "0.2", "--host-pool", "64MiB")
    writer = hold(until, "put.copied_half", daemon.address, "put", "stopped", "8")
    os.kill(writer.pid, signal.SIGSTOP)
    with Client(daemon.address) as client:
        space = client.open_space(SPEC)
        until(lambda: client.stats().stuck_slots == 8, 10)
        # Others use all the rest, several times over.
        for turn in range(4):
            assert stored(space, f"other{turn}", 40) == 40
            assert right(space, f"other{turn}", 40) == 40
        os.kill(writer.pid, signal.SIGCONT)
        writer.go()
        written, _ = writer.result()
        # It wrote into its own slots; what it says is there is there, byte by byte.
        assert right(space, "other3", 40) == 40
        assert right(space, "stopped", 8) == written
        until(lambda: client.stats().granted_slots == 0, 3)


def test_lease_expired_during_a_slow_read_slot_reused_never_other_bytes(
    start_daemon: Any, hold: Callable[..., Worker], until: Until
) -> None:
    daemon = start_daemon("--lease-ttl", "1", "--heartbeat", "0.2", "--host-pool", "64MiB")
    with Client(daemon.address) as client:
        space = client.open_space(SPEC)
        assert stored(space, "read", 16) == 16
        reader = hold(until, "get.copied_half", daemon.address, "get", "read", "16")
        assert client.stats().leases == 1
        os.kill(reader.pid, signal.SIGSTOP)
        until(lambda: client.stats().leases == 0, 10)
        for turn in range(3):
            assert stored(space, f"other{turn}", 44) == 44
        assert right(space, "read", 16) < 16
        os.kill(reader.pid, signal.SIGCONT)
        reader.go()
        blocks, right_bytes = reader.result()
        assert right_bytes
        assert blocks < 16


@pytest.mark.parametrize("first", [None, signal.SIGSTOP])
def test_worker_killed_or_stopped_with_copies_queued_health_answers_leases_go(
    daemon: Any, hold: Callable[..., Worker], until: Until, first: signal.Signals | None
) -> None:
    with Client(daemon.address) as client, grpc.insecure_channel(daemon.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        space = client.open_space(SPEC)
        assert stored(space, "read", 4) == 4
        reader = hold(until, "get.copied_half", daemon.address, "get", "read", "4")
        assert client.stats().leases == 1
        if first is not None:
            os.kill(reader.pid, first)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=30).status == serving
        os.kill(reader.pid, signal.SIGKILL)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=30).status == serving
        until(lambda: client.stats().leases == 0, 60)
        assert right(space, "read", 4) == 4


def test_server_killed_during_a_load_gives_a_short_run_never_garbled(
    daemon: Any, hold: Callable[..., Worker], until: Until
) -> None:
    with Client(daemon.address) as client:
        assert stored(client.open_space(SPEC), "read", 8) == 8
        reader = hold(until, "get.copied_half", daemon.address, "get", "read", "8")
        daemon.kill()
        time.sleep(0.05)  # the reader's stream breaks while it is in the copy
        reader.go()
        assert reader.result()[1]


def test_fork_after_grpc_was_used_child_gets_an_error_parent_unaffected(
    daemon: Any, until: Until
) -> None:
    with Client(daemon.address, name="parent") as client:
        space = client.open_space(SPEC)
        assert stored(space, "fork", 4) == 4
        grant = space.reserve(3).result(5)
        assert len(grant.slots) == 3
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            said = "nothing"
            try:
                space.lookup(chain("fork", 1)[0])
            except ClientClosed as error:
                said = str(error)
            locks = [fd for fd in Path("/proc/self/fd").iterdir() if _is_control(fd)]
            signal.alarm(60)
            os.write(writable, f"{said}; {len(locks)} locks".encode())
            signal.pause()  # stays, as a data loader's worker would
            os._exit(0)
        try:
            os.close(writable)
            said = os.read(readable, 1000).decode()
            os.close(readable)
            assert "forked" in said
            assert said.endswith("; 0 locks")
            assert right(space, "fork", 4) == 4
            assert client.attachment.alive
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_fork_that_cleans_up_unmaps_nothing_of_its_own(daemon: Any) -> None:
    client = Client(daemon.address)
    space = client.open_space(SPEC)
    assert stored(space, "fork", 4) == 4
    slots = space.acquire(chain("fork", 1)[0]).result(5)
    with client.attachment.using(slots.slots, boot_id=slots.boot_id) as held:
        address = int(held.addresses(0)[0])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(20)  # a child that hangs must not outlive the test
            # The pool's mappings are left out of the child: this takes the hole.
            taken = _take(address, 1 << 16)
            client.close()
            del client, space, slots, held
            gc.collect()
            ctypes.memset(taken, 7, 1 << 16)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert right(space, "fork", 4) == 4
    client.close()


def _take(address: int, length: int) -> int:
    """Map anonymous memory exactly there; fail where something is mapped."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    taken: int = libc.mmap(address, length, 3, 0x02 | 0x20 | 0x100000, -1, 0)
    assert taken == address
    return taken


def _is_control(fd: Path) -> bool:
    with contextlib.suppress(OSError):
        return fd.readlink().name == "control"
    return False


def test_a_client_survives_a_daemon_that_crashes_and_comes_back(daemon: Any, until: Until) -> None:
    with Client(daemon.address) as client:
        space = client.open_space(SPEC)
        assert stored(space, "crash", 8) == 8
        assert right(space, "crash", 8) == 8
        attachment = client.attachment
        first = attachment.boot_id
        slots = space.acquire(chain("crash", 8)[0]).result(5).slots
        assert _mappings() > 0
        daemon.kill()
        until(lambda: not attachment.alive, 5)
        until(lambda: _mappings() == 0)
        with pytest.raises(ServerUnavailable, match="no daemon answers at unix:"):
            space.lookup(chain("crash", 8)[0])
        daemon.start()
        assert attachment.wait_active(10)
        assert attachment.boot_id != first
        # Memory of the first run means nothing to the second.
        with pytest.raises(AttachmentLost):
            attachment.using(slots, boot_id=first)
        assert right(space, "crash", 8) == 0
        assert stored(space, "crash", 8) == 8
        assert right(space, "crash", 8) == 8


def _mappings() -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("kvstore" in line and "/dev/shm/" in line for line in maps)


def test_a_handle_reads_on_after_a_restart_in_order(
    start_daemon: Any, tmp_path: Path, until: Until
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    daemon = start_daemon("--disk", str(disk), "--disk-capacity", "128MiB")
    with Client(daemon.address) as client:
        space = client.open_space(SPEC)
        assert stored(space, "kept", 8) == 8
        assert daemon.stop() == 0
        until(lambda: not client.attachment.alive, 5)
        daemon.start()
        assert client.attachment.wait_active(10)
        assert right(space, "kept", 8) == 8


def test_a_daemon_that_stalls_costs_the_timeout_and_no_more(daemon: Any, until: Until) -> None:
    with Client(daemon.address, timeout_s=0.5) as client:
        space = client.open_space(SPEC)
        assert stored(space, "stall", 4) == 4
        first = client.attachment.id
        daemon.signal(signal.SIGSTOP)
        try:
            keys = chain("stall", 4)[0]
            for call in (
                lambda: space.lookup(keys),
                lambda: space.get(keys, timeout_s=0.1),
                lambda: space.acquire(keys).result(5),
            ):
                began = time.monotonic()
                with pytest.raises(DeadlineExceeded):
                    call()
                assert time.monotonic() - began < 3
        finally:
            daemon.signal(signal.SIGCONT)
        assert right(space, "stall", 4) == 4
        assert client.attachment.id == first
        # The lease that nobody waited for was given back.
        until(lambda: client.stats().leases == 0)


@pytest.mark.parametrize("why", ["another machine", "another user", "a lock in the way"])
def test_a_client_that_cannot_map_the_pool_streams(
    daemon: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.attach import attachment, incarnation

    if why == "another machine":
        monkeypatch.setattr(attachment, "machine_id", lambda: "elsewhere")
    elif why == "a lock in the way":
        monkeypatch.setattr(incarnation, "lock_byte", lambda _fd, _offset: False)
    else:
        opened = os.open

        def forbidden(path: Any, *arguments: Any, **named: Any) -> int:
            if str(path).endswith("/control"):
                raise PermissionError(13, "Permission denied")
            return opened(path, *arguments, **named)

        monkeypatch.setattr(os, "open", forbidden)
    with Client(daemon.address) as client:
        space = client.open_space(SPEC)
        before = _mappings()
        assert stored(space, "stream", 5) == 5
        assert right(space, "stream", 7) == 5
        assert not client.attachment.mappable
        assert not client.attachment.alive
        assert _mappings() == before
        with pytest.raises(AttachmentLost, match="cannot be mapped"):
            space.acquire(chain("stream", 1)[0]).result(5)
        assert [c.state for c in client.stats().clients] == ["active"]


def test_a_writer_named_by_an_attachment_that_ended_may_not_write(
    daemon: Any, until: Until
) -> None:
    with Client(daemon.address) as client:
        space = client.open_space(SPEC)
        assert client.attachment.wait_active(10)
        grant = space.reserve(1).result(5)
        with pytest.raises(AttachmentLost, match="attachment that ended"):
            client.attachment.using(
                grant.slots, boot_id=grant.boot_id, writer_id=grant.owner_id + 1
            )
        with client.attachment.using(
            grant.slots, boot_id=grant.boot_id, writer_id=grant.owner_id
        ) as held:
            assert held.current(0).all()


def test_closing_gives_everything_back_at_once(daemon: Any, until: Until) -> None:
    with Client(daemon.address) as watcher:
        client = Client(daemon.address)
        space = client.open_space(SPEC)
        assert stored(space, "close", 4) == 4
        lease = space.acquire(chain("close", 4)[0]).result(5)
        grant = space.reserve(2).result(5)
        assert (lease.blocks, len(grant.slots)) == (4, 2)
        stats = watcher.stats()
        assert (stats.leases, stats.granted_slots) == (1, 2)
        client.close()
        client.close()
        stats = watcher.stats()
        assert (stats.leases, stats.granted_slots, len(stats.clients)) == (0, 0, 0)
        assert lease.lost
        for call in (lambda: right(space, "close", 4), client.hello, lambda: client.attachment):
            with pytest.raises(ClientClosed):
                call()


def test_abort_between_lookup_and_load_ten_thousand_times_keeps_no_pin(
    daemon: Any, until: Until
) -> None:
    with Client(daemon.address) as client:
        space = client.open_space(SPEC)
        assert stored(space, "leases", 2) == 2
        keys = chain("leases", 2)[0]
        for _ in range(20):
            asked = [space.acquire(keys) for _ in range(500)]
            for pending in asked:
                pending.add_done_callback(lambda it: it.result().release())
            leases = [pending.result(20) for pending in asked]
            assert leases[0].blocks == 2
            # All of them at once are beyond what one client may hold.
            short = {it.miss.reason for it in leases if it.blocks < 2}
            assert short <= {MissReason.LEASE_CAP}
            # Else releases on their way count against the next round's first lease.
            until(lambda: client.stats().leases == 0)
        assert client.stats().clients[0].leased_bytes == 0


def test_a_cold_run_grows_while_it_is_read(start_daemon: Any, tmp_path: Path, until: Until) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    daemon = start_daemon("--disk", str(disk), "--disk-capacity", "128MiB")
    with Client(daemon.address) as client:
        space = client.open_space(SPEC)
        assert stored(space, "cold", 24) == 24
        assert client.flush(20).done
        keys, blocks = chain("cold", 24)
        assert space.evict(keys, "host").copies == 24
        assert set(space.lookup(keys).tiers) == {"disk"}
        assert space.acquire(keys).result(5).blocks == 0
        lease: Lease = space.acquire(keys, deadline_s=10.0).result(5)
        sizes: list[int] = []
        lease.on_change(lambda it: sizes.append(it.blocks))
        assert lease.wait(10) == 24
        assert not lease.growing
        assert sizes == sorted(sizes)
        assert set(lease.tiers) == {3}
        lease.release()
        until(lambda: not space.evict(keys, "host").skipped)
        assert np.array_equal(space.get(keys, timeout_s=10.0), blocks)
        until(lambda: not space.evict(keys, "host").skipped)
        ticket = space.prefetch(keys, deadline_s=10.0)
        assert ticket.wait() == 24
        assert set(space.lookup(keys).tiers) == {"host"}
        ticket.cancel()


def test_slabs_that_change_their_slot_size_are_unmapped_by_their_clients(daemon: Any) -> None:
    small = SpaceSpec(model="small", dtype="d", block_tokens=4, shard_bytes=(3 << 16,))
    with Client(daemon.address) as client:
        space, other = client.open_space(SPEC), client.open_space(small)
        filled = stored(space, "many", 120)
        assert filled > 64
        assert right(space, "many", 120) == filled
        before = _mappings()
        keys, blocks = chain_keys(range(4 * 300), 4), chain("bytes", 60)[1]
        small_blocks = blocks.reshape(-1)[: 300 * (3 << 16)].reshape(300, 3 << 16)
        assert other.put(keys, small_blocks, timeout_s=20.0) == 300
        assert np.array_equal(other.get(keys), small_blocks)
        assert right(space, "many", 120) < filled
        # Slabs came, but not on top of those that left.
        assert _mappings() <= before + 2


def test_an_epoch_that_ended_is_not_served_again(daemon: Any) -> None:
    with Client(daemon.address) as client, Client(daemon.address) as other:
        old, elsewhere = client.open_space(SPEC), other.open_space(SPEC)
        assert stored(old, "epoch", 4) == 4
        assert other.attachment.wait_active(10)
        lease = elsewhere.acquire(chain("epoch", 4)[0]).result(5)
        new = old.bump_epoch()
        assert lease.wait(5) == 4
        for stale in (old, elsewhere):
            with pytest.raises(StaleEpoch):
                stale.lookup(chain("epoch", 4)[0])
            with pytest.raises(StaleEpoch):
                stored(stale, "epoch", 4)
        assert right(new, "epoch", 4) == 0
        assert new.lookup(chain("epoch", 4)[0]).miss.reason in (
            MissReason.OTHER_EPOCH,
            MissReason.NEVER_SEEN,
            MissReason.FORGOTTEN,
            MissReason.EVICTED,
        )
        assert stored(new, "epoch", 4) == 4


def test_what_clients_did_is_in_the_daemon_s_numbers(daemon: Any, until: Until) -> None:
    with Client(daemon.address) as watcher:
        with Client(daemon.address) as client:
            space = client.open_space(SPEC)
            assert stored(space, "usage", 4) == 4
            assert right(space, "usage", 6) == 4
            client.report_usage(space, local_tokens=5, load_failures=1)
        usage = watcher.stats().usage
        assert (usage.requests, usage.prompt_tokens, usage.reused_tokens_host) == (1, 24, 16)
        assert (usage.local_tokens, usage.load_failures) == (5, 1)
        assert usage.stored_bytes == usage.loaded_bytes == 4 * SPEC.block_bytes


def test_a_prompt_of_two_million_tokens(daemon: Any, until: Until) -> None:
    spec = SpaceSpec(model="long", dtype="d", block_tokens=16, shard_bytes=(16,))
    keys = chain_keys(np.arange(2_000_000), 16)
    assert len(keys) * 32 > 3 << 20
    with Client(daemon.address, timeout_s=30) as client:
        space = client.open_space(spec)
        blocks = np.arange(1000 * 16, dtype=np.uint32).view(np.uint8)[: 1000 * 16]
        assert space.put(keys[:1000], blocks.reshape(1000, 16)) == 1000
        assert space.lookup(keys).blocks == 1000
        assert np.array_equal(space.get(keys[:1001]), blocks.reshape(1000, 16))
        assert space.pin(keys) == 1000
        assert space.unpin(keys) == 1000
        until(lambda: not space.evict(keys).skipped)
        assert space.lookup(keys).blocks == 0
