"""The blocks of one space, and those of it that are partly committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.index.eviction import EvictionQueue
from kvstore.index.limits import NO_QUOTA, SpaceLimits
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.index.block import Block
    from kvstore.space import SpaceSpec

__all__ = ["SpaceIndex"]


class SpaceIndex:
    """The blocks of one space.

    Attributes:
        id: fingerprint, 32 bytes.
        spec: what it was made from.
        shape: slots per block.
        epoch: current epoch; blocks of earlier ones are gone.
        blocks: by key; every block here has a copy in some tier, and so have its ancestors.
        pending_keys: keys whose shards are partly committed, with how many slots wait for each.
        pending_children: parents of those, with how many such children each has.
        gpu_blocks, host_blocks, disk_blocks: blocks with a copy there.
        gpu_arriving, host_arriving, disk_arriving: blocks on their way there, whose slots are taken.
        granted: host slots that clients may fill.
        held: references to host and GPU copies that somebody uses now.
        dirty: blocks that wait for the disk or are on their way.
        limits: what was set for the space.
        in_force: the same with the daemon's defaults filled in.
        gpu_quota, host_quota, disk_quota: most blocks in a tier that follow from it.
        own: eviction queues of this space alone, while it has or had limits.
    """

    def __init__(self, space_id: bytes, spec: SpaceSpec, epoch: int) -> None:
        """Make an empty space."""
        self.id = space_id
        self.spec = spec
        self.shape = spec.shape
        self.epoch = epoch
        self.blocks: dict[bytes, Block] = {}
        self.pending_keys: dict[bytes, int] = {}
        self.pending_children: dict[bytes, int] = {}
        self.gpu_blocks = 0
        self.host_blocks = 0
        self.disk_blocks = 0
        self.gpu_arriving = 0
        self.host_arriving = 0
        self.disk_arriving = 0
        self.granted = 0
        self.held = 0
        self.dirty = 0
        self.limits = SpaceLimits()
        self.in_force = SpaceLimits()
        self.gpu_quota = self.host_quota = self.disk_quota = NO_QUOTA
        self.own: dict[TierName, EvictionQueue] | None = None

    def limit(self, limits: SpaceLimits, defaults: SpaceLimits) -> None:
        """Put limits in force. Queues of its own come first: they choose what leaves for it."""
        self.limits = limits
        self.in_force = limits.over(defaults)
        size = self.shape.block_bytes
        self.gpu_quota = self.in_force.quota_blocks(TierName.GPU, size)
        self.host_quota = self.in_force.quota_blocks(TierName.HOST, size)
        self.disk_quota = self.in_force.quota_blocks(TierName.DISK, size)

    def open_own(self) -> None:
        """Make queues of its own, empty; whoever does offers the blocks that are there."""
        if self.own is None:
            self.own = {tier: EvictionQueue(tier, own=True) for tier in TierName}

    @property
    def gpu_room(self) -> int:
        """How many more blocks the quota allows in the GPU tier; negative: it has too many."""
        return self.gpu_quota - self.gpu_blocks - self.gpu_arriving

    @property
    def host_room(self) -> int:
        """The same in the host tier."""
        return self.host_quota - self.host_blocks - self.granted - self.host_arriving

    @property
    def disk_room(self) -> int:
        """The same in the disk tier."""
        return self.disk_quota - self.disk_blocks - self.disk_arriving

    def excess(self, tier: TierName) -> int:
        """Return how many blocks it has in a tier beyond its quota."""
        if tier is TierName.GPU:
            return self.gpu_blocks - self.gpu_quota
        if tier is TierName.HOST:
            return self.host_blocks - self.host_quota
        return self.disk_blocks - self.disk_quota

    @property
    def unsettled(self) -> bool:
        """Whether some of its copies in memory are in use, or on their way, and may leave later."""
        return bool(self.granted or self.held or self.dirty or self.host_arriving)

    def has_parent(self, parent: bytes | None) -> bool:
        """Return whether a block may be committed below `parent`; None starts a chain.

        A parent whose other shards are still on their way counts: whether it is there in the end
        is checked when the block is complete.
        """
        return parent is None or parent in self.blocks or parent in self.pending_keys

    def run(self, keys: Iterable[bytes], parent: bytes | None = None) -> list[Block]:
        """Return the leading run of blocks that are there, in any tier, and hang on each other.

        A block whose key fits but that hangs on something else is another chain's: hashes can
        collide, and can be made to. Its bytes must not be taken for those that were asked for.

        Args:
            keys: in chain order.
            parent: key of the block that the first one must hang on; empty: it must start a
                chain; None: that is not known.
        """
        blocks = self.blocks
        found: list[Block] = []
        before = blocks.get(parent) if parent else None
        if parent and before is None:
            return found
        checked = parent is not None
        for key in keys:
            block = blocks.get(key)
            if block is None or (checked and block.parent is not before):
                break
            found.append(block)
            before, checked = block, True
        return found
