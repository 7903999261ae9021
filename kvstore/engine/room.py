"""Room in the host tier: who gets a slot, and what leaves to make one.

Slots come, in this order, from free slots, from memory that the pool has not taken yet (in the
background), and from what is coldest: slab groups of other shapes (`reclaimer`), or blocks of the
same shape. Copies that are also on disk are dropped ahead of need, between watermarks; a
last copy leaves only for a block that needs its slot. Whoever must prepare memory before it is
used has it made ahead of need (`make`), as far as nobody else has it. Before that, a space with a quota makes room
for its blocks among its own (`admit`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.engine.reclaimer import Reclaimer
from kvstore.engine.retirement import Retirement
from kvstore.engine.wake import Signal
from kvstore.index import Flush, Pressure
from kvstore.tiers.base import TierName
from kvstore.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvstore.engine.attachments import Attachments
    from kvstore.engine.counters import Counters
    from kvstore.engine.flusher import Flusher
    from kvstore.index import Block, BlockIndex, EvictionQueue, SpaceIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.base import Slot
    from kvstore.tiers.host import HostTier

__all__ = ["HostRoom", "Made", "Signal"]

log = logging.getLogger(__name__)

# Blocks of one space that make room for others of it in one go: a few milliseconds.
_OWN_AT_ONCE: Final = 1000


@dataclass(frozen=True, slots=True)
class Made:
    """Memory of one shape.

    Attributes:
        made_bytes: of slots that there are.
        expected_bytes: what that will be when nothing is on its way any more, as far as is known.
        groups: slab groups that they lie in.
    """

    made_bytes: int
    expected_bytes: int
    groups: tuple[int, ...]


class HostRoom:
    """Hands out host slots and frees them."""

    def __init__(
        self,
        host: HostTier,
        index: BlockIndex,
        counters: Counters,
        attachments: Attachments,
    ) -> None:
        """Compose; `add_disk` follows when there is a disk tier."""
        self._host = host
        self._index = index
        self._counters = counters
        self._attachments = attachments
        self.signal = Signal()
        self._retirement = Retirement(host, attachments, counters, self.signal.notify)
        self._reclaimer = Reclaimer(host, index, counters, self._retirement, self.signal.notify)
        self._reclaimer.on_lost = self._count_unused
        self.flusher: Flusher | None = None
        self.flush_on_evict = False
        self._flush_on_reuse = False
        # Whether grants, leases or movers hold slots that may come back; given True, those are
        # not counted that hold on to what they have because they wait for promotions.
        self.held: Callable[[bool], bool] = lambda _: False
        # Nothing takes a slot: what was saved of the slots must stay true.
        self.closed = False
        self._ahead_scheduled: set[BlockShape] = set()

    def add_disk(self, flusher: Flusher, *, flush_on_evict: bool, flush_on_reuse: bool) -> None:
        """Add a disk tier, whose flusher writes what must be there before it leaves host.

        Args:
            flusher: of the disk tier.
            flush_on_evict: blocks go to disk when they would leave host.
            flush_on_reuse: what was not used again is lost then; it is counted.
        """
        self.flusher = self._reclaimer.flusher = flusher
        self.flush_on_evict = self._reclaimer.flush_on_evict = flush_on_evict
        self._flush_on_reuse = flush_on_reuse

    @property
    def retiring(self) -> Collection[int]:
        """Slab groups on their way out."""
        return self._retirement.groups

    def free(self, slot: Slot) -> None:
        """Give a slot back and wake who waits for one."""
        self._host.free([slot])
        self._retirement.try_remove(slot.group)
        self.signal.notify()

    def take(
        self,
        shape: BlockShape,
        count: int,
        older_than: int | None = None,
        *,
        lossless: bool = False,
    ) -> list[Slot]:
        """Take up to `count` slots now, evicting where the rule allows.

        Args:
            shape: of the blocks to come.
            count: how many.
            older_than: evict only blocks of a lower sequence number.
            lossless: evict no last copies.
        """
        if self.closed:
            return []
        host = self._host
        slots = host.allocate(shape, count)
        missing = count - len(slots)
        if missing > 0:
            growing = self._growing(shape, missing)
            if growing < missing and not host.allocating:
                self._reclaim_colder(shape, missing, older_than, lossless=lossless)
                growing = self._growing(shape, missing)
                queue = self._index.host_queue(shape)
                freed = self._evict(queue, missing - growing, older_than, inline=not lossless)
                if freed:
                    slots += host.allocate(shape, freed)
            if not slots and not growing and not host.allocating and older_than is None:
                self._reclaimer.reclaim(shape, missing, None)
        total = sum(g.slots for g in host.groups() if g.shape == shape)
        # Taking memory from the system is slower than filling it: stay half the pool ahead.
        host.want(shape, max(2 * count, total // 2), urgent=len(slots) < count)
        if older_than is None:
            # Otherwise what is prefetched would push out itself, a little at a time.
            self._schedule_ahead(shape)
        return slots

    def make(self, shape: BlockShape) -> Made:
        """Have memory made that no other shape has, in the background; say how far that is.

        Nothing is evicted: of other shapes only empty groups go, as far as they are more than an
        equal part of the pool.
        """
        host = self._host
        if not self.closed:
            idle = not host.coming_blocks(shape)
            host.want(shape, host.capacity_bytes // shape.block_bytes)
            coming = host.coming_blocks(shape) * shape.block_bytes
            if idle and coming:
                what, size = format_bytes(coming), format_bytes(shape.slot_bytes)
                log.info("makes %s of memory ahead of need, for slots of %s", what, size)
            self._reclaimer.share(shape)
        mine = [group for group in host.groups() if group.shape == shape]
        made = sum(group.capacity_bytes for group in mine)
        coming = host.coming_blocks(shape) + self._reclaimer.coming_blocks(shape)
        if self.closed:
            coming = 0
        return Made(made, made + coming * shape.block_bytes, tuple(g.group for g in mine))

    def admit(
        self,
        space: SpaceIndex,
        count: int,
        older_than: int | None = None,
        *,
        lossless: bool = False,
    ) -> int:
        """Return how many more blocks a space's quota allows, making room among its own blocks.

        Args:
            space: of the blocks to come.
            count: how many.
            older_than: evict only blocks of a lower sequence number.
            lossless: evict no last copies.
        """
        missing = min(count - space.host_room, _OWN_AT_ONCE)
        if missing > 0:
            self.evict_own(space, missing, older_than, lossless=lossless)
        return max(0, min(count, space.host_room))

    def evict_own(
        self,
        space: SpaceIndex,
        count: int,
        older_than: int | None = None,
        *,
        lossless: bool = False,
    ) -> int:
        """Drop up to `count` blocks of a space, coldest first, for its quota."""
        if self.closed or space.own is None:
            return 0
        queue = space.own[TierName.HOST]
        inline, why = not lossless, Pressure.QUOTA
        gone = self._evict(queue, count, older_than, inline=inline, pressure=why)
        self._counters.counts["quota_evicted_blocks_host"] += gone
        return gone

    def _growing(self, shape: BlockShape, missing: int) -> int:
        """Return for how many of the missing blocks there is memory, or is in a moment."""
        coming = self._reclaimer.coming_blocks(shape)
        return min(missing, self._host.room_blocks(shape) + coming)

    def _reclaim_colder(
        self, shape: BlockShape, count: int, older_than: int | None, *, lossless: bool
    ) -> None:
        """Give up groups of other shapes that are colder than what this one would evict."""
        coldest = self._index.host_queue(shape).peek()
        if coldest is not None and (older_than is None or coldest.sequence < older_than):
            older_than = coldest.sequence
        if older_than is not None:
            self._reclaimer.reclaim(shape, count, older_than, lossless=lossless)

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
            or self._reclaimer.may_come(shape)
            or self.held(promoting)
            or (self.flusher is not None and self.flusher.busy)
        )

    def views(self, slot: Slot) -> tuple[memoryview, ...]:
        """Return a slot's memory, one buffer per shard."""
        return self._host.views(slot)

    async def room(self, timeout: float) -> bool:
        """Wait until something was freed; False after `timeout` seconds."""
        return await self.signal.wait(timeout)

    def _evict(
        self,
        queue: EvictionQueue,
        count: int,
        older_than: int | None = None,
        *,
        inline: bool,
        pressure: Pressure = Pressure.ROOM,
    ) -> int:
        """Drop up to `count` host copies, coldest first; background runs lose no block.

        Blocks that must be flushed first are sent to disk instead, but not more of them than
        are wanted, those on their way counted: who waits asks again when each group is there.
        """
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
            self._index.drop_host(block, pressure)
            freed += 1
        name = "evictions_inline" if inline else "evictions_background"
        self._counters.counts[name] += freed
        self._counters.evicted(TierName.HOST, freed, pressure)
        return freed

    def _count_unused(self, block: Block) -> None:
        if self._flush_on_reuse and self.flusher is not None and not block.uses:
            self._counters.counts["flush_skipped_not_reused_blocks"] += 1

    def shrink(self, shape: BlockShape, count: int) -> int:
        """Drop up to `count` host copies for a smaller tier, coldest first, as the rule allows."""
        queue = self._index.host_queue(shape)
        return self._evict(queue, count, inline=True, pressure=Pressure.RESIZE)

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
        if self.closed:
            return
        host = self._host
        total = sum(g.slots for g in host.groups() if g.shape == shape)
        free = host.free_blocks(shape) + host.room_blocks(shape)
        low, high = max(1, total // 50), max(2, total // 25)
        if total and free < low:
            self._reclaim_colder(shape, high - host.free_blocks(shape), None, lossless=True)
            free = host.free_blocks(shape) + self._growing(shape, high)
            self._evict(self._index.host_queue(shape), high - free, inline=False)

    def spare(self, space: SpaceIndex, count: int, older_than: int) -> int:
        """Return for how many of `count` blocks there is room that costs nobody anything.

        That is what is free above what is kept free for those who come, memory that the pool has
        not taken yet, and copies that are on disk too: these are dropped, for a quota the space's
        own.

        Args:
            space: of the blocks.
            count: how many.
            older_than: drop only blocks of a lower sequence number.
        """
        if self.closed:
            return 0
        shape = space.shape
        missing = min(count - space.host_room, _OWN_AT_ONCE)
        if missing > 0 and space.own is not None:
            self.evict_own(space, missing, older_than, lossless=True)
        count = max(0, min(count, space.host_room))
        total = sum(g.slots for g in self._host.groups() if g.shape == shape)
        room = max(0, self._host.free_blocks(shape) - max(2, total // 25))
        if room < count:
            room += self._growing(shape, count - room)
        if room < count:
            queue = self._index.host_queue(shape)
            room += self._evict(queue, count - room, older_than, inline=False)
        return min(room, count)

    def retire(self, group: int) -> None:
        """Take a slab group out of service; it is removed when nobody maps it any more."""
        self._retirement.begin(group)

    def unmapped(self, attachment_id: int, groups: Sequence[int] | None = None) -> None:
        """Note that an attachment does not map some groups (all: it is gone) any more."""
        self._retirement.unmapped(attachment_id, groups)
