"""What one copy consists of, as arrays: no Python per block."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.vllm.geometry import Geometry

__all__ = ["Job", "Route", "job_of", "pieces", "route_of"]

U64 = NDArray[np.uint64]

# Below this DMA is slower than a kernel that moves single vectors over the bus.
_LEAST_DMA_BYTES: Final = 512 * 1024


class Route(Enum):
    """How bytes go between slots in host memory and the KV cache; see the package's table."""

    DMA = "dma"
    RING = "ring"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks to copy; every array has shape (n,).

    Attributes:
        blocks: engine blocks.
        packed: address of each one's packed bytes in a slot.
        slots: which of the copy's slots that is; one piece of DMA never crosses two, see
            `kvstore.attach.mapped`.
        reach: how a GPU gets at the slot.
    """

    blocks: NDArray[np.int32]
    packed: U64
    slots: NDArray[np.int64]
    reach: NDArray[np.uint8]

    def __len__(self) -> int:
        """Return how many blocks."""
        return len(self.blocks)

    def part(self, which: NDArray[np.bool_]) -> Job:
        """Return some of it."""
        if which.all():
            return self
        return Job(self.blocks[which], self.packed[which], self.slots[which], self.reach[which])


def job_of(
    geometry: Geometry,
    blocks: NDArray[np.int32],
    addresses: U64,
    reach: NDArray[np.uint8],
    skip: int,
    group_blocks: int,
) -> Job:
    """Pair engine blocks with their places in slots.

    Args:
        geometry: of the KV cache.
        blocks: engine blocks, shape (n,).
        addresses: of the slots that hold them, `group_blocks` in each.
        reach: of the slots.
        skip: engine blocks of the first slot that come before `blocks[0]`.
        group_blocks: engine blocks per slot.

    Raises:
        IndexError: a block is not in the cache, or there are too few slots.
    """
    if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < geometry.blocks:
        raise IndexError(f"engine blocks are not all within 0 … {geometry.blocks - 1}")
    slot, inside = np.divmod(np.arange(skip, skip + len(blocks)), group_blocks)
    packed = addresses[slot] + inside.astype(np.uint64) * np.uint64(geometry.block_bytes)
    return Job(blocks, packed, slot, reach[slot])


def route_of(geometry: Geometry, group_blocks: int) -> Route:
    """Choose how blocks of this shape travel between host slots and the KV cache."""
    if len(geometry.bases) == 1 and geometry.block_bytes >= _LEAST_DMA_BYTES:
        return Route.DMA
    if geometry.block_bytes * group_blocks >= _LEAST_DMA_BYTES:
        return Route.RING
    return Route.KERNEL


def pieces(
    device: U64, packed: U64, apart: NDArray[np.int64], length: int
) -> tuple[NDArray[np.int64], U64, U64, U64]:
    """Merge neighbours that are adjacent on both sides.

    Args:
        device: addresses on the GPU, shape (n,).
        packed: addresses in slots, shape (n,).
        apart: where it differs, nothing is merged; shape (n,).
        length: bytes of each.

    Returns:
        Where each piece begins among the n, addresses on the GPU, addresses in slots, lengths;
        each (pieces,).
    """
    size = np.uint64(length)
    breaks = np.ones(len(device), np.bool_)
    breaks[1:] = (
        (device[:-1] + size != device[1:])
        | (packed[:-1] + size != packed[1:])
        | (apart[:-1] != apart[1:])
    )
    first = np.flatnonzero(breaks)
    counts = np.empty(len(first), np.uint64)
    counts[:-1] = first[1:] - first[:-1]
    counts[-1:] = len(device) - first[-1:]
    return first, device[first], packed[first], counts * size
