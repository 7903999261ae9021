"""A block as the index knows it: where its copies are and what holds them there."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING

from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from kvstore.index.space_index import SpaceIndex
    from kvstore.tiers.base import Slot

__all__ = ["NEVER", "Block", "Flush"]

# Expiry of a pin without one.
NEVER = math.inf


class Flush(IntEnum):
    """A block's way to the disk tier."""

    NONE = 0  # on disk, or nobody has asked for it to be written
    QUEUED = 1  # waiting; the host copy must stay
    WRITING = 2  # in a group on its way; the host copy must stay
    REFUSED = 3  # no room that is not its own ancestors' (or the disk fails): host only


class Block:
    """One committed block. Mutable, touched by the event loop only.

    Attributes:
        key: its key.
        space: the space it belongs to.
        parent: the block before it; None at the start of a chain. Always in the index.
        child: the youngest block after it, the head of a list of siblings that `before` and
            `after` link: what hangs on a block is found without a look at the whole space.
        sequence: position in the LRU order, shared by all tiers; higher is more recent.
        host: slot in the host tier, or None.
        disk: slot in the disk tier, or None.
        gpu: slot in the GPU tier, or None. Always an extra copy: one in host or on disk is there.
        digests: XXH3-64 per shard, None until computed.
        host_children: children that have a host copy.
        disk_children: children that have a disk copy.
        gpu_children: children that have a GPU copy.
        queued_children: children on their way to disk, which need this block to stay there.
        host_refs: leases and movers that use the host copy.
        disk_refs: movers that read the disk copy.
        gpu_refs: leases and movers that use the GPU copy. It keeps the block: its last other copy
            stays meanwhile.
        pinned_until: when the last copy, and one on disk, need not stay any more, by the pins'
            time; 0: not pinned.
        flush: its way to disk.
        recorded: sequence number in the block's record on disk.
        uses: how often it was leased or streamed.
        unchecked: the host copy was adopted from an earlier daemon, and its bytes were not compared
            with the digests yet: present, but not to be read.
        queued: in which tiers' eviction queues it has an entry, one bit a tier (`1 << tier`), and four
            bits higher in which of its space's own queues.
        dead: it left the index while something still held a copy; slots are freed at the last
            release.
    """

    __slots__ = (
        "after",
        "before",
        "child",
        "dead",
        "digests",
        "disk",
        "disk_children",
        "disk_refs",
        "flush",
        "gpu",
        "gpu_children",
        "gpu_refs",
        "host",
        "host_children",
        "host_refs",
        "key",
        "parent",
        "pinned_until",
        "queued",
        "queued_children",
        "recorded",
        "sequence",
        "space",
        "unchecked",
        "uses",
    )

    def __init__(self, space: SpaceIndex, key: bytes, parent: Block | None, sequence: int) -> None:
        """Create a block without copies."""
        self.space = space
        self.key = key
        self.parent = parent
        self.child: Block | None = None
        self.before: Block | None = None
        self.after: Block | None = None
        self.sequence = sequence
        self.host: Slot | None = None
        self.disk: Slot | None = None
        self.gpu: Slot | None = None
        self.digests: tuple[int, ...] | None = None
        self.host_children = 0
        self.disk_children = 0
        self.gpu_children = 0
        self.queued_children = 0
        self.host_refs = 0
        self.disk_refs = 0
        self.gpu_refs = 0
        self.pinned_until = 0.0
        self.flush = Flush.NONE
        self.recorded = 0
        self.uses = 0
        self.unchecked = False
        self.queued = 0
        self.dead = False

    @property
    def readable(self) -> bool:
        """Whether there is a host copy that may be read now."""
        return self.host is not None and not self.unchecked

    @property
    def fastest_tier(self) -> TierName:
        """The fastest tier that has a copy."""
        if self.gpu is not None:
            return TierName.GPU
        return TierName.DISK if self.host is None else TierName.HOST

    def slot(self, tier: TierName) -> Slot | None:
        """Return the slot of one tier's copy."""
        return (
            self.gpu if tier is TierName.GPU else self.host if tier is TierName.HOST else self.disk
        )

    def link(self) -> None:
        """Become a child of the parent."""
        parent = self.parent
        if parent is not None:
            self.after = parent.child
            if self.after is not None:
                self.after.before = self
            parent.child = self

    def unlink(self) -> None:
        """Stop being one. Idempotent; `parent` stays, for whoever is still at work on the block."""
        if self.after is not None:
            self.after.before = self.before
        if self.before is not None:
            self.before.after = self.after
        elif self.parent is not None and self.parent.child is self:
            self.parent.child = self.after
        self.before = self.after = None

    def __repr__(self) -> str:
        """Show the key and the copies."""
        copies = f"gpu={self.gpu} host={self.host} disk={self.disk}"
        return f"<Block {self.key.hex()[:8]} {copies} {self.flush.name}>"
