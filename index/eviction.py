"""The eviction rule, and a queue that yields the coldest block the rule lets go.

The rule (prefix order), per tier:

* A host copy may leave when nothing uses it, no child has a host copy or is partly committed, and
  either the block is on disk too (a clean copy), or it is the block's last copy, unpinned, and not
  waiting to be flushed.
* A disk copy may leave when nobody reads it, no child is on disk or on its way there, and either
  the block is in host too, or it is the last copy, unpinned, and no child is anywhere.

Together with commits that insist on a resident parent this keeps the whole index, and the disk
tier by itself, prefix-closed.

The queue is a heap with at most one entry per block. Touching a block only raises its sequence
number: a popped entry with an old number goes back with the new one, so a touch costs one store.
A popped block that may not leave is dropped and offered again by whoever removes the obstacle.
Entries of blocks that left some other way stay until they surface, or until they are half of the
heap: then it is swept.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from kvstore.index.block import Flush

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.index.block import Block

__all__ = ["EvictionQueue", "disk_evictable", "host_evictable"]

_SWEEP_AT_LEAST: Final = 1024


def host_evictable(block: Block) -> bool:
    """Return whether the rule lets the block's host copy go."""
    if block.host is None or block.host_refs or block.host_children or block.dead:
        return False
    if block.space.pending_children and block.key in block.space.pending_children:
        return False
    if block.disk is not None:
        return True
    return block.flush in (Flush.NONE, Flush.REFUSED) and not block.pinned_until


def disk_evictable(block: Block) -> bool:
    """Return whether the rule lets the block's disk copy go."""
    if block.disk is None or block.disk_refs or block.disk_children or block.queued_children:
        return False
    if block.dead:
        return False
    if block.host is not None:
        return True
    if block.host_children or block.pinned_until:
        return False
    return not (block.space.pending_children and block.key in block.space.pending_children)


class EvictionQueue:
    """Blocks of one tier and shape, coldest first."""

    __slots__ = ("_heap", "_host", "_sweep_at")

    def __init__(self, *, host: bool) -> None:
        """Make an empty queue for the host tier, or for the disk tier."""
        self._host = host
        self._heap: list[tuple[int, int, Block]] = []
        self._sweep_at = _SWEEP_AT_LEAST

    def __len__(self) -> int:
        """Return the number of entries, stale ones included."""
        return len(self._heap)

    def offer(self, block: Block) -> bool:
        """Add the block if the rule lets it go and it is not queued yet; say whether it does."""
        if self._host:
            if not host_evictable(block):
                return False
            if block.in_host_queue:
                return True
            block.in_host_queue = True
        else:
            if not disk_evictable(block):
                return False
            if block.in_disk_queue:
                return True
            block.in_disk_queue = True
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        heapq.heappush(self._heap, (block.sequence, id(block), block))
        return True

    def _sweep(self) -> None:
        """Drop the entries of blocks that may not leave; linear, but not before it doubled."""
        may_leave = host_evictable if self._host else disk_evictable
        kept: list[tuple[int, int, Block]] = []
        for _, _, block in self._heap:
            if may_leave(block):
                kept.append((block.sequence, id(block), block))
            else:
                self._mark_out(block)
        heapq.heapify(kept)
        self._heap = kept
        self._sweep_at = max(_SWEEP_AT_LEAST, 2 * len(kept))

    def offer_all(self, blocks: Iterable[Block]) -> None:
        """Offer many blocks at once, in linear time."""
        offered = [b for b in blocks if self._may_enter(b)]
        self._heap += [(b.sequence, id(b), b) for b in offered]
        heapq.heapify(self._heap)

    def _may_enter(self, block: Block) -> bool:
        """Mark a block as queued if it may leave and is not queued yet."""
        if self._host:
            if block.in_host_queue or not host_evictable(block):
                return False
            block.in_host_queue = True
        else:
            if block.in_disk_queue or not disk_evictable(block):
                return False
            block.in_disk_queue = True
        return True

    def peek(self) -> Block | None:
        """Return the coldest block that may leave, without removing it."""
        heap = self._heap
        while heap:
            sequence, _, block = heap[0]
            if not (host_evictable(block) if self._host else disk_evictable(block)):
                heapq.heappop(heap)
                self._mark_out(block)
            elif block.sequence != sequence:
                heapq.heapreplace(heap, (block.sequence, id(block), block))
            else:
                return block
        return None

    def pop(self) -> Block | None:
        """Remove and return the coldest block that may leave; None when there is none.

        The block keeps its copy: the caller drops it, or offers the block again.
        """
        block = self.peek()
        if block is not None:
            heapq.heappop(self._heap)
            self._mark_out(block)
        return block

    def _mark_out(self, block: Block) -> None:
        if self._host:
            block.in_host_queue = False
        else:
            block.in_disk_queue = False
