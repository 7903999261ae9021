"""Blocks that wait for the disk, first come first served, ancestors before what hangs on them.

Of each it is known which traced request had it written: who stored it, used it again, needed its
place in memory, or asked for a flush, as the write policy has it. Blocks that are tried again later
belong to nobody.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from kvstore import tracing
from kvstore.index import Block, Flush

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.engine.counters import Counters
    from kvstore.engine.disk_room import DiskRoom
    from kvstore.engine.refused import RefusedBlocks
    from kvstore.index import BlockIndex, SpaceIndex
    from kvstore.space import BlockShape

__all__ = ["FlushQueue", "is_lost", "is_under_way"]


def is_under_way(block: Block) -> bool:
    """Return whether a block waits for the disk or is on its way there."""
    return block.flush in (Flush.QUEUED, Flush.WRITING) and not block.dead


def is_lost(parent: Block) -> bool:
    """Return whether a block was refused by the disk, so that nothing below it can go there."""
    return parent.disk is None and parent.flush is Flush.REFUSED


class FlushQueue:
    """The queue, and what follows from being in it: a queued block keeps its parent on disk."""

    def __init__(self, index: BlockIndex, refused: RefusedBlocks, counters: Counters) -> None:
        """Start empty; what is queued is not among the refused any more."""
        self._index = index
        self._refused = refused
        self._counters = counters
        self._blocks: deque[Block] = deque()
        # Of blocks that were queued for a traced request, until they settle.
        self._traceparents: dict[Block, str] = {}

    def __len__(self) -> int:
        """Return the number of blocks that wait."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the blocks, the first one first."""
        return iter(self._blocks)

    @property
    def head(self) -> Block:
        """The first block."""
        return self._blocks[0]

    @property
    def asker(self) -> tracing.Span:
        """Names the request that the first block is written for, if any is traced."""
        found = self._traceparents.get(self._blocks[0]) if self._blocks else None
        return tracing.Span(found) if found else tracing.OFF

    def begin_span(self, blocks: Sequence[Block]) -> tracing.Span:
        """Begin the span of a write, in the trace of the first request that it is for."""
        if not self._traceparents:
            return tracing.OFF
        traced = [self._traceparents.get(block, "") for block in blocks]
        size = len(blocks) * blocks[0].space.shape.block_bytes
        return tracing.batch_span("kvstore.flush", traced, blocks=len(blocks), bytes=size)

    def enqueue(self, block: Block) -> int:
        """Queue a block, after those of its ancestors that are not on disk yet; return how many."""
        chain: list[Block] = []
        at: Block | None = block
        while at is not None and at.disk is None and at.flush in (Flush.NONE, Flush.REFUSED):
            chain.append(at)
            at = at.parent
        for member in reversed(chain):
            self._add(member)
            self._blocks.append(member)
        return len(chain)

    def again(self, blocks: Sequence[Block]) -> None:
        """Queue blocks, parents first, before those that wait."""
        for block in reversed(blocks):
            self._add(block)
            self._blocks.appendleft(block)

    def popleft(self) -> Block:
        """Take the first block; `put_back` or `settle` follows."""
        return self._blocks.popleft()

    def put_back(self, blocks: Iterable[Block]) -> None:
        """Put blocks that were taken before the others again, in their order."""
        self._blocks.extendleft(reversed(list(blocks)))

    def settle(self, block: Block, state: Flush) -> None:
        """A block that was taken does not wait any more."""
        block.flush = state
        block.space.dirty -= 1
        self._traceparents.pop(block, None)
        if block.parent is not None:
            block.parent.queued_children -= 1
            self._index.offer(block.parent)

    def leading(self, shape: BlockShape, limit: int) -> int:
        """Return how many blocks of a shape come first, up to a limit."""
        count = 0
        for block in self._blocks:
            if block.space.shape != shape or count == limit:
                break
            count += 1
        return count

    def refuse(self, block: Block, why: str = "") -> None:
        """A block that was taken finds no place on disk.

        Args:
            block: stays in host only, until it is asked for again.
            why: names the counter of what is skipped; empty: the device or the index failed.
        """
        self.settle(block, Flush.REFUSED)
        if block.dead:
            return
        self._counters.counts["flush_refused_blocks"] += 1
        if why:
            self._counters.counts[f"flush_skipped_{why}_blocks"] += 1
        self._index.offer(block)
        self._refused.add(block)

    def refuse_leading(self, shape: BlockShape, limit: int, why: str) -> None:
        """Refuse the first blocks, as far as they are of a shape."""
        for _ in range(self.leading(shape, limit)):
            self.refuse(self.popleft(), why)

    def within_quotas(self, shape: BlockShape, wanted: int, limit: int, room: DiskRoom) -> int:
        """Make room for the first blocks within the quotas of their spaces.

        What finds no colder ones of its own space is refused, before anything else leaves for it.

        Args:
            shape: of the first block.
            wanted: how many of that shape.
            limit: how many are looked at, at most.
            room: drops blocks.

        Returns:
            how many, of those wanted, come first now.
        """
        kept: list[Block] = []
        taken: Counter[SpaceIndex] = Counter()
        for _ in range(min(len(self), limit)):
            if len(kept) == wanted or self.head.space.shape != shape:
                break
            block = self.popleft()
            space, parent = block.space, block.parent
            if block.dead or (parent is not None and is_lost(parent)):
                kept.append(block)  # it will not go
                continue
            missing = taken[space] + 1 - space.disk_room
            if missing <= 0 or room.evict_own(space, missing, block.sequence) == missing:
                taken[space] += 1
                kept.append(block)
            else:
                self.refuse(block, "quota")
        self.put_back(kept)
        return len(kept)

    def _add(self, block: Block) -> None:
        self._refused.discard(block)
        block.flush = Flush.QUEUED
        block.space.dirty += 1
        if tracing.recording() and (carried := tracing.carried()):
            self._traceparents[block] = carried
        if block.parent is not None:
            block.parent.queued_children += 1
