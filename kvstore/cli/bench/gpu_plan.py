"""What `bench gpu` measures: parts, layouts, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvstore.units import MIB

__all__ = ["LAYERS", "Case", "Layout", "Leg", "Plan"]

LAYERS: Final = 32
# One engine block of Llama-3-8B, 16 tokens in bf16; larger shards are several of them.
_ENGINE_BLOCK_BYTES: Final = 2 * MIB


class Leg(StrEnum):
    """Parts of the bench."""

    RAW = "raw"
    HOST = "host"
    POOL = "pool"
    DISK = "disk"


class Layout(StrEnum):
    """How the layers of a block lie."""

    BLOCKS = "blocks"  # a block's bytes of all layers are contiguous
    LAYERS = "layers"  # an allocation a layer: a block is in as many pieces


@dataclass(frozen=True, slots=True)
class Case:
    """What one row of the bench measures.

    Attributes:
        layout: of the KV cache.
        shard_bytes: bytes of a stored block.
        total_bytes: how much is moved at once, at most.
        most_blocks: and in how many blocks, at most.
    """

    layout: Layout
    shard_bytes: int
    total_bytes: int
    most_blocks: int

    @property
    def group_blocks(self) -> int:
        """Engine blocks in a stored block."""
        return max(1, self.shard_bytes // _ENGINE_BLOCK_BYTES)

    @property
    def blocks(self) -> int:
        """Stored blocks that are moved at once."""
        return max(1, min(self.total_bytes // self.shard_bytes, self.most_blocks))

    @property
    def moved_bytes(self) -> int:
        """Bytes that are moved at once."""
        return self.blocks * self.shard_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        legs: which parts.
        layouts: of the KV cache.
        shards: sizes in bytes.
        total_bytes: moved at once, at most.
        most_blocks: moved at once, at most.
        rounds: that medians are taken of.
    """

    legs: Sequence[Leg]
    layouts: Sequence[Layout]
    shards: Sequence[int]
    total_bytes: int
    most_blocks: int
    rounds: int

    @property
    def largest_bytes(self) -> int:
        """The most that a copy moves."""
        return max(self.case(self.layouts[0], shard).moved_bytes for shard in self.shards)

    def case(self, layout: Layout, shard: int) -> Case:
        """Return one row."""
        return Case(layout, shard, self.total_bytes, self.most_blocks)
