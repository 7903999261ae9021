"""Room in the disk tier: what leaves to make some, and when the slots of what left are free.

A block that leaves is forgotten at once. Its slot is free only when the delete of its record is
durable: deletes ride on the commit of the next group, or are committed by themselves when none
comes. What leaves is, in this order, the coldest block that the rule lets go, then whole segments
of another shape, coldest first.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Final

from kvstore.index import Block, Flush, Pressure
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.counters import Counters
    from kvstore.index import BlockIndex, SpaceIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.base import Slot
    from kvstore.tiers.disk import DiskTier

__all__ = ["Deletes", "DiskRoom"]

# Deletes without a group to ride on are committed after this long, and tried again after that.
_DELETE_DELAY_SECONDS: Final = 0.02
_DELETE_RETRY_SECONDS: Final = 2.0
# Deletes in one transaction: the loop frees their slots in one go.
_DELETES_AT_ONCE: Final = 4096
# How often, at most, the blocks of other shapes are looked through.
_RECLAIM_INTERVAL_SECONDS: Final = 0.1


class Deletes:
    """Blocks whose records are to be deleted, oldest first, with the slots that this frees.

    Attributes:
        due: loop time at which they are committed without a group.
        freeing: per shape, slots that will be free.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._waiting: list[tuple[Block, Slot]] = []
        self.due = 0.0
        self.freeing: Counter[BlockShape] = Counter()

    def __bool__(self) -> bool:
        """Return whether deletes wait to be committed."""
        return bool(self._waiting)

    def add(self, block: Block, slot: Slot) -> None:
        """Queue one."""
        if not self._waiting:
            self.due = asyncio.get_running_loop().time() + _DELETE_DELAY_SECONDS
        self._waiting.append((block, slot))
        self.freeing[block.space.shape] += 1

    def take(self) -> list[tuple[Block, Slot]]:
        """Take some for a transaction; `done` or `failed` follows."""
        taken = self._waiting[:_DELETES_AT_ONCE]
        del self._waiting[:_DELETES_AT_ONCE]
        return taken

    @staticmethod
    def names(taken: Sequence[tuple[Block, Slot]]) -> list[tuple[bytes, bytes]]:
        """Return the (space id, key) of the records to delete, as of now."""
        names = []
        for block, _ in taken:
            current = block.space.blocks.get(block.key)
            # One that came back under the same key has a record of its own by now.
            if current is None or current.disk is None:
                names.append((block.space.id, block.key))
        return names

    def done(self, taken: Sequence[tuple[Block, Slot]]) -> list[Slot]:
        """They are durable; return the slots, which are free now."""
        for block, _ in taken:
            self.freeing[block.space.shape] -= 1
        return [slot for _, slot in taken]

    def failed(self, taken: Sequence[tuple[Block, Slot]]) -> None:
        """They may not be durable: try again later, in the same order."""
        self._waiting[:0] = taken
        self.due = asyncio.get_running_loop().time() + _DELETE_RETRY_SECONDS


class DiskRoom:
    """Chooses what leaves the disk."""

    def __init__(
        self, index: BlockIndex, disk: DiskTier, deletes: Deletes, counters: Counters
    ) -> None:
        """Compose."""
        self._index = index
        self._disk = disk
        self._deletes = deletes
        self._counters = counters
        self._next_reclaim = 0.0

    def evict(self, shape: BlockShape, count: int) -> bool:
        """See to it that `count` more slots become free, as far as the rule allows.

        Returns:
            Whether any will.
        """
        if self._disk.allocating:
            return True  # nothing leaves for slots that are about to be there
        coming = self._disk.room_blocks(shape) + self._deletes.freeing[shape]
        queue = self._index.disk_queue(shape)
        evicted = 0
        while coming + evicted < count and (victim := queue.peek()) is not None:
            self._index.drop_disk(victim)
            evicted += 1
        self._counters.evicted(TierName.DISK, evicted, Pressure.ROOM)
        return bool(coming or evicted)

    def within_quota(self, block: Block) -> bool:
        """Return whether a block may come, or could for a colder one of its own space."""
        space = block.space
        if space.disk_room > 0:
            return True
        victim = None if space.own is None else space.own[TierName.DISK].peek()
        return victim is not None and victim.sequence < block.sequence

    def evict_own(self, space: SpaceIndex, count: int, older_than: int | None = None) -> int:
        """Drop up to `count` blocks of a space, coldest first, for its quota; return how many went.

        Args:
            space: that has too many.
            count: how many.
            older_than: only blocks of a lower sequence number.
        """
        evicted = 0
        while space.own is not None and evicted < count:
            block = space.own[TierName.DISK].peek()
            if block is None or (older_than is not None and block.sequence >= older_than):
                break
            self._index.drop_disk(block, Pressure.QUOTA)
            evicted += 1
        self._counters.evicted(TierName.DISK, evicted, Pressure.QUOTA)
        self._counters.counts["quota_evicted_blocks_disk"] += evicted
        return evicted

    def reclaim_segment(self, shape: BlockShape) -> bool:
        """Drop the blocks of the coldest segment of another shape that the rule lets go as a whole.

        Returns:
            Whether a segment will be empty, after this or an earlier call.
        """
        if any(self._deletes.freeing.values()):
            return True
        loop = asyncio.get_running_loop()
        begun = loop.time()
        members: dict[int, list[Block]] = {
            group: [] for group, other, _, used in self._disk.segments() if other != shape and used
        }
        if not members or begun < self._next_reclaim:
            return False
        for space in self._index.spaces.values():
            if space.shape != shape:
                for block in space.blocks.values():
                    if block.disk is not None and block.disk.group in members:
                        members[block.disk.group].append(block)
        coldest = sorted(members, key=lambda g: max((b.sequence for b in members[g]), default=-1))
        emptied = any(
            # Otherwise some of its slots are being written or deleted.
            self._disk.slots_in_use(group) == len(members[group])
            and self.empty(members[group], Pressure.OTHER_SIZE)
            for group in coldest
        )
        took = loop.time() - begun
        self._next_reclaim = begun + took + max(_RECLAIM_INTERVAL_SECONDS, 10 * took)
        return emptied

    def empty(self, blocks: Sequence[Block], pressure: Pressure) -> bool:
        """Drop the disk copies of some blocks and of what hangs on them; all or nothing.

        Where a block's only copy is the one on disk, everything below it goes from host, too.

        Args:
            blocks: are on disk.
            pressure: what they leave for.
        """
        leaving = [*blocks, *(b for b in self._index.descendants(blocks) if b.disk is not None)]
        last = [b for b in leaving if b.host is None]
        orphans = [b for b in self._index.descendants(last) if b.host is not None]
        if any(b.disk_refs or b.queued_children for b in leaving):
            return False
        if any(b.pinned_until for b in (*leaving, *orphans)):
            return False
        if any(b.gpu_refs or b.key in b.space.pending_children for b in (*last, *orphans)):
            return False
        if any(b.host_refs or b.flush in (Flush.QUEUED, Flush.WRITING) for b in orphans):
            return False
        for tier, blocks_there in ((TierName.HOST, orphans), (TierName.DISK, leaving)):
            gone = self._index.evict_all(blocks_there, tier, pressure)
            self._counters.evicted(tier, gone, pressure)
        return all(block.disk is None for block in blocks)
