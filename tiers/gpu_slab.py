"""Slabs of the GPU tier: parts of a device's one allocation, and the generations beside them.

A device has no header that the daemon could store to and others read cheaply, so a group's
generations lie in a small file of shared memory, little-endian uint64, entry i at 8 * i. Only the
daemon writes them: before a slot gets new bytes its entry is raised, and before the memory of a
group gets another use all of its entries become `GONE`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.memory import Mapping
from kvstore.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.space import BlockShape

__all__ = ["FIRST_GPU_GROUP", "GONE", "GenerationsFile", "GpuSlabGroup", "GpuSlabInfo"]

# Host groups count up from 1, also across restarts; GPU groups from here, anew each boot.
FIRST_GPU_GROUP: Final = 1 << 31
# No slot is ever granted with this generation.
GONE: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class GpuSlabInfo:
    """One slab, as announced to clients.

    Attributes:
        shard: which shard of its group's blocks it holds.
        device: position of its device in the tier.
        device_uuid: of that device.
        handle: by which other processes open the device's allocation.
        offset: of the slab, that is of its slot 0, inside the allocation.
        length: bytes.
        slot_bytes: bytes of a slot.
        slots: number of slots.
        allocation_bytes: of the allocation.
    """

    shard: int
    device: int
    device_uuid: str
    handle: bytes
    offset: int
    length: int
    slot_bytes: int
    slots: int
    allocation_bytes: int


@dataclass(frozen=True, slots=True)
class GpuSlabGroup:
    """The slabs that hold the shards of the same blocks.

    Attributes:
        group: number, never used again within a boot.
        shape: of the blocks.
        slots: blocks that fit.
        slabs: one per shard.
        generations_path: file of their generations.
    """

    group: int
    shape: BlockShape
    slots: int
    slabs: tuple[GpuSlabInfo, ...]
    generations_path: Path

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.shape.block_bytes


class GenerationsFile:
    """The generations of a group, where every process sees them."""

    def __init__(self, path: Path, slots: int) -> None:
        """Create the file, all generations 0. About 50 µs.

        Raises:
            OSError: no room, or it exists; nothing is left behind.
        """
        self.path = path
        length = round_up(8 * slots, PAGE_BYTES)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, length)
            self._mapping = Mapping(fd, length)
            self._mapping.dontfork()
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self._values: NDArray[np.uint64] | None = self._mapping.array[: 8 * slots].view("<u8")

    def set_generations(self, indices: NDArray[np.intp], values: NDArray[np.uint64]) -> None:
        """Store generations where every process sees them."""
        if self._values is None:
            raise ValueError("the generations are closed")
        self._values[indices] = values

    def close(self) -> None:
        """Say to whoever still reads the slots that they are gone; remove the file. Idempotent."""
        if self._values is not None:
            self._values[:] = GONE
            self._values = None
            self._mapping.close()
            self.path.unlink(missing_ok=True)
