"""Room in the GPU tier: who gets a slot, and what leaves to make one.

A GPU copy is never the last one, so nothing is lost when it leaves; what is hot and otherwise on
disk only is offered for demotion to free host memory first. Slots come from free ones, from memory
that no slab group has taken yet, from the coldest copies of the same shape, and from the coldest
slab group of another shape. What nobody asked for, but was used, takes nobody's place who is used
more often.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvstore.index import Pressure
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.engine.counters import Counters
    from kvstore.engine.gpu_demand import GpuDemand
    from kvstore.index import Block, BlockIndex, SpaceIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.base import Slot
    from kvstore.tiers.gpu import GpuTier
    from kvstore.tiers.host import HostTier

__all__ = ["GpuRoom"]

log = logging.getLogger(__name__)

# The look for a group of another shape is O(blocks of other shapes).
_RECLAIM_INTERVAL_SECONDS: Final = 0.1
_DEMOTE_BYTES: Final = 16 << 20
# Chains that are used too often to make room: so many of them are looked past, coldest first.
_MOST_PASSED_OVER: Final = 256


class GpuRoom:
    """Hands out GPU slots and frees them.

    Attributes:
        on_removed: called with the number of a slab group that is gone.
    """

    def __init__(
        self,
        gpu: GpuTier,
        host: HostTier,
        index: BlockIndex,
        demand: GpuDemand,
        counters: Counters,
    ) -> None:
        """Compose; the index frees GPU slots here from now on."""
        self.on_removed: Callable[[int], None] = lambda _: None
        self._gpu = gpu
        self._host = host
        self._index = index
        self._demand = demand
        self._counters = counters
        self._next_reclaim = 0.0
        index.free_gpu = self.free

    def free(self, slot: Slot) -> None:
        """Give a slot back."""
        self._gpu.free([slot])

    def take(
        self, shape: BlockShape, count: int, older_than: int, uses: int | None = None
    ) -> tuple[list[Slot], list[Block]]:
        """Take up to `count` slots now.

        Args:
            shape: of the blocks to come.
            count: how many.
            older_than: only blocks of a lower sequence number make room.
            uses: only blocks that were not used more often than this make room; None: all.

        Returns:
            slots, and blocks worth a place in host memory, whose GPU copies the caller holds now:
            they leave once they are there, when it asks again.
        """
        gpu = self._gpu
        gpu.want(shape, count)
        slots = gpu.allocate(shape, count)
        hot: list[Block] = []
        queue = self._index.gpu_queue(shape)
        kept: list[Block] = []
        dropped = 0
        while len(slots) + len(hot) < count and len(kept) < _MOST_PASSED_OVER:
            block = queue.peek()
            if block is None or block.sequence >= older_than:
                break
            if self._keeps(block, uses):
                queue.pop()
                kept.append(block)
            elif self._worth_demoting(block, len(hot)):
                queue.pop()
                hot += self._chain(block, len(hot), count - len(slots) - len(hot), older_than, uses)
            else:
                self._index.drop_gpu(block)
                dropped += 1
                slots += gpu.allocate(shape, 1)
        self._counters.evicted(TierName.GPU, dropped, Pressure.ROOM)
        for block in kept:
            self._index.offer(block)
        if not slots and not hot and self._reclaim(shape, count, uses):
            slots = gpu.allocate(shape, count)
        return slots, hot

    def admit(self, blocks: Iterable[Block]) -> set[Block]:
        """Return those blocks that the quotas of their spaces let in, each with `arrived` to follow.

        A space makes room among its own copies that were used less recently.
        """
        admitted: set[Block] = set()
        for block in blocks:
            space = block.space
            if space.gpu_room <= 0:
                self.evict_own(space, 1 - space.gpu_room, block.sequence)
            if space.gpu_room > 0:
                space.gpu_arriving += 1
                admitted.add(block)
        return admitted

    @staticmethod
    def arrived(admitted: Iterable[Block]) -> None:
        """Blocks are there, or are not coming."""
        for block in admitted:
            block.space.gpu_arriving -= 1

    def evict_own(self, space: SpaceIndex, count: int, older_than: int | None = None) -> int:
        """Drop up to `count` copies of a space, coldest first, for its quota."""
        gone = 0
        while space.own is not None and gone < count:
            block = space.own[TierName.GPU].peek()
            if block is None or (older_than is not None and block.sequence >= older_than):
                break
            self._index.drop_gpu(block)
            gone += 1
        self._counters.evicted(TierName.GPU, gone, Pressure.QUOTA)
        self._counters.counts["quota_evicted_blocks_gpu"] += gone
        return gone

    def _keeps(self, block: Block, uses: int | None) -> bool:
        """Return whether a block is used too often to make room for what is used so often."""
        return uses is not None and self._demand.uses(block) > uses

    def _chain(
        self, block: Block, before: int, limit: int, older_than: int, uses: int | None
    ) -> list[Block]:
        """Hold a block that is worth demoting, and those above it that only it kept here."""
        found: list[Block] = []
        at: Block | None = block
        while at is not None and len(found) < limit:
            found.append(at)
            self._index.hold_gpu(at)
            at = at.parent
            if (
                at is None
                or at.gpu is None
                or at.gpu_refs
                or at.gpu_children > 1
                or at.sequence >= older_than
                or self._keeps(at, uses)
                or not self._worth_demoting(at, before + len(found))
            ):
                break
        return found

    def _worth_demoting(self, block: Block, before: int) -> bool:
        """Return whether a block that is on disk otherwise should go to host, which has room."""
        shape = block.space.shape
        if block.space.host_room <= before:
            return False
        if block.host is not None or (before + 1) * shape.block_bytes > _DEMOTE_BYTES:
            return False
        total = sum(g.slots for g in self._host.groups() if g.shape == shape)
        if self._host.free_blocks(shape) - before <= total // 25:
            return False
        coldest = self._index.host_queue(shape).peek()
        return coldest is None or block.sequence > coldest.sequence

    def _reclaim(self, shape: BlockShape, count: int, uses: int | None) -> bool:
        """Empty slab groups of other shapes in which nothing is in use, coldest first.

        As many as it takes for one of this shape: a few small ones may have to make room.
        """
        others = [g for g in self._gpu.groups() if g.shape != shape]
        now = asyncio.get_running_loop().time()
        if not others or now < self._next_reclaim:
            return False
        self._next_reclaim = now + _RECLAIM_INTERVAL_SECONDS
        members: dict[int, list[Block]] = {g.group: [] for g in others}
        for space in self._index.spaces.values():
            if space.shape != shape and space.gpu_blocks:
                for block in space.blocks.values():
                    if block.gpu is not None:
                        members[block.gpu.group].append(block)
        others.sort(key=lambda g: max((b.sequence for b in members[g.group]), default=-1))
        for group in others:
            blocks = members[group.group]
            below = [b for b in self._index.descendants(blocks) if b.gpu is not None]
            in_use = self._gpu.slots_in_use(group.group) != len(blocks)
            if in_use or any(b.gpu_refs or self._keeps(b, uses) for b in (*blocks, *below)):
                continue
            gone = self._index.evict_all([*blocks, *below], TierName.GPU)
            self._counters.evicted(TierName.GPU, gone, Pressure.OTHER_SIZE)
            self._gpu.remove(group.group)
            self.on_removed(group.group)
            log.info("gpu slab group %d is empty: its memory is for others", group.group)
            self._gpu.want(shape, count)
            if self._gpu.free_blocks(shape):
                return True
        return False

    def drop_all(self) -> None:
        """Forget every copy that nobody uses: the device has failed."""
        for space in self._index.spaces.values():
            self._index.evict_all(
                [b for b in space.blocks.values() if b.gpu is not None], TierName.GPU
            )
