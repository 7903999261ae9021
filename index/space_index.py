"""The blocks of one space, and those of it that are partly committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
