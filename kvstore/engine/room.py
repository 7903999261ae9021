"""Room in the host tier: who gets a slot, and what leaves to make one.

Slots come, in this order, from free slots, from memory that the pool has not taken yet (in the
background), from evicting the coldest blocks of the same shape, and from the coldest slab group
of another shape. Copies that are also on disk are dropped ahead of need, between watermarks; a
last copy leaves only for a block that needs its slot.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvstore.engine.events import SlabRetireEvent
from kvstore.index import Flush
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine.attachments import Attachments
    from kvstore.engine.counters import Counters
    from kvstore.engine.flusher import Flusher
    from kvstore.index import Block, BlockIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.base import Slot
    from kvstore.tiers.host import HostTier

__all__ = ["HostRoom", "Signal"]

log = logging.getLogger(__name__)

# How often, at most, the pool looks for a slab group of another shape to take. The look is
# O(blocks of other shapes).
_RECLAIM_INTERVAL_SECONDS = 0.1


class Signal:
    """Wakes everybody who waits now; who comes later waits for the next one."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake the waiters."""
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout: float) -> bool:
        """Wait for the next `notify`; False when `timeout` seconds pass first."""
        if timeout <= 0:
            return False
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            done, _ = await asyncio.wait({waiter}, timeout=timeout)
            return bool(done)
        finally:
            self._waiters.discard(waiter)


def _may_be_dropped(block: Block) -> bool:
    """Return whether only children stand between the block and the end of its host copy."""
    if block.host_refs or block.flush in (Flush.QUEUED, Flush.WRITING):
        return False
    if block.key in block.space.pending_children:
        return False
    return block.disk is not None or not block.pinned_until


