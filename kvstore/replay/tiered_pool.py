"""Two tiers of bytes that nobody stores: the index, and what the daemon does to it.

Which block leaves is the index's word (`BlockIndex`, its queues and the rule in `index.eviction`).
What is done here is what `engine.room`, `prefetch.promoter` and `engine.flusher` do between two
requests: make room, take in what comes up from disk, send blocks to disk under a write policy.

* A block that waits for the disk may not leave host. When nothing else can, the write that wants
  room waits for the disk: the disk is made to write, and falls behind by that.
* Copies that are on disk too leave host ahead of need, between the daemon's watermarks; the disk
  keeps a few slots free ahead of need, as the daemon does.
* A block for which only its own ancestors could leave is not taken in: a chain longer than the
  pool keeps its head.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.config import WritePolicy
from kvstore.index import Block, BlockIndex, EvictionQueue, Flush, GhostList, SpaceIndex
from kvstore.space import SpaceSpec
from kvstore.tiers.base import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.replay.request import TraceSpace

__all__ = ["PoolCounts", "TieredPool"]

# As in the daemon: watermarks of host, part of the disk that is kept free, blocks in a group.
_LOW_PART: Final = 50
_HIGH_PART: Final = 25
_AHEAD_PART: Final = 32
_GROUP_BLOCKS: Final = 256
_GROUP_BYTES: Final = 64 << 20
# Nobody asks why a key is not there.
_GHOSTS: Final = 1
_RETRY_SECONDS: Final = 2.0
_PRUNE_AT_LEAST: Final = 256


@dataclass(slots=True)
class PoolCounts:
    """What happened.

    Attributes:
        stored: blocks taken in.
        not_stored: blocks for which there was no room.
        promoted: blocks copied from disk to host.
        written: blocks written to disk.
        written_bytes: their bytes.
        evicted_host: copies that left host for room.
        evicted_disk: copies that left the disk for room.
    """

    stored: int = 0
    not_stored: int = 0
    promoted: int = 0
    written: int = 0
    written_bytes: int = 0
    evicted_host: int = 0
    evicted_disk: int = 0


class TieredPool:
    """Host and disk of given sizes.

    Attributes:
        index: what is where.
        counts: what happened.
    """

    def __init__(
        self,
        host_bytes: int,
        disk_bytes: int = 0,
        policy: WritePolicy = WritePolicy.THROUGH,
        write_bytes_per_second: float = math.inf,
    ) -> None:
        """Make empty tiers.

        Args:
            host_bytes: capacity of host.
            disk_bytes: capacity of the disk; 0: there is none.
            policy: when blocks go to disk.
            write_bytes_per_second: how fast the disk takes them.
        """
        self.index = BlockIndex(self._free_host, self._free_disk, GhostList(_GHOSTS))
        self.counts = PoolCounts()
        self._host_bytes = self._host_left = host_bytes
        self._disk_bytes = self._disk_left = disk_bytes
        self._policy = policy
        self._rate = write_bytes_per_second
        self._spaces: dict[int, SpaceIndex] = {}
        self._slots: dict[SpaceIndex, Slot] = {}
        self._sizes: list[int] = []
        self._host_queues: list[EvictionQueue] = []
        self._disk_queues: list[EvictionQueue] = []
        self._dirty: deque[Block] = deque()
        self._refused: dict[Block, None] = {}
        self._prune_at = _PRUNE_AT_LEAST
        self._retry_at = 0.0
        self._now = 0.0
        # Bytes that the disk may have written by now.
        self._credit = 0.0

    def space(self, number: int, kind: TraceSpace) -> SpaceIndex:
        """Return a space of the trace, made when it is first met."""
        space = self._spaces.get(number)
        if space is None:
            spec = SpaceSpec(
                model=f"space {number}",
                dtype="opaque",
                block_tokens=kind.block_tokens,
                shard_bytes=(kind.block_bytes,),
            )
            space = SpaceIndex(spec.fingerprint, spec, 1)
            self.index.spaces[space.id] = self._spaces[number] = space
            self._slots[space] = Slot(len(self._sizes), 0)
            self._sizes.append(kind.block_bytes)
            for queue, queues in (
                (self.index.host_queue(space.shape), self._host_queues),
                (self.index.disk_queue(space.shape), self._disk_queues),
            ):
                if queue not in queues:
                    queues.append(queue)
        return space

    def _free_host(self, slot: Slot) -> None:
        self._host_left += self._sizes[slot.group]

    def _free_disk(self, block: Block, slot: Slot) -> None:
        self._disk_left += self._sizes[slot.group]

    def find(self, space: SpaceIndex, keys: Sequence[bytes]) -> list[Block]:
        """Return the leading run that is in any tier."""
        blocks = space.blocks
        run: list[Block] = []
        for key in keys:
            block = blocks.get(key)
            if block is None:
                break
            run.append(block)
        return run

    def use(self, run: Sequence[Block]) -> int:
        """Mark a run as used; return how many of its leading blocks are in host."""
        self.index.touch(run)
        in_host = len(run)
        for at, block in enumerate(run):
            block.uses += 1
            if block.host is None and at < in_host:
                in_host = at
        if self._disk_bytes and self._policy is WritePolicy.REUSED:
            self._reused(run)
        return in_host

    def promote(self, run: Sequence[Block]) -> int:
        """Copy the blocks of a run that are on disk to host; return how many in order arrived."""
        for at, block in enumerate(run):
            if block.host is None:
                size = self._size(block)
                self._make_host_room(block.parent, size)
                if self._host_left < size or block.disk is None:
                    return at
                self._take(block)
                self.counts.promoted += 1
        self._drop_ahead()
        return len(run)

    def store(self, space: SpaceIndex, keys: Sequence[bytes], parent: Block | None) -> int:
        """Take in a run of new blocks below `parent`; return how many there was room for."""
        index = self.index
        slot = self._slots[space]
        size = self._sizes[slot.group]
        done: list[Block] = []
        tail = parent
        while len(done) < len(keys):
            left = len(keys) - len(done)
            self._make_host_room(tail, left * size)
            fitting = min(left, self._host_left // size)
            if not fitting or (tail is not None and tail.host is None and tail.disk is None):
                break  # no room, or what they hang on left while room was made
            part = keys[len(done) : len(done) + fitting]
            self._host_left -= fitting * size
            done += index.insert_run(space, part, tail, [slot] * fitting)
            tail = done[-1]
        self.counts.stored += len(done)
        self.counts.not_stored += len(keys) - len(done)
        if done:
            index.touch(done)
            index.touch_ancestors(done[0])
            if self._disk_bytes:
                if self._policy is WritePolicy.THROUGH:
                    for block in done:
                        self._committed(block)
                self._drop_ahead()
        return len(done)

    def advance(self, now: float) -> None:
        """Let the disk write until `now`, seconds of the trace."""
        if not self._disk_bytes:
            return
        if self._dirty:
            self._credit += (now - self._now) * self._rate
            while self._dirty and self._credit > 0:
                self._flush_one()
        if not self._dirty:
            self._credit = min(self._credit, 0.0) if self._rate < math.inf else 0.0
        self._now = now
        if self._refused and self.index.disk_room_hint and now >= self._retry_at:
            self._retry_refused()

    def settle(self) -> None:
        """Write everything that the policy would, however long it takes."""
        while self._dirty:
            self._flush_one()

    def _size(self, block: Block) -> int:
        return self._sizes[self._slots[block.space].group]

    def _take(self, block: Block) -> None:
        slot = self._slots[block.space]
        self._host_left -= self._sizes[slot.group]
        self.index.put_host(block, slot)

    @staticmethod
    def _coldest(queues: Sequence[EvictionQueue]) -> Block | None:
        if len(queues) == 1:
            return queues[0].peek()
        heads = [block for queue in queues if (block := queue.peek()) is not None]
        return min(heads, key=lambda block: block.sequence, default=None)

    def _make_host_room(self, parent: Block | None, size: int) -> None:
        """Let the coldest copies leave host until `size` bytes are free, as far as that can be.

        `parent`, of the blocks to come, stays unless it is on disk too.
        """
        drop = self.index.drop_host
        while self._host_left < size:
            victim = self._coldest(self._host_queues)
            if victim is None or (victim is parent and victim.disk is None):
                if not self._dirty:
                    return
                self._flush_one()
            elif (
                victim.disk is None
                and self._disk_bytes
                and self._policy is WritePolicy.EVICT
                and victim.flush is Flush.NONE
            ):
                self._enqueue(victim)
                self.settle()
            else:
                drop(victim)
                self.counts.evicted_host += 1

    def _drop_ahead(self) -> None:
        """Keep some of host free, as long as no block is lost by it."""
        if not self._disk_bytes or self._host_left >= self._host_bytes // _LOW_PART:
            return
        while self._host_left < self._host_bytes // _HIGH_PART:
            victim = self._coldest(self._host_queues)
            if victim is None or victim.disk is None:
                break
            self.index.drop_host(victim)
            self.counts.evicted_host += 1

    def _enqueue(self, block: Block) -> None:
        """Queue a block for the disk, after those of its ancestors that are not there yet."""
        chain: list[Block] = []
        at: Block | None = block
        while at is not None and at.disk is None and at.flush in (Flush.NONE, Flush.REFUSED):
            chain.append(at)
            at = at.parent
        for member in reversed(chain):
            self._refused.pop(member, None)
            member.flush = Flush.QUEUED
            if member.parent is not None:
                member.parent.queued_children += 1
            self._dirty.append(member)

    def _committed(self, block: Block) -> None:
        parent = block.parent
        if parent is not None and parent.disk is None and parent.flush is Flush.REFUSED:
            self._refuse(block)
        else:
            self._enqueue(block)

    def _reused(self, run: Sequence[Block]) -> None:
        for block in reversed(run):
            if block.disk is not None or block.flush is Flush.QUEUED:
                return  # so are its ancestors
            if block.flush is Flush.NONE:
                self._enqueue(block)
                return

    def _flush_one(self) -> None:
        """Write the block that has waited longest."""
        block = self._dirty.popleft()
        parent = block.parent
        block.flush = Flush.NONE
        if parent is not None:
            parent.queued_children -= 1
        size = self._size(block)
        lost = parent is not None and parent.disk is None
        if lost or not self._make_disk_room(block, size):
            self._refuse(block)
        else:
            self._disk_left -= size
            self._credit -= size
            self.index.put_disk(block, self._slots[block.space])
            self.counts.written += 1
            self.counts.written_bytes += size
        if parent is not None:
            self.index.offer(parent)

    def _make_disk_room(self, block: Block, size: int) -> bool:
        group = min(_GROUP_BLOCKS * size, max(_GROUP_BYTES, size))
        wanted = size + min(group, self._disk_bytes // _AHEAD_PART)
        while self._disk_left < wanted:
            victim = self._coldest(self._disk_queues)
            if victim is None or victim is block.parent:
                break
            self.index.drop_disk(victim)
            self.counts.evicted_disk += 1
        return self._disk_left >= size

    def _refuse(self, block: Block) -> None:
        block.flush = Flush.REFUSED
        self.index.offer(block)
        if len(self._refused) >= self._prune_at:
            self._refused = {b: None for b in self._refused if b.host is not None}
            self._prune_at = max(_PRUNE_AT_LEAST, 2 * len(self._refused))
        self._refused[block] = None

    def _retry_refused(self) -> None:
        refused, self._refused = self._refused, {}
        self.index.disk_room_hint = False
        self._retry_at = self._now + _RETRY_SECONDS
        for block in refused:
            if block.flush is Flush.REFUSED and block.host is not None:
                self._enqueue(block)
