"""The block index: key → copies, per space, with the eviction queues of the tiers.

Pure state, single-threaded, no I/O: it decides nothing and waits for nothing. Slots whose last
user is gone are handed to two callbacks, which are the only way a slot leaves the index.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvstore.index.block import Block, Flush
from kvstore.index.eviction import (
    EvictionQueue,
    disk_evictable,
    gpu_evictable,
    host_evictable,
)
from kvstore.index.ghosts import Ghost, GhostList, Pressure
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from kvstore.index.ghosts import Cause
    from kvstore.index.space_index import SpaceIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.base import Slot

__all__ = ["BlockIndex"]


class BlockIndex:
    """All spaces' blocks and the order in which they may leave each tier.

    Attributes:
        free_gpu: called with a GPU slot that nothing uses any more. Set by whoever has a GPU tier.
    """

    def __init__(
        self,
        free_host: Callable[[Slot], None],
        free_disk: Callable[[Block, Slot], None],
        ghosts: GhostList | None = None,
    ) -> None:
        """Make an empty index.

        Args:
            free_host: called with a host slot that nothing uses any more.
            free_disk: the same for disk; the record must be deleted before the slot is reused.
            ghosts: memory of evicted blocks.
        """
        self._free_host = free_host
        self._free_disk = free_disk
        self.free_gpu: Callable[[Slot], None] = lambda _: None
        self.ghosts = GhostList() if ghosts is None else ghosts
        self.spaces: dict[bytes, SpaceIndex] = {}
        self.sequence = 0
        self._gpu_queues: dict[BlockShape, EvictionQueue] = defaultdict(
            lambda: EvictionQueue(TierName.GPU)
        )
        self._host_queues: dict[BlockShape, EvictionQueue] = defaultdict(
            lambda: EvictionQueue(TierName.HOST)
        )
        self._disk_queues: dict[BlockShape, EvictionQueue] = defaultdict(
            lambda: EvictionQueue(TierName.DISK)
        )
        # Set whenever a disk copy becomes evictable: blocks refused for want of room may retry.
        self.disk_room_hint = False
        # Whether any space has a quota on disk.
        self.disk_quotas = False
        # References to copies that somebody uses now: they may leave later.
        self.gpu_held = self.host_held = self.disk_held = 0

    def gpu_queue(self, shape: BlockShape) -> EvictionQueue:
        """Return the eviction queue of the GPU tier for blocks of a shape."""
        return self._gpu_queues[shape]

    def host_queue(self, shape: BlockShape) -> EvictionQueue:
        """Return the eviction queue of the host tier for blocks of a shape."""
        return self._host_queues[shape]

    def disk_queue(self, shape: BlockShape) -> EvictionQueue:
        """Return the eviction queue of the disk tier for blocks of a shape."""
        return self._disk_queues[shape]

    def next_sequence(self) -> int:
        """Return a fresh, highest sequence number."""
        self.sequence += 1
        return self.sequence

    def touch(self, run: Sequence[Block]) -> None:
        """Mark a run in chain order as just used: tail first, head last."""
        sequence = self.sequence
        for block in reversed(run):
            sequence += 1
            block.sequence = sequence
        self.sequence = sequence

    def touch_ancestors(self, block: Block) -> None:
        """Mark what a block hangs on as used after it, the head last."""
        sequence = self.sequence
        at = block.parent
        while at is not None:
            sequence += 1
            at.sequence = sequence
            at = at.parent
        self.sequence = sequence

    def insert(self, space: SpaceIndex, key: bytes, parent: Block | None) -> Block:
        """Add a new block without copies; `put_host` or `put_disk` must follow at once."""
        block = Block(space, key, parent, self.next_sequence())
        block.link()
        space.blocks[key] = block
        self.ghosts.discard(space.id, key)
        return block

    def insert_run(
        self, space: SpaceIndex, keys: Sequence[bytes], parent: Block | None, slots: Sequence[Slot]
    ) -> list[Block]:
        """Add a run of new blocks in host, each the parent of the next one.

        The same as `insert` and `put_host` for each, but only the last one is offered for
        eviction: the others have a child there.
        """
        blocks = space.blocks
        discard = self.ghosts.discard
        sequence = self.sequence
        run: list[Block] = []
        for key, slot in zip(keys, slots, strict=True):
            sequence += 1
            block = Block(space, key, parent, sequence)
            block.host = slot
            block.link()
            if parent is not None:
                parent.host_children += 1
            blocks[key] = parent = block
            discard(space.id, key)
            run.append(block)
        self.sequence = sequence
        space.host_blocks += len(run)
        if run:
            self.offer(run[-1])
        return run

    def restore(
        self,
        space: SpaceIndex,
        key: bytes,
        parent: Block | None,
        slot: Slot,
        digests: tuple[int, ...],
        sequence: int,
    ) -> None:
        """Add a block that recovery found on disk; `restored` must follow when all are in."""
        block = Block(space, key, parent, sequence)
        block.link()
        block.recorded = sequence
        block.digests = digests
        block.disk = slot
        if parent is not None:
            parent.disk_children += 1
        space.blocks[key] = block
        space.disk_blocks += 1
        self.sequence = max(self.sequence, sequence)

    def restored(self) -> None:
        """Queue what may leave the disk, after the last `restore`."""
        for space in self.spaces.values():
            queue = self._disk_queues[space.shape]
            queue.offer_all(b for b in space.blocks.values() if not b.disk_children)

    def adopt_host(
        self,
        space: SpaceIndex,
        key: bytes,
        parent: Block | None,
        slot: Slot,
        digests: tuple[int, ...],
        sequence: int,
    ) -> Block:
        """Add the host copy that an earlier daemon left, to a block on disk or to a new one.

        Its bytes are unchecked. `adopted` must follow when all are in.
        """
        block = space.blocks.get(key)
        if block is None:
            block = Block(space, key, parent, sequence)
            block.link()
            block.digests = digests
            space.blocks[key] = block
        block.host = slot
        block.unchecked = True
        block.sequence = max(block.sequence, sequence)
        space.host_blocks += 1
        if parent is not None:
            parent.host_children += 1
        self.sequence = max(self.sequence, sequence)
        return block

    def adopted(self) -> None:
        """Queue what may leave host, after the last `adopt_host`."""
        for space in self.spaces.values():
            in_host = [b for b in space.blocks.values() if b.host is not None]
            self._host_queues[space.shape].offer_all(in_host)
            self._disk_queues[space.shape].offer_all(b for b in in_host if b.disk is not None)

    def put_host(self, block: Block, slot: Slot) -> None:
        """Record a host copy."""
        block.host = slot
        block.space.host_blocks += 1
        if block.parent is not None:
            block.parent.host_children += 1
        self.offer(block)

    def put_disk(self, block: Block, slot: Slot) -> None:
        """Record a disk copy; the parent must have one."""
        block.disk = slot
        block.space.disk_blocks += 1
        if block.parent is not None:
            block.parent.disk_children += 1
        self.offer(block)

    def put_gpu(self, block: Block, slot: Slot) -> None:
        """Record a GPU copy of a block that is in host or on disk."""
        assert block.host is not None or block.disk is not None
        block.gpu = slot
        block.space.gpu_blocks += 1
        if block.parent is not None:
            block.parent.gpu_children += 1
        self.offer(block)

    def drop_gpu(self, block: Block) -> None:
        """Forget the GPU copy and free its slot; the block stays."""
        slot = block.gpu
        if slot is None:
            return
        block.gpu = None
        block.space.gpu_blocks -= 1
        self.free_gpu(slot)
        if block.parent is not None:
            block.parent.gpu_children -= 1
            self.offer(block.parent)

    def drop_host(self, block: Block, pressure: Pressure = Pressure.ROOM) -> None:
        """Forget the host copy and free its slot; forget the block if that was its last copy."""
        slot = block.host
        if slot is None:
            return
        if block.disk is None:
            self.drop_gpu(block)
        block.host = None
        block.unchecked = False
        block.space.host_blocks -= 1
        if block.parent is not None:
            block.parent.host_children -= 1
        self._free_host(slot)
        if block.disk is None:
            self._forget(block, "evicted", TierName.HOST, pressure)
        else:
            self.offer(block)
        if block.parent is not None:
            self.offer(block.parent)

    def drop_disk(self, block: Block, pressure: Pressure = Pressure.ROOM) -> None:
        """Forget the disk copy; forget the block if that was its last copy.

        A block that stays in host does not go back to disk by itself: it left for want of room.
        """
        slot = block.disk
        if slot is None:
            return
        if block.host is None:
            self.drop_gpu(block)
        block.disk = None
        block.space.disk_blocks -= 1
        if block.parent is not None:
            block.parent.disk_children -= 1
        self._free_disk(block, slot)
        if block.host is None:
            self._forget(block, "evicted", TierName.DISK, pressure)
        else:
            block.flush = Flush.REFUSED
            self.offer(block)
        if block.parent is not None:
            self.offer(block.parent)

    def move_host(self, block: Block, slot: Slot) -> None:
        """The block's bytes are in another host slot now; nobody uses the old one."""
        old, block.host = block.host, slot
        assert old is not None
        self._free_host(old)

    def hold_gpu(self, block: Block) -> None:
        """Keep the GPU copy where it is, and the block with it, until `release_gpu`."""
        self.gpu_held += 1
        block.space.held += 1
        block.gpu_refs += 1

    def release_gpu(self, block: Block) -> None:
        """Undo one `hold_gpu`."""
        self.gpu_held -= 1
        block.space.held -= 1
        block.gpu_refs -= 1
        if block.gpu_refs == 0:
            if block.dead:
                self._free_dead(block)
            else:
                self.offer(block)

    def hold_host(self, block: Block) -> None:
        """Keep the host copy where it is until `release_host`."""
        self.host_held += 1
        block.space.held += 1
        block.host_refs += 1

    def release_host(self, block: Block) -> None:
        """Undo one `hold_host`."""
        self.host_held -= 1
        block.space.held -= 1
        block.host_refs -= 1
        if block.host_refs == 0:
            if block.dead:
                self._free_dead(block)
            else:
                self.offer(block)

    def hold_disk(self, block: Block) -> None:
        """Keep the disk copy where it is until `release_disk`."""
        self.disk_held += 1
        block.disk_refs += 1

    def release_disk(self, block: Block) -> None:
        """Undo one `hold_disk`."""
        self.disk_held -= 1
        block.disk_refs -= 1
        if block.disk_refs == 0:
            if block.dead:
                self._free_dead(block)
            else:
                self.offer(block)

    def offer(self, block: Block) -> None:
        """Queue the block's copies for eviction where the rule lets them go."""
        if block.dead:
            return
        space = block.space
        shape = space.shape
        if block.gpu is not None:
            self._gpu_queues[shape].offer(block)
        if block.host is not None:
            self._host_queues[shape].offer(block)
        if block.disk is not None and self._disk_queues[shape].offer(block):
            self.disk_room_hint = True
        if space.own is not None:
            for tier, queue in space.own.items():
                if block.slot(tier) is not None:
                    queue.offer(block)

    def offer_key(self, space: SpaceIndex, key: bytes) -> None:
        """Offer a block by key, if it is there."""
        block = space.blocks.get(key)
        if block is not None:
            self.offer(block)

    def evict(self, block: Block, tier: TierName, pressure: Pressure = Pressure.ROOM) -> bool:
        """Drop one copy if the rule lets it go; say whether it went."""
        if tier is TierName.GPU:
            if not gpu_evictable(block):
                return False
            self.drop_gpu(block)
        elif tier is TierName.HOST:
            if not host_evictable(block):
                return False
            self.drop_host(block, pressure)
        else:
            if not disk_evictable(block):
                return False
            self.drop_disk(block, pressure)
        return True

    def evict_all(
        self, blocks: Iterable[Block], tier: TierName, pressure: Pressure = Pressure.ROOM
    ) -> int:
        """Drop copies as far as the rule lets them go; return how many went.

        Blocks in chain order take one pass. In any other order it is repeated as long as it
        helps: children that went may have been what kept their parents.
        """
        left = list(blocks)
        dropped = 0
        while left:
            again = []
            for block in reversed(left):
                if self.evict(block, tier, pressure):
                    dropped += 1
                elif block.slot(tier) is not None:
                    again.append(block)
            if len(again) == len(left):
                break
            left = again[::-1]
        return dropped

    def descendants(self, roots: Iterable[Block]) -> list[Block]:
        """Return the blocks below `roots` (not they themselves), parents first."""
        found: list[Block] = []
        seen = set(roots)
        work = list(seen)
        while work:
            child = work.pop().child
            while child is not None:
                if child not in seen:
                    seen.add(child)
                    found.append(child)
                    work.append(child)
                child = child.after
        return found

    def discard(self, block: Block, cause: Cause, tier: TierName) -> None:
        """Remove one block with all its copies, whatever uses them.

        Copies that are in use are freed when their last user lets go. The caller discards
        descendants first.
        """
        if block.dead:
            return
        if block.gpu is not None:
            block.space.gpu_blocks -= 1
            if block.parent is not None:
                block.parent.gpu_children -= 1
        if block.host is not None:
            block.space.host_blocks -= 1
            if block.parent is not None:
                block.parent.host_children -= 1
        if block.disk is not None:
            block.space.disk_blocks -= 1
            if block.parent is not None:
                block.parent.disk_children -= 1
        self._forget(block, cause, tier)
        block.dead = True
        self._free_dead(block)
        if block.parent is not None:
            self.offer(block.parent)

    def discard_space(self, space: SpaceIndex) -> list[Block]:
        """Remove every block of a space at once (its epoch was bumped).

        Returns:
            What was there, for `free_discarded`: their slots are not free yet.
        """
        blocks = list(space.blocks.values())
        space.blocks = {}
        space.gpu_blocks = space.host_blocks = space.disk_blocks = 0
        for block in blocks:
            block.dead = True
            block.parent = block.child = block.before = block.after = None
        return blocks

    def free_discarded(self, blocks: Iterable[Block]) -> None:
        """Free the copies of blocks that `discard_space` returned, and remember their keys."""
        now = time.time()
        for block in blocks:
            tier = TierName.HOST if block.host is not None else TierName.DISK
            if block.key not in block.space.blocks:
                self.ghosts.add(block.space.id, block.key, Ghost("epoch", tier, now))
            self._free_dead(block)

    def _forget(
        self, block: Block, cause: Cause, tier: TierName, pressure: Pressure = Pressure.NONE
    ) -> None:
        if block.space.blocks.get(block.key) is block:
            block.unlink()
            del block.space.blocks[block.key]
            unused = 0.0
            if pressure is Pressure.EXPIRED:
                cause, unused = "expired", block.space.in_force.ttl_seconds or 0.0
            ghost = Ghost(cause, tier, time.time(), pressure, unused)
            self.ghosts.add(block.space.id, block.key, ghost)

    def _free_dead(self, block: Block) -> None:
        if block.gpu is not None and block.gpu_refs == 0:
            gpu, block.gpu = block.gpu, None
            self.free_gpu(gpu)
        if block.host is not None and block.host_refs == 0:
            slot, block.host = block.host, None
            self._free_host(slot)
        if block.disk is not None and block.disk_refs == 0:
            disk, block.disk = block.disk, None
            self._free_disk(block, disk)
