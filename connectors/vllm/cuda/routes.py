"""What one copy consists of, as arrays: no Python per block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.attach.mapped import DEVICE, PINNED
from kvstore.connectors.vllm.geometry import Geometry

__all__ = ["LEAST_DMA_BYTES", "Job", "Route", "job_of", "pieces", "route_of"]

U64 = NDArray[np.uint64]

# Below this, pieces straight out of the KV cache cost more to submit than the ring's detour.
_LEAST_STRAIGHT_BYTES: Final = 512 * 1024
# Below this DMA is slower than a kernel that moves single vectors over the bus.
LEAST_DMA_BYTES: Final = 64 * 1024

_NOTHING: Final = np.empty(0, np.int64)


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
        stretches: one piece of DMA never crosses from one to another, see `Attachment`'s `Held`;
            empty where all slots are on the device.
        reach: how a GPU gets at the slot.
        least: the worst reach of all.
        most: the best one.
    """

    blocks: NDArray[np.int32]
    packed: U64
    stretches: NDArray[np.int64]
    reach: NDArray[np.uint8]
    least: int
    most: int

    def __len__(self) -> int:
        """Return how many blocks."""
        return len(self.blocks)

    def part(self, which: NDArray[np.bool_]) -> Job:
        """Return some of it, all of the same reach."""
        reach = self.reach[which]
        least = most = int(reach[0])
        return Job(
            self.blocks[which], self.packed[which], self.stretches[which], reach, least, most
        )


def job_of(
    geometry: Geometry,
    blocks: NDArray[np.int32],
    addresses: U64,
    reach: NDArray[np.uint8],
    stretches: Callable[[], NDArray[np.int64]],
    skip: int,
    group_blocks: int,
) -> Job:
    """Pair engine blocks with their places in slots.

    Args:
        geometry: of the KV cache.
        blocks: engine blocks, shape (n,).
        addresses: of the slots that hold them, `group_blocks` in each.
        reach: of the slots.
        stretches: returns those of the slots; not asked where all are on the device.
        skip: engine blocks of the first slot that come before `blocks[0]`.
        group_blocks: engine blocks per slot.

    Raises:
        IndexError: a block is not in the cache, or there are too few slots.
    """
    if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < geometry.blocks:
        raise IndexError(f"engine blocks are not all within 0 … {geometry.blocks - 1}")
    if group_blocks == 1:
        slot: slice | NDArray[np.int64] = slice(skip, skip + len(blocks))
        packed = addresses[slot]
        if len(packed) < len(blocks):
            raise IndexError(f"{len(blocks)} engine blocks want more than {len(packed)} slots")
    else:
        slot, inside = np.divmod(np.arange(skip, skip + len(blocks)), group_blocks)
        packed = addresses[slot] + inside.astype(np.uint64) * np.uint64(geometry.block_bytes)
    reach = reach[slot]
    least, most = (int(reach.min()), int(reach.max())) if len(reach) else (PINNED, PINNED)
    apart = _NOTHING if least == DEVICE else stretches()[slot]
    return Job(blocks, packed, apart, reach, least, most)


def route_of(geometry: Geometry, group_blocks: int) -> Route:
    """Choose how blocks of this shape travel between host slots and the KV cache."""
    if len(geometry.bases) == 1 and geometry.block_bytes >= _LEAST_STRAIGHT_BYTES:
        return Route.DMA
    if geometry.block_bytes * group_blocks >= LEAST_DMA_BYTES:
        return Route.RING
    return Route.KERNEL


def pieces(
    device: U64,
    packed: U64,
    apart: NDArray[np.int64],
    length: int,
    starts: Sequence[int] = (),
) -> tuple[NDArray[np.int64], U64, U64, U64]:
    """Merge neighbours that are adjacent on both sides.

    Args:
        device: addresses on the GPU, shape (n,).
        packed: addresses in slots, shape (n,).
        apart: where it differs, nothing is merged; shape (n,).
        length: bytes of each.
        starts: where pieces begin in any case.

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
    breaks[np.array(starts, np.intp)] = True
    first = np.flatnonzero(breaks)
    counts = np.empty(len(first), np.uint64)
    counts[:-1] = first[1:] - first[:-1]
    counts[-1:] = len(device) - first[-1:]
    return first, device[first], packed[first], counts * size
