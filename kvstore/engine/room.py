"""Room in the host tier: who gets a slot, and what leaves to make one.

Slots come, in this order, from free slots, from memory that the pool has not taken yet (in the
background), from evicting the coldest blocks of the same shape, and from the coldest slab group
of another shape. Copies that are also on disk are dropped ahead of need, between watermarks; a
last copy leaves only for a block that needs its slot.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import TYPE_CHECKING

from kvstore.engine.events import SlabRetireEvent
from kvstore.index import Flush, host_evictable

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
        # Whether grants or leases hold slots that may come back.
        self.held: Callable[[], bool] = lambda: False
        self.signal = Signal()
        self._next_reclaim = 0.0
        self._ahead_scheduled: set[BlockShape] = set()
        # Slab groups on their way out, with the attachments that still map them.
        self.retiring: dict[int, set[int]] = {}

    def free(self, slot: Slot) -> None:
        """Give a slot back and wake who waits for one."""
        self._host.free([slot])
        if slot.group in self.retiring:
            self.try_remove(slot.group)
        self.signal.notify()

    def take(self, shape: BlockShape, count: int) -> list[Slot]:
        """Take up to `count` slots now, evicting where the rule allows."""
        host = self._host
        slots = host.allocate(shape, count)
        missing = count - len(slots)
        if missing > 0:
            growing = min(missing, host.room_blocks(shape))
            if growing < missing and not host.allocating:
                freed = self._evict(shape, missing - growing, inline=True)
                if freed:
                    slots += host.allocate(shape, freed)
            if not slots and not growing and not host.allocating:
                self._reclaim_group(shape)
        total = sum(g.slots for g in host.groups() if g.shape == shape)
        host.want(shape, max(2 * count, total // 8))
        self._schedule_ahead(shape)
        return slots

    def may_come(self, shape: BlockShape) -> bool:
        """Return whether waiting could help: something is on its way out or held for a while."""
        host = self._host
        return bool(
            host.allocating
            or host.room_blocks(shape) > 0
            or self.retiring
            or self.held()
            or (self.flusher is not None and self.flusher.busy)
        )

    def views(self, slot: Slot) -> tuple[memoryview, ...]:
        """Return a slot's memory, one buffer per shard."""
        return self._host.views(slot)

    async def room(self, timeout: float) -> bool:
        """Wait until something was freed; False after `timeout` seconds."""
        return await self.signal.wait(timeout)

    def _evict(self, shape: BlockShape, count: int, *, inline: bool) -> int:
        """Drop up to `count` host copies, coldest first; background runs lose no block."""
        queue = self._index.host_queue(shape)
        freed = sent = 0
        kept: list[Block] = []
        while freed + sent < count:
            block = queue.pop()
            if block is None:
                break
            must_flush = block.disk is None and block.flush is Flush.NONE and self.flush_on_evict
            if must_flush and self.flusher is not None:
                sent += self.flusher.enqueue(block)
                continue
            if block.disk is None and not inline:
                kept.append(block)
                break
            self._index.drop_host(block)
            freed += 1
        for block in kept:
            self._index.offer(block)
        name = "evictions_inline" if inline else "evictions_background"
        self._counters.counts[name] += freed
        self._counters.counts["evicted_blocks_host"] += freed
        return freed

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
        now = asyncio.get_running_loop().time()
        others = [
            g
            for g in self._host.groups()
            if g.shape.slot_bytes != shape.slot_bytes or g.shape.shards != shape.shards
        ]
        if not others or self.retiring or now < self._next_reclaim:
            return
        self._next_reclaim = now + _RECLAIM_INTERVAL_SECONDS
        wanted = {g.group for g in others}
        members: dict[int, list[Block]] = defaultdict(list)
        for space in self._index.spaces.values():
            if space.shape != shape:
                for block in space.blocks.values():
                    if block.host is not None and block.host.group in wanted:
                        members[block.host.group].append(block)
        others.sort(key=lambda g: max((b.sequence for b in members[g.group]), default=-1))
        for group in others:
            blocks = members[group.group]
            if self._host.slots_in_use(group.group) != len(blocks):
                continue
            if self._empty(blocks):
                self.retire(group.group)
                return

    def _empty(self, blocks: Sequence[Block]) -> bool:
        """Drop the host copies of a slab group's blocks; False, and nothing done, if one is held.

        Blocks below them that lie in other groups go first, so that no child outlives its parent.
        """
        if any(b.host_refs or b.flush in (Flush.QUEUED, Flush.WRITING) for b in blocks):
            return False
        if self.flusher is not None and self.flush_on_evict:
            dirty = [b for b in blocks if b.disk is None and b.flush is Flush.NONE]
            if dirty:
                for block in dirty:
                    self.flusher.enqueue(block)
                return False
        by_space = defaultdict(list)
        for block in blocks:
            by_space[block.space].append(block)
        doomed: list[Block] = []
        for space, roots in by_space.items():
            below = self._index.descendants(space, roots)
            if any(b.host_refs for b in below):
                return False
            doomed += dict.fromkeys(roots + [b for b in below if b.host is not None])
        # Children before parents, as often as it takes: chains may cross the group several times.
        while doomed:
            left = []
            for block in reversed(doomed):
                if host_evictable(block):
                    self._index.drop_host(block)
                    self._counters.counts["evicted_blocks_host"] += 1
                elif block.host is not None:
                    left.append(block)
            if len(left) == len(doomed):
                return False
            doomed = left[::-1]
        return True

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
