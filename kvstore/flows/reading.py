"""Reading blocks: lease a window, copy it out, compare generations, release."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Final

import numpy as np

from kvstore.attach import Lease
from kvstore.errors import AttachmentLost, KVStoreError, StaleEpoch
from kvstore.flows.base import LATE_SECONDS, Deadline, FlowsBase, milliseconds, parts, pauses
from kvstore.keys import Keys
from kvstore.miss import MissReason
from kvstore.proto import kvstore_pb2 as pb
from kvstore.rows import Rows
from kvstore.steps import Await, Flow, Grow, Pause, Receive, Work
from kvstore.wire import pack_run_parent, tier_name

__all__ = ["Reading"]

# Ends of a run that may be gone once this client's own leases are released.
_CROWDED: Final = {MissReason.LEASE_CAP, MissReason.NO_ROOM}


class Reading(FlowsBase):
    """The flow of `get`."""

    def get(self, keys: Keys, out: Rows, timeout_s: float) -> Flow[int]:
        """Copy the longest leading run that can be had into `out`; return its length."""
        if not len(keys):
            return 0
        deadline = Deadline(timeout_s)
        # Blocks that are read and checked, by the tier that held them.
        reused: dict[str, int] = {}
        for last_try in (False, True):
            at = sum(reused.values())
            try:
                if not (yield from self._mapped(deadline)):
                    yield from self._get_streamed(keys, at, out, deadline, reused)
                else:
                    yield from self._get_mapped(keys, at, out, deadline, reused)
                break
            except StaleEpoch:
                raise
            except AttachmentLost:
                if not last_try and deadline.left:
                    continue
                if not reused:
                    raise
            except KVStoreError:
                # What was read and checked stays right, whatever becomes of the daemon.
                if not reused:
                    raise
                break
        self._report(len(keys), reused)
        if reused:
            self._attachment.times.add("load", deadline.spent)
        return sum(reused.values())

    def _report(self, asked: int, reused: dict[str, int]) -> None:
        tokens = self._space.spec.block_tokens
        self._attachment.usage.add(
            self._space.ref,
            requests=1,
            prompt_tokens=asked * tokens,
            loaded_bytes=sum(reused.values()) * self._block_bytes,
            **{f"reused_tokens_{tier}": blocks * tokens for tier, blocks in reused.items()},
        )

    def _get_mapped(
        self, keys: Keys, at: int, out: Rows, deadline: Deadline, reused: dict[str, int]
    ) -> Flow[None]:
        size = self._window()
        tries = pauses()
        lease: Lease | None = None
        pending: Future[Lease] | None = None
        try:
            while at < len(keys):
                if pending is None:
                    pending = self._acquire(keys[at : at + size], deadline)
                lease = yield Await(pending, self._timeout_s + LATE_SECONDS)
                pending = None
                end = min(at + size, len(keys))
                if end < len(keys):
                    pending = self._acquire(keys[end : end + size], deadline)
                got = yield from self._read(lease, out, at, end - at, deadline)
                for tier in lease.tiers[:got].ljust(got, b"\0"):
                    _count(reused, tier_name(tier))
                lease.release()
                at += got
                if at == end:
                    continue
                if pending is not None:
                    pending.add_done_callback(_release_when_there)
                    pending = None
                if lease.miss.reason not in _CROWDED or not (got or deadline.left):
                    return
                if not got:
                    yield Pause(next(tries))
        finally:
            if lease is not None:
                lease.release()
            if pending is not None:
                pending.add_done_callback(_release_when_there)

    def _acquire(self, keys: Keys, deadline: Deadline) -> Future[Lease]:
        return self._attachment.acquire(self._space, keys, deadline_s=deadline.left)

    def _read(self, lease: Lease, out: Rows, at: int, wanted: int, deadline: Deadline) -> Flow[int]:
        """Copy a lease's blocks as they come; return how many were there throughout."""
        done = 0
        while done < wanted:
            have = min(lease.blocks, wanted)
            if have > done:
                good: int = yield Work(partial(self._copy_out, lease, done, have, out, at))
                done += good
                if done < have:
                    return done
            elif lease.growing and deadline.left:
                yield Grow(lease, done, deadline.left + LATE_SECONDS)
            else:
                return done
        return done

    def _copy_out(self, lease: Lease, first: int, end: int, out: Rows, at: int) -> int:
        """Copy blocks first … end of a lease to rows at + first …; return the good leading run."""
        slots = lease.slots[first:end]
        rows = out.addresses[at + first : at + end]
        with self._attachment.using(slots, boot_id=lease.boot_id) as held:
            shards = range(len(self._shard_bytes))
            memory = np.stack([held.addresses(shard) for shard in shards], axis=1)
            self._copy(self._spread(rows), memory, "get.copied_half")
            current = np.logical_and.reduce([held.current(shard) for shard in shards])
        if lease.lost:
            return 0
        return len(current) if current.all() else int(current.argmin())

    def _get_streamed(
        self, keys: Keys, at: int, out: Rows, deadline: Deadline, reused: dict[str, int]
    ) -> Flow[None]:
        hit = yield from self.lookup(keys[at:])
        tiers = iter(hit.tiers)
        for part in parts(keys[at : at + hit.blocks]):
            sink = _Sink(out, at, len(part), self._block_bytes)
            request = pb.GetRequest(
                space=self._space.ref,
                keys=part.packed,
                deadline_ms=milliseconds(deadline.left),
                parent=pack_run_parent(part),
            )
            yield Receive(request, sink, self._stream_seconds(len(part), deadline))
            for tier in islice(tiers, sink.blocks):
                _count(reused, tier)
            at += sink.blocks
            if sink.blocks < len(part):
                break


def _count(reused: dict[str, int], tier: str) -> None:
    name = tier or "host"
    reused[name] = reused.get(name, 0) + 1


def _release_when_there(pending: Future[Lease]) -> None:
    if pending.exception() is None:
        pending.result().release()


class _Sink:
    """Puts the chunks of a Get stream in place, in order.

    Attributes:
        blocks: leading run that the daemon vouches for; 0 before the end.
    """

    def __init__(self, out: Rows, at: int, blocks: int, block_bytes: int) -> None:
        self._out = out
        self._at = at
        self._limit = blocks
        self._block_bytes = block_bytes
        self._received = 0
        self.blocks = 0

    def __call__(self, part: pb.GetResponse) -> None:
        if part.WhichOneof("part") == "end":
            if (
                part.end.blocks * self._block_bytes > self._received
                or part.end.blocks > self._limit
            ):
                raise KVStoreError("the daemon vouches for bytes that it did not send")
            self.blocks = part.end.blocks
            return
        chunk = part.chunk
        data = chunk.data
        position = chunk.block * self._block_bytes + chunk.offset
        end = chunk.offset + len(data)
        if position != self._received or chunk.block >= self._limit or end > self._block_bytes:
            raise KVStoreError("the daemon sent a chunk out of order")
        self._out.view(self._at + chunk.block, chunk.offset, end)[:] = data
        self._received += len(data)
