"""The eviction rule, and a queue that yields the coldest block the rule lets go.

The rule (prefix order), per tier:

* A host copy may leave when nothing uses it, no child has a host copy or is partly committed, and
  either the block is on disk too (a clean copy), or it is the block's last copy, unpinned, and not
  waiting to be flushed.
* A disk copy may leave when the block is not pinned, nobody reads it, no child is on disk or on its
  way there, and either the block is in host too, or it is the last copy and no child is anywhere.
  A pinned block keeps its disk copy whatever else there is of it: that is the one that survives.
* A GPU copy may leave when nobody reads it and no child has a GPU copy. It never counts as the
  last copy: when the others would go, it goes first, and while somebody reads it they stay.

Together with commits that insist on a resident parent this keeps the whole index, and the disk
tier by itself, prefix-closed.

The queue is a heap with at most one entry per block. Touching a block only raises its sequence
number: a popped entry with an old number goes back with the new one, so a touch costs one store.
A popped block that may not leave is dropped and offered again by whoever removes the obstacle.
A space with limits has queues of its own beside those that all spaces share; a block may be in both.
Entries of blocks that left some other way stay until they surface, or until they are half of the
heap: then it is swept.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from kvstore.index.block import Flush
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.index.block import Block

__all__ = ["EvictionQueue", "disk_evictable", "gpu_evictable", "host_evictable"]

_SWEEP_AT_LEAST: Final = 1024
# Where in `Block.queued` the bits of a space's own queues begin.
_OWN: Final = 4


def host_evictable(block: Block) -> bool:
    """Return whether the rule lets the block's host copy go."""
    if block.host is None or block.host_refs or block.host_children or block.dead:
        return False
    if block.space.pending_children and block.key in block.space.pending_children:
        return False
    if block.disk is not None:
        return True
    if block.gpu_refs:
        return False
    return block.flush in (Flush.NONE, Flush.REFUSED) and not block.pinned_until


def disk_evictable(block: Block) -> bool:
    """Return whether the rule lets the block's disk copy go."""
    if block.disk is None or block.disk_refs or block.disk_children or block.queued_children:
        return False
    if block.dead or block.pinned_until:
        return False
    if block.host is not None:
        return True
    if block.host_children or block.gpu_refs:
        return False
    return not (block.space.pending_children and block.key in block.space.pending_children)


def gpu_evictable(block: Block) -> bool:
    """Return whether the rule lets the block's GPU copy go."""
    return block.gpu is not None and not (block.gpu_refs or block.gpu_children or block.dead)


_MAY_LEAVE: Final[dict[TierName, Callable[[Block], bool]]] = {
    TierName.GPU: gpu_evictable,
    TierName.HOST: host_evictable,
    TierName.DISK: disk_evictable,
}


class EvictionQueue:
    """Blocks of one tier and shape, or of one tier and space, coldest first."""

    __slots__ = ("_bit", "_heap", "_may_leave", "_sweep_at")

    def __init__(self, tier: TierName, *, own: bool = False) -> None:
        """Make an empty queue for a tier; `own`: for the blocks of one space."""
        self._bit = 1 << (tier + _OWN if own else tier)
        self._may_leave = _MAY_LEAVE[tier]
        self._heap: list[tuple[int, int, Block]] = []
        self._sweep_at = _SWEEP_AT_LEAST

    def __len__(self) -> int:
        """Return the number of entries, stale ones included."""
        return len(self._heap)

    def offer(self, block: Block) -> bool:
        """Add the block if the rule lets it go and it is not queued yet; say whether it does."""
        if not self._may_leave(block):
            return False
        if block.queued & self._bit:
            return True
        block.queued |= self._bit
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        heapq.heappush(self._heap, (block.sequence, id(block), block))
        return True

    def _sweep(self) -> None:
        """Drop the entries of blocks that may not leave; linear, but not before it doubled."""
        kept: list[tuple[int, int, Block]] = []
        for _, _, block in self._heap:
            if self._may_leave(block):
                kept.append((block.sequence, id(block), block))
            else:
                block.queued &= ~self._bit
        heapq.heapify(kept)
        self._heap = kept
        self._sweep_at = max(_SWEEP_AT_LEAST, 2 * len(kept))

    def offer_all(self, blocks: Iterable[Block]) -> None:
        """Offer many blocks at once, in linear time."""
        for block in blocks:
            if not block.queued & self._bit and self._may_leave(block):
                block.queued |= self._bit
                self._heap.append((block.sequence, id(block), block))
        heapq.heapify(self._heap)

    def peek(self) -> Block | None:
        """Return the coldest block that may leave, without removing it."""
        self.settle(len(self._heap) * 2 + 1)
        return self._heap[0][2] if self._heap else None

    def settle(self, steps: int) -> bool:
        """Bring the coldest block that may leave to the front, or empty the queue.

        Args:
            steps: entries dealt with at most. Each is dealt with twice at most, as long as nobody
                touches or holds blocks meanwhile.

        Returns:
            Whether it is done: `peek` is fast.
        """
        heap = self._heap
        while heap and steps > 0:
            sequence, _, block = heap[0]
            if not self._may_leave(block):
                heapq.heappop(heap)
                block.queued &= ~self._bit
            elif block.sequence != sequence:
                heapq.heapreplace(heap, (block.sequence, id(block), block))
            else:
                return True
            steps -= 1
        return not heap

    def pop(self) -> Block | None:
        """Remove and return the coldest block that may leave; None when there is none.

        The block keeps its copy: the caller drops it, or offers the block again.
        """
        block = self.peek()
        if block is not None:
            heapq.heappop(self._heap)
            block.queued &= ~self._bit
        return block
