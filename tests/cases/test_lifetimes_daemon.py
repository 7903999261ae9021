"""Who may read and write, and for how long, whatever becomes of the process: a real daemon."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_calls import MIB, Raw, RawAttachment
from raw_calls import chain as packed_chain
from told_blocks import bytes_of, spec_of

from kvstore import Client, chain_keys
from kvstore.miss import MissReason
from kvstore.outcomes import Shortage
from kvstore.proto import kvstore_pb2 as pb

Until = Callable[..., None]

HOLDER = Path(__file__).with_name("holder.py")
TOKENS = range(32)


class Holder:
    """A `holder.py`, and what it left behind."""

    def __init__(self, address: str, then: str, *before: str) -> None:
        self._process = subprocess.Popen(
            [*before, sys.executable, str(HOLDER), address, then],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline().split()
        assert len(said) == 3, self._process.communicate()[1]
        blocks, slots, left = (int(word) for word in said)
        assert (blocks, slots) == (8, 6)
        self.left = left

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self.kill()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        if self.left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.left, signal.SIGKILL)


@pytest.fixture
def hold(daemon: Any) -> Iterator[Callable[..., Holder]]:
    """Return a function that starts a holder and waits until it holds."""
    with Client(daemon.address) as client:
        space = client.open_space(spec_of())
        assert space.put(chain_keys(TOKENS, 4), bytes_of(TOKENS)) == 8
    started: list[Holder] = []

    def start(*arguments: str) -> Holder:
        started.append(Holder(daemon.address, *arguments))
        return started[-1]

    yield start
    for holder in started:
        holder.end()


def _nothing_held(client: Client) -> bool:
    stats = client.stats()
    return (stats.leases, stats.grants, stats.granted_slots, stats.stuck_slots) == (0, 0, 0, 0)


def test_a_process_that_becomes_another_program_holds_nothing(
    daemon: Any, hold: Callable[..., Holder], until: Until
) -> None:
    with Client(daemon.address) as client:
        hold("exec")
        until(lambda: _nothing_held(client), 60)


@pytest.mark.parametrize("kind", ["fork", "child"])
def test_a_child_left_behind_holds_nothing_of_its_dead_parent(
    daemon: Any, hold: Callable[..., Holder], until: Until, kind: str
) -> None:
    with Client(daemon.address) as client:
        holder = hold(kind)
        assert client.stats().granted_slots == 6
        holder.kill()
        until(lambda: _nothing_held(client), 60)
        os.kill(holder.left, 0)  # it is alive all the while


def test_a_process_in_a_pid_namespace_of_its_own(
    daemon: Any, hold: Callable[..., Holder], until: Until
) -> None:
    """Its pid means nothing out here: the lock does."""
    unshare = [shutil.which("unshare") or "unshare", "--pid", "--fork", "--kill-child"]
    try:
        able = subprocess.run([*unshare, "true"], capture_output=True, timeout=60, check=False)
        why = able.stderr.decode().strip() if able.returncode else ""
    except OSError as error:
        why = str(error)
    if why:
        pytest.skip(f"no pid namespaces here: {why}")
    with Client(daemon.address) as client:
        holder = hold("wait", *unshare)
        [there] = [c for c in client.stats().clients if c.client == "holder"]
        assert there.pid == 1
        assert (there.leases, there.granted_slots) == (5, 6)
        holder.kill()
        until(lambda: _nothing_held(client), 60)


def test_a_stopped_writer_keeps_its_slots_and_loses_its_leases(
    start_daemon: Any, until: Until
) -> None:
    daemon = start_daemon("--lease-ttl", "1", "--heartbeat", "0.2")
    with Client(daemon.address) as client:
        space = client.open_space(spec_of())
        assert space.put(chain_keys(TOKENS, 4), bytes_of(TOKENS)) == 8
        holder = Holder(daemon.address, "wait")
        try:
            os.kill(holder._process.pid, signal.SIGSTOP)
            until(lambda: client.stats().leases == 0, 60)
            until(lambda: client.stats().stuck_slots == 6, 60)
            stats = client.stats()
            assert stats.stuck_bytes == 6 * spec_of().block_bytes
            [there] = [c for c in stats.clients if c.client == "holder"]
            assert there.state == "silent"
            holder.kill()
            until(lambda: _nothing_held(client), 60)
        finally:
            holder.end()


def test_releases_that_come_twice_or_from_somebody_else_end_nothing_of_others(
    start_daemon: Any,
) -> None:
    raw = Raw(start_daemon())
    space = raw.open()
    keys = packed_chain("c", 4)
    assert raw.put(space, keys, 65536) == 4
    one, other = RawAttachment(raw), RawAttachment(raw)

    def acquire(holder: RawAttachment, lease_id: int) -> int:
        request = pb.AcquireRequest(
            attachment_id=holder.id, space=space, keys=keys, lease_id=lease_id
        )
        return int(raw.kv.Acquire(request, timeout=30).blocks)

    def release(holder: RawAttachment, *ids: int) -> None:
        raw.kv.Release(pb.ReleaseRequest(attachment_id=holder.id, lease_ids=ids), timeout=30)

    # The same number in two hands is two leases.
    assert acquire(one, 7) == acquire(other, 7) == acquire(one, 8) == 4
    assert raw.stats().leases == 3
    release(other, 8)
    assert raw.stats().leases == 3
    release(one, 7, 7)
    release(one, 7)
    assert raw.stats().leases == 2
    # What is leased stays: nobody's double release has freed it.
    evict = pb.EvictRequest(space=space, tier=pb.TIER_HOST)
    assert raw.kv.Evict(evict, timeout=30).copies == 0
    release(other, 7)
    release(one, 8)
    assert raw.stats().leases == 0
    assert raw.kv.Evict(evict, timeout=30).copies == 4
    one.die()
    other.die()
    raw.close()


def test_one_client_can_hold_no_more_than_its_caps(start_daemon: Any) -> None:
    daemon = start_daemon("--lease-cap", "256KiB", "--grant-cap", "256KiB")
    with Client(daemon.address) as greedy, Client(daemon.address) as other:
        space = greedy.open_space(spec_of())
        assert greedy.attachment.wait_active(30)
        keys = chain_keys(TOKENS, 4)
        assert space.put(keys, bytes_of(TOKENS)) == 8  # in pieces
        lease = space.acquire(keys).result(30)
        assert (lease.blocks, lease.miss.reason) == (4, MissReason.LEASE_CAP)
        second = space.acquire(keys).result(30)
        assert (second.blocks, second.miss.reason) == (0, MissReason.LEASE_CAP)
        grant = space.reserve(8, deadline_s=1.0).result(30)
        assert (len(grant.slots), grant.shortage) == (4, Shortage.CLIENT_CAP)
        more = space.reserve(1).result(30)
        assert (len(more.slots), more.shortage) == (0, Shortage.CLIENT_CAP)
        # The others have caps of their own.
        theirs = other.open_space(spec_of())
        assert other.attachment.wait_active(30)
        held = theirs.acquire(keys).result(30)
        assert held.blocks == 4
        held.release()
        assert len(theirs.reserve(4, deadline_s=1.0).result(30).slots) == 4
        assert np.array_equal(theirs.get(keys), bytes_of(TOKENS))


def test_slabs_are_given_back_only_after_every_attachment_has_unmapped_them(
    start_daemon: Any, until: Until
) -> None:
    daemon = start_daemon("--host-pool", "96MiB", "--lease-ttl", "1", "--heartbeat", "0.2")
    raw = Raw(daemon)
    space = raw.open(shards=(MIB,))
    keys = packed_chain("c", 60)
    assert raw.put(space, keys, MIB) > 40
    [pool] = daemon._pools

    def slabs() -> int:
        return sum(path.stat().st_size for path in pool.glob("slab-*"))

    before = slabs()
    deaf = RawAttachment(raw)  # is told of the slabs, and never says that it unmapped one
    shrink = pb.SetCapacityRequest(tier=pb.TIER_HOST, bytes=32 * MIB, deadline_ms=1)
    assert not raw.admin.SetCapacity(shrink, timeout=60).done
    with Client(daemon.address) as client:
        # It serves meanwhile; the deaf client falls silent, which gives nobody its memory.
        until(lambda: "silent" in [c.state for c in client.stats().clients], 60)
        assert client.stats().tiers[0].capacity_bytes == 32 * MIB
    deaf.hang_up()  # the stream is gone, the lock is not
    with Client(daemon.address) as client:
        until(lambda: "presumed dead" in [c.state for c in client.stats().clients], 60)
    assert slabs() >= before  # one may have been in the making
    deaf.die()
    until(lambda: slabs() <= 33 * MIB, 60)
    raw.close()
