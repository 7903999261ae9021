"""Calls that name very many keys: the loop attends to others in between, and says how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from raw_calls import Raw, RawAttachment, chain, status

from kvstore import Client, Keys, SpaceSpec, chain_keys
from kvstore.outcomes import CommitOutcome
from kvstore.proto import kvstore_pb2 as pb
from kvstore.wire import pack_chain_parents, pack_slot_names, unpack_slots

BLOCKS = 60_000
# Processor time, so that a busy machine does not count. In one go, a commit takes three times as
# much.
SLICE_SECONDS = 0.1


def _longest(server: Raw) -> float:
    return next(t.max_seconds for t in server.stats().timings if t.name == "loop_slice_cpu")


def _commit(server: Raw, space: pb.SpaceRef, writer: RawAttachment, keys: Keys) -> int:
    """Reserve and commit a chain in as few calls as may be; return how many became blocks."""
    done = 0
    for grant_id in range(1, 1000):
        count = len(keys) - done
        if not count:
            break
        reserve = pb.ReserveRequest(
            space=space, attachment_id=writer.id, grant_id=grant_id, count=count, deadline_ms=5000
        )
        slots = unpack_slots(server.kv.Reserve(reserve, timeout=30).slots)
        run = keys[done : done + len(slots)]
        commit = pb.CommitRequest(
            space=space,
            attachment_id=writer.id,
            grant_id=grant_id,
            slots=pack_slot_names(slots),
            keys=run.packed,
            parents=pack_chain_parents(run),
        )
        outcomes = server.kv.Commit(commit, timeout=30).outcomes
        assert set(outcomes) <= {CommitOutcome.COMMITTED}
        done += len(slots)
    return done


@pytest.mark.slow
def test_tens_of_thousands_of_keys_in_one_call_leave_others_their_turn(
    raw: Callable[..., Raw],
) -> None:
    server = raw("--host-pool", "256MiB", "--grant-cap", "256MiB", "--lease-cap", "256MiB")
    space = server.open("long", (16,))
    keys = chain_keys(np.arange(BLOCKS), 1)
    packed = keys.packed
    writer = RawAttachment(server)
    assert _commit(server, space, writer, keys) == BLOCKS
    kv = server.kv
    assert kv.Lookup(pb.LookupRequest(space=space, keys=packed), timeout=30).blocks == BLOCKS
    acquire = pb.AcquireRequest(space=space, keys=packed, attachment_id=writer.id, lease_id=1)
    leased = kv.Acquire(acquire, timeout=30)
    # One lease covers no more than can be made in one go; the rest is for the next one.
    assert leased.blocks == 16_384
    assert leased.miss.reason == pb.Miss.LEASE_CAP
    kv.Release(pb.ReleaseRequest(attachment_id=writer.id, lease_ids=[1]), timeout=30)
    prefetch = pb.PrefetchRequest(space=space, keys=packed, ticket_id=1, wait_ms=1)
    assert kv.Prefetch(prefetch, timeout=30).blocks == 32_768
    assert kv.Pin(pb.PinRequest(space=space, keys=packed), timeout=30).blocks == BLOCKS
    half = packed[: len(packed) // 2]
    assert kv.Unpin(pb.UnpinRequest(space=space, keys=half), timeout=30).blocks == BLOCKS // 2
    assert kv.Unpin(pb.UnpinRequest(space=space), timeout=30).blocks == BLOCKS // 2
    assert _longest(server) < SLICE_SECONDS
    # Dying with a grant of as many slots as there may be.
    kv.Evict(pb.EvictRequest(space=space), timeout=60)
    reserve = pb.ReserveRequest(space=space, attachment_id=writer.id, grant_id=9999, count=BLOCKS)
    assert len(kv.Reserve(reserve, timeout=30).slots) == 16 * 16_384
    writer.hang_up()
    writer.die()
    assert _longest(server) < SLICE_SECONDS


def test_a_long_commit_is_checked_as_a_whole_before_any_of_it_counts(
    raw: Callable[..., Raw],
) -> None:
    server = raw("--host-pool", "64MiB")
    space = server.open("checked", (16,))
    writer = RawAttachment(server)
    keys = chain_keys(np.arange(4000), 1)
    reserve = pb.ReserveRequest(
        space=space, attachment_id=writer.id, grant_id=1, count=4000, deadline_ms=5000
    )
    # More than one part of a long commit, and not more than one slab group holds.
    slots = unpack_slots(server.kv.Reserve(reserve, timeout=30).slots)
    assert len(slots) == 4000
    commit = pb.CommitRequest(
        space=space,
        attachment_id=writer.id,
        grant_id=1,
        slots=pack_slot_names(slots),
        keys=keys.packed,
        parents=pack_chain_parents(keys)[:-16],
    )
    code, said = status(lambda: server.kv.Commit(commit, timeout=30))
    assert (code, said.split(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "slots")
    # The reserved all-zero key far behind the first part.
    commit.parents = pack_chain_parents(keys)
    commit.keys = keys.packed[:-16] + bytes(16)
    code, said = status(lambda: server.kv.Commit(commit, timeout=30))
    assert (code, said.split(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "keys")
    assert server.kv.Lookup(pb.LookupRequest(space=space, keys=keys.packed)).blocks == 0
    commit.keys = keys.packed
    outcomes = server.kv.Commit(commit, timeout=30).outcomes
    assert outcomes == bytes([CommitOutcome.COMMITTED]) * 4000
    assert server.kv.Lookup(pb.LookupRequest(space=space, keys=keys.packed)).blocks == 4000


def test_slices_of_the_loop_are_counted(raw: Callable[..., Raw]) -> None:
    server = raw()
    space = server.open()
    assert server.put(space, chain("some", 4), 65536) == 4
    timings = {t.name: t for t in server.stats().timings}
    for name in ("loop_slice", "loop_slice_cpu"):
        timing = timings[name]
        # A call takes a few slices; an idle daemon looks for dead clients every 10 ms.
        assert timing.count > 4
        assert 0 < timing.p50_seconds <= timing.p95_seconds <= timing.p99_seconds
        assert timing.p99_seconds <= timing.max_seconds
    assert timings["put"].max_seconds >= timings["put"].p50_seconds > 0


def test_a_run_is_one_chain_also_over_the_wire(daemon: Any) -> None:
    """A continuation that hangs on something else is not served as if it hung there."""
    address = daemon.address
    spec = SpaceSpec(model="one chain", dtype="d", block_tokens=1, shard_bytes=(64,))
    with Client(address) as client:
        space = client.open_space(spec)
        mine, theirs = chain_keys([1, 2, 3, 4], 1), chain_keys([5, 6, 7, 8], 1)
        blocks = np.arange(4 * 64, dtype=np.uint8).reshape(4, 64)
        assert space.put(mine, blocks) == 4
        assert space.put(theirs, blocks[::-1].copy()) == 4
        assert space.lookup(mine[2:]).blocks == 2
        crossed = Keys(mine[2:].packed, 16, theirs[1])
        assert space.lookup(crossed).blocks == 0
        assert len(space.get(crossed)) == 0
        assert space.acquire(crossed).result(5).blocks == 0
        mixed = Keys(theirs[:2].packed + mine[2:].packed, 16)
        assert space.lookup(mixed).blocks == 2
        assert np.array_equal(space.get(mixed), blocks[::-1][:2])
        # Nor is it said to be there when it is stored: another chain has the key.
        assert space.put(mixed, blocks) == 2
        commits = space.reserve(1, deadline_s=5.0).result(30)
        outcome = client.attachment.commit(
            space, commits.owner_id, commits.id, None, commits.slots, mixed[2:3], [theirs[1]]
        )
        assert set(outcome.result(30)) == {CommitOutcome.KEY_MISMATCH}
    with Client(address, map_memory=False) as client:
        space = client.open_space(spec)
        assert len(space.get(crossed)) == 0
        assert np.array_equal(space.get(mixed), blocks[::-1][:2])
