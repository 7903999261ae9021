"""Emptying segments until the disk tier fits a capacity that was lowered.

1. Withdraw as many segments as take more than there may be: nothing is allocated from them any
   more.
2. Make room for their blocks in the segments that stay: the coldest blocks of the shape leave the
   disk, as the rule allows; their slots are free when their deletes are durable. When that lets none
   go, step after step, the coldest go together with what hangs on them in host only.
3. Move what is left, a batch at a time: read and check, write to a new slot, sync, commit a record
   that names the new slot in the place of the old one; only now is the block there, and the old
   slot free. What cannot be read, or is damaged, goes with what hangs on it.
4. Delete segments that are empty.

Killed before the commit the new slots hold bytes that no record names; killed after it the records
are right. If a commit fails it may be durable all the same: the new slot stays taken until the old
record is durable again.

So what is lost is what does not fit, coldest first, to the nearest segment.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
from collections import Counter
from typing import TYPE_CHECKING, Final

from kvstore.engine.disk_records import record_of
from kvstore.engine.shrinking import Part, next_to_leave
from kvstore.errors import TierError
from kvstore.index import Pressure
from kvstore.syncpoint import reach
from kvstore.tiers.base import Outcome, Slot, TierName, Transfer
from kvstore.tiers.pool_copy import undisturbed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.counters import Counters
    from kvstore.engine.flusher import Flusher
    from kvstore.engine.removal import Removal
    from kvstore.index import Block, BlockIndex
    from kvstore.index.records import BlockRecord
    from kvstore.space import BlockShape
    from kvstore.tiers.disk import DiskTier

__all__ = ["DiskShrinker"]

log = logging.getLogger(__name__)

_BATCH_BYTES: Final = 16 << 20
_BATCH_BLOCKS: Final = 256
_LOOK_AGAIN_SECONDS: Final = 0.02
_RETRY_SECONDS: Final = 1.0
# After so many more tries a block that cannot be read is given up.
_READ_TRIES: Final = 3
# After so many steps that came to nothing blocks leave whose ends are in host only.
_PATIENT_STEPS: Final = 5
# Blocks looked at in one go.
_CHUNK: Final = 4000


class DiskShrinker:
    """Makes the disk tier smaller.

    Attributes:
        evicted: copies that left for it.
    """

    def __init__(
        self,
        disk: DiskTier,
        index: BlockIndex,
        flusher: Flusher,
        removal: Removal,
        counters: Counters,
    ) -> None:
        """Compose."""
        self._disk = disk
        self._index = index
        self._flusher = flusher
        self._removal = removal
        self._counters = counters
        self._leaving: set[int] = set()
        # New slots that a record may name although its commit failed.
        self._doubtful: list[tuple[Block, Slot]] = []
        # Old slots that promotions still read.
        self._read: list[tuple[Block, Slot]] = []
        # Reads that failed, per block; whether something failed in this step.
        self._failures: Counter[Block] = Counter()
        self._troubled = False
        # Steps in a row that came to nothing.
        self._stuck = 0
        self.evicted = 0

    @property
    def capacity_bytes(self) -> int:
        """What the tier keeps to by now."""
        return self._disk.capacity_bytes + self._disk.excess_bytes

    @property
    def done(self) -> bool:
        """Whether the tier fits its capacity, and nothing is left to tidy up."""
        return not (self._disk.excess_bytes or self._doubtful or self._read)

    def relent(self) -> None:
        """Allocate again from segments that are not empty yet: the capacity was changed."""
        for number in self._leaving:
            self._disk.readmit(number)
        self._leaving.clear()

    async def run(self) -> None:
        """Work until the tier fits."""
        loop = asyncio.get_running_loop()
        while not self.done:
            begun = loop.time()
            self._troubled = False
            before = self._progress()
            try:
                await self._step()
            except TierError as error:
                log.warning("making the disk tier smaller: %s; it goes on", error)
                self._troubled = True
            tidy = await self._tidy()
            self._stuck = self._stuck + 1 if self._progress() == before else 0
            wait = _LOOK_AGAIN_SECONDS if tidy and not self._troubled else _RETRY_SECONDS
            await asyncio.sleep(max(wait, 5 * (loop.time() - begun)))
        self._failures.clear()
        self.relent()

    def _progress(self) -> tuple[int, int, int]:
        """Return what changes with every step that comes to something."""
        return self.evicted, self._counters.counts["moved_blocks_disk"], self._disk.excess_bytes

    async def _step(self) -> None:
        members = await self._members()
        self._withdraw(members)
        for number in list(self._leaving):
            if not self._troubled:
                await self._empty(number, members)

    async def _members(self) -> dict[int, list[Block]]:
        """Return the blocks of every segment."""
        members: dict[int, list[Block]] = {}
        for space in list(self._index.spaces.values()):
            for at, block in enumerate(list(space.blocks.values())):
                if block.disk is not None:
                    members.setdefault(block.disk.group, []).append(block)
                if at % _CHUNK == _CHUNK - 1:
                    await asyncio.sleep(0)
        return members

    def _withdraw(self, members: dict[int, list[Block]]) -> None:
        disk = self._disk
        leaving: Counter[BlockShape] = Counter()
        for number in self._leaving:
            for block in members.get(number, ()):
                leaving[block.space.shape] += 1
        parts = {}
        for number, shape, slots, used in disk.segments():
            if number not in self._leaving:
                idle = sum(not b.disk_refs for b in members.get(number, ()))
                parts[number] = Part(number, shape, slots, used, max(0, used - idle))
        excess = disk.excess_bytes - disk.leaving_bytes
        while excess > 0:
            part = next_to_leave(parts.values(), leaving, self._coldest)
            if part is None:
                return
            disk.retire(part.number)
            self._leaving.add(part.number)
            del parts[part.number]
            leaving[part.shape] += part.used
            excess -= part.slots * part.shape.block_bytes

    def _coldest(self, shape: BlockShape) -> float:
        block = self._index.disk_queue(shape).peek()
        return math.inf if block is None else block.sequence

    async def _empty(self, number: int, members: dict[int, list[Block]]) -> None:
        """Move a segment's blocks to others as far as that goes now; delete it when it is empty."""
        blocks = [b for b in members.get(number, ()) if _lies_in(b, number)]
        if blocks:
            shape = blocks[0].space.shape
            self._make_room(shape, len(blocks), members)
            size = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // shape.block_bytes))
            for at in range(0, len(blocks), size):
                batch = [b for b in blocks[at : at + size] if _lies_in(b, number)]
                await self._move([b for b in batch if not b.disk_refs])
        if number in self._leaving and not self._disk.slots_in_use(number):
            self._leaving.discard(number)
            reach("move.emptied")
            self._disk.remove(number)

    def _make_room(self, shape: BlockShape, count: int, members: dict[int, list[Block]]) -> None:
        """Let the coldest blocks leave for as many as find no place."""
        if self._flusher.records.freeing(shape):
            return  # slots come free in a moment
        queue = self._index.disk_queue(shape)
        missing = count - self._disk.spare_slots(shape)
        gone = 0
        while gone < missing and (block := queue.peek()) is not None:
            self._index.drop_disk(block, Pressure.RESIZE)
            gone += 1
        self._counters.evicted(TierName.DISK, gone, Pressure.RESIZE)
        if gone < missing and self._stuck >= _PATIENT_STEPS:
            gone += self._drop_ends(shape, missing - gone, members)
        self.evicted += gone

    def _drop_ends(self, shape: BlockShape, count: int, members: dict[int, list[Block]]) -> int:
        """Drop the coldest blocks whose ends are in host only, with these; return how many."""
        last = [
            block
            for blocks in members.values()
            for block in blocks
            if block.space.shape == shape and block.disk is not None and not block.disk_children
        ]
        last.sort(key=lambda block: block.sequence)
        gone = 0
        for block in last:
            # What it hangs on is the next one to go.
            at: Block | None = block
            while gone < count and at is not None and not at.disk_children:
                if not self._flusher.room.empty([at], Pressure.RESIZE):
                    break
                gone += 1
                at = at.parent
        return gone

    async def _move(self, blocks: Sequence[Block]) -> None:
        if not blocks:
            return
        shape = blocks[0].space.shape
        slots = self._disk.relocate(shape, len(blocks))
        moving = list(zip(blocks, slots, strict=False))
        if not moving:
            return
        memory = memoryview(mmap.mmap(-1, len(moving) * shape.block_bytes))
        for block, _ in moving:
            self._index.hold_disk(block)
        kept: set[Slot] = set()
        damaged: list[Block] = []
        try:
            written, damaged = await self._copy(moving, shape, memory)
            await self._record(written, kept)
        finally:
            # Also when cancelled: by then the last system call has returned.
            for block, _ in moving:
                self._index.release_disk(block)
            self._disk.free([slot for _, slot in moving if slot not in kept])
            self._flusher.wake()
        for block in damaged:
            if not block.dead and block.disk is not None:
                _, lost = self._removal.damaged_on_disk(block, kept=block.host is not None)
                self.evicted += lost

    async def _copy(
        self, moving: Sequence[tuple[Block, Slot]], shape: BlockShape, memory: memoryview
    ) -> tuple[dict[Block, Slot], list[Block]]:
        """Copy blocks to their new slots.

        Returns:
            those that are there, synced, and those that never will be.
        """
        views = [
            tuple(memory[at : at + shape.slot_bytes] for at in range(first, last, shape.slot_bytes))
            for first in range(0, len(memory), shape.block_bytes)
            for last in (first + shape.block_bytes,)
        ]
        outcomes = await self._disk.read(
            [
                Transfer(block.disk, buffers, block.space.spec.shard_bytes, block.digests)
                for (block, _), buffers in zip(moving, views, strict=True)
                if block.disk is not None
            ]
        )
        read: list[tuple[Block, Slot, Transfer]] = []
        damaged: list[Block] = []
        for (block, slot), buffers, outcome in zip(moving, views, outcomes, strict=True):
            if outcome is Outcome.OK:
                transfer = Transfer(slot, buffers, block.space.spec.shard_bytes)
                read.append((block, slot, transfer))
            elif outcome is Outcome.CORRUPT or self._failures[block] >= _READ_TRIES:
                damaged.append(block)
            else:
                self._failures[block] += 1
        if self._flusher.budget is not None:
            await self._flusher.budget.overdraw(len(read) * shape.block_bytes)
        put = await self._disk.write([transfer for _, _, transfer in read])
        reach("move.written")
        await self._disk.sync()
        reach("move.synced")
        self._troubled = len(damaged) < outcomes.count(Outcome.IO_ERROR) or Outcome.IO_ERROR in put
        written = {
            block: slot
            for (block, slot, _), outcome in zip(read, put, strict=True)
            if outcome is Outcome.OK
        }
        return written, damaged

    async def _record(self, written: dict[Block, Slot], kept: set[Slot]) -> None:
        """Commit where blocks are now; add new slots that are not to be freed to `kept`."""
        async with self._flusher.records.rewriting:
            moved = {block: slot for block, slot in written.items() if not block.dead}
            records = {block: record_of(block, slot) for block, slot in moved.items()}
            commit = asyncio.ensure_future(self._flusher.records.rewrite(list(records.values())))
            try:
                await undisturbed(commit)
            finally:
                reach("move.committed")
                # Also when cancelled: a transaction runs to its end, and what it says counts.
                kept.update(moved.values())
                self._settle(records, moved, ok=commit.exception() is None and commit.result())

    def _settle(
        self, records: dict[Block, BlockRecord], moved: dict[Block, Slot], *, ok: bool
    ) -> None:
        for block, slot in moved.items():
            if block.dead:
                # Its record may be there: deleted before the slot is used again.
                self._flusher.deleted(block, slot)
            elif not ok:
                self._doubtful.append((block, slot))
            else:
                old, block.disk = block.disk, slot
                assert old is not None
                block.recorded = records[block].sequence
                self._counters.counts["moved_blocks_disk"] += 1
                if block.disk_refs > 1:
                    self._read.append((block, old))
                else:
                    self._disk.free([old])

    def _free_read(self) -> None:
        """Free old slots that nobody reads any more."""
        free = [slot for block, slot in self._read if not block.disk_refs]
        self._read = [(block, slot) for block, slot in self._read if block.disk_refs]
        self._disk.free(free)

    async def _tidy(self) -> bool:
        """Settle what an earlier step left open; False when that has to wait."""
        self._free_read()
        while self._doubtful:
            block, slot = self._doubtful[0]
            async with self._flusher.records.rewriting:
                if block.dead or block.disk is None:
                    self._flusher.deleted(block, slot)
                elif not await self._flusher.records.rewrite([record_of(block, block.disk)]):
                    return False
                else:
                    self._disk.free([slot])
            self._doubtful.pop(0)
        return True


def _lies_in(block: Block, number: int) -> bool:
    return not block.dead and block.disk is not None and block.disk.group == number