class HostRoom:
    """Hands out host slots and frees them."""

    def __init__(
        self,
        host: HostTier,
        index: BlockIndex,
        counters: Counters,
        attachments: Attachments,
    ) -> None:
        """Compose; `flusher` is set afterwards when there is a disk tier."""
        self._host = host
        self._index = index
        self._counters = counters
        self._attachments = attachments
        self.flusher: Flusher | None = None
        self.flush_on_evict = False
        # What was not used again is not worth the disk's wear; it is counted when it leaves.
        self.flush_on_reuse = False
        # Whether grants, leases or movers hold slots that may come back; given True, those are
        # not counted that hold on to what they have because they wait for promotions.
        self.held: Callable[[bool], bool] = lambda _: False
        self.signal = Signal()
        # Nothing takes a slot: what was saved of the slots must stay true.
        self.closed = False
        self._next_reclaim = 0.0
        # Shapes for which the last look at the groups of others came too soon to be worth it.
        self._unsearched: set[BlockShape] = set()
        self._ahead_scheduled: set[BlockShape] = set()
        # Slab groups on their way out, with the attachments that still map them.
        self.retiring: dict[int, set[int]] = {}

    def free(self, slot: Slot) -> None:
        """Give a slot back and wake who waits for one."""
        self._host.free([slot])
        if slot.group in self.retiring:
            self.try_remove(slot.group)
        self.signal.notify()

    def take(self, shape: BlockShape, count: int, older_than: int | None = None) -> list[Slot]:
        """Take up to `count` slots now, evicting where the rule allows.

        Args:
            shape: of the blocks to come.
            count: how many.
            older_than: evict only blocks of a lower sequence number.
        """
        if self.closed:
            return []
        host = self._host
        slots = host.allocate(shape, count)
        missing = count - len(slots)
        if missing > 0:
            growing = min(missing, host.room_blocks(shape))
            if growing < missing and not host.allocating:
                freed = self._evict(shape, missing - growing, older_than, inline=True)
                if freed:
                    slots += host.allocate(shape, freed)
            if not slots and not growing and not host.allocating and older_than is None:
                self._reclaim_group(shape)
        total = sum(g.slots for g in host.groups() if g.shape == shape)
        # Taking memory from the system is slower than filling it: stay half the pool ahead.
        host.want(shape, max(2 * count, total // 2))
        if older_than is None:
            # Otherwise what is prefetched would push out itself, a little at a time.
            self._schedule_ahead(shape)
        return slots

    def may_come(self, shape: BlockShape, *, promoting: bool = False) -> bool:
        """Return whether waiting could help: something is on its way out or held for a while.

        `promoting`: asked for a promotion, whose waiters let go of nothing before it ends.
        """
        if self.closed:
            return False
        host = self._host
        return bool(
            host.allocating
            or host.room_blocks(shape) > 0
            or self.retiring
            or self._will_search(shape)
            or self.held(promoting)
            or (self.flusher is not None and self.flusher.busy)
        )

    def _will_search(self, shape: BlockShape) -> bool:
        """Return whether `take` will look at the groups of other shapes in a moment."""
        late = self._next_reclaim + _RECLAIM_INTERVAL_SECONDS
        return shape in self._unsearched and asyncio.get_running_loop().time() < late

    def views(self, slot: Slot) -> tuple[memoryview, ...]:
        """Return a slot's memory, one buffer per shard."""
        return self._host.views(slot)

    async def room(self, timeout: float) -> bool:
        """Wait until something was freed; False after `timeout` seconds."""
        return await self.signal.wait(timeout)

    def _evict(
        self, shape: BlockShape, count: int, older_than: int | None = None, *, inline: bool
    ) -> int:
        """Drop up to `count` host copies, coldest first; background runs lose no block.

        Blocks that must be flushed first are sent to disk instead, but not more of them than
        are wanted, those on their way counted: who waits asks again when each group is there.
        """
        queue = self._index.host_queue(shape)
        freed = 0
        while freed < count:
            block = queue.peek()
            if block is None or (older_than is not None and block.sequence >= older_than):
                break
            if block.disk is None:
                flusher = self.flusher if self.flush_on_evict else None
                if flusher is not None and block.flush is Flush.NONE:
                    if freed + flusher.dirty_blocks >= count:
                        break
                    flusher.enqueue(block)
                    continue
                if not inline:
                    break
                self._count_unused(block)
            self._index.drop_host(block)
            freed += 1
        name = "evictions_inline" if inline else "evictions_background"
        self._counters.counts[name] += freed
        self._counters.counts["evicted_blocks_host"] += freed
        return freed

    def _count_unused(self, block: Block) -> None:
        if self.flush_on_reuse and self.flusher is not None and not block.uses:
            self._counters.counts["flush_skipped_not_reused_blocks"] += 1

    def evict(self, shape: BlockShape, count: int) -> int:
        """Drop up to `count` host copies, coldest first, as far as the rule allows."""
        return self._evict(shape, count, inline=True)

    def made(self, shape: BlockShape | None) -> None:
        """Blocks may leave that could not before: wake who waits, or drop some ahead of need."""
        self.signal.notify()
        if shape is not None:
            self._schedule_ahead(shape)

    def _schedule_ahead(self, shape: BlockShape) -> None:
        if self.flusher is None or shape in self._ahead_scheduled:
            return
        self._ahead_scheduled.add(shape)
        asyncio.get_running_loop().call_soon(self._ahead, shape)

    def _ahead(self, shape: BlockShape) -> None:
        """Keep between 2 and 4 % of the shape's slots free, as long as no block is lost by it."""
        self._ahead_scheduled.discard(shape)
        host = self._host
        total = sum(g.slots for g in host.groups() if g.shape == shape)
        free = host.free_blocks(shape) + host.room_blocks(shape)
        low, high = max(1, total // 50), max(2, total // 25)
        if total and free < low:
            self._evict(shape, high - free, inline=False)

    def _reclaim_group(self, shape: BlockShape) -> None:
        """Empty the coldest slab group of another shape, if nothing in it is in use."""
        others = [g for g in self._host.groups() if g.shape != shape]
        self._unsearched.discard(shape)
        if not others or self.retiring:
            return
        loop = asyncio.get_running_loop()
        begun = loop.time()
        if begun < self._next_reclaim:
            self._unsearched.add(shape)
            loop.call_at(self._next_reclaim, self.signal.notify)
            return
        members: dict[int, list[Block]] = {g.group: [] for g in others}
        for space in self._index.spaces.values():
            if space.shape != shape:
                for block in space.blocks.values():
                    if block.host is not None and block.host.group in members:
                        members[block.host.group].append(block)
        others.sort(key=lambda g: max((b.sequence for b in members[g.group]), default=-1))
        for group in others:
            blocks = members[group.group]
            if self._host.slots_in_use(group.group) == len(blocks) and self._empty(blocks):
                self.retire(group.group)
                break
        took = loop.time() - begun
        self._next_reclaim = begun + took + max(_RECLAIM_INTERVAL_SECONDS, 10 * took)

    def _empty(self, blocks: Sequence[Block]) -> bool:
        """Drop the host copies of a slab group's blocks; False, and none dropped, if one is held.

        Blocks below them that lie in other groups go first, so that no child outlives its parent.
        """
        below = [b for b in self._index.descendants(blocks) if b.host is not None]
        doomed = [*blocks, *below]
        if not all(map(_may_be_dropped, doomed)):
            return False
        if self.flusher is not None and self.flush_on_evict:
            dirty = [b for b in doomed if b.disk is None and b.flush is Flush.NONE]
            for block in dirty:
                self.flusher.enqueue(block)
            if dirty:
                return False
        for block in doomed:
            if block.disk is None:
                self._count_unused(block)
        self._counters.counts["evicted_blocks_host"] += self._index.evict_all(doomed, TierName.HOST)
        return all(block.host is None for block in blocks)

    def retire(self, group: int) -> None:
        """Take a slab group out of service; it is removed when nobody maps it any more."""
        self._host.retire(group)
        mapped_by = self._attachments.mapping(group)
        self.retiring[group] = {a.id for a in mapped_by}
        self._counters.counts["slab_groups_retired"] += 1
        log.info("slab group %d retires, mapped by %d attachments", group, len(mapped_by))
        for attachment in mapped_by:
            attachment.send(SlabRetireEvent((group,)))
        self.try_remove(group)

    def unmapped(self, attachment_id: int, groups: Sequence[int] | None = None) -> None:
        """Note that an attachment does not map some groups (all: it is gone) any more."""
        for group in list(self.retiring) if groups is None else groups:
            if group in self.retiring:
                self.retiring[group].discard(attachment_id)
                self.try_remove(group)

    def try_remove(self, group: int) -> None:
        """Remove a retiring group once it is empty and unmapped everywhere."""
        if not self.retiring[group] and self._host.slots_in_use(group) == 0:
            del self.retiring[group]
            self._host.remove(group)
            self.signal.notify()
