"""Slabs: files of equal slots that several processes map.

On-disk (in-memory) layout of a slab file, all little endian:

    offset 0             uint64 generations[slots]
    data_offset          slot 0; a multiple of 4096
    + i * slot_bytes     slot i
    length               a multiple of the file system's block size

A slab group has one slab per shard; slot `index` of a block lies at the same index in each, and
each carries its own copy of the generations, so that a rank touches only its own slab. Only the
daemon writes generations, as aligned 8-byte stores, before it gives a slot to a new writer.

A file is never reused for another slot size and never shrunk: a process that still maps a
removed slab reads what was there, not somebody else's block.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.memory import Hurry, Mapping
from kvstore.units import GIB, MIB, PAGE_BYTES, round_up

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.space import BlockShape

__all__ = [
    "MIN_GROUP_BYTES",
    "KeptGroup",
    "Pinner",
    "Slab",
    "SlabGroup",
    "SlabInfo",
    "data_offset",
    "group_slots",
]

MIN_GROUP_BYTES: Final = 16 * MIB
_MAX_GROUP_BYTES: Final = 1 * GIB
_GROUPS_PER_POOL: Final = 64
_MIN_SLOTS: Final = 8
# A shape that is new gets its first group from the slabs of others: not more than this part.
_LARGEST_PART: Final = 4
_STAT_BLOCK_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class SlabInfo:
    """One slab, as announced to clients.

    Attributes:
        path: the file.
        data_offset: of slot 0, bytes.
        length: of the file, bytes.
        slot_bytes: bytes of a slot.
        slots: number of slots.
        shard: which shard of its group's blocks it holds.
    """

    path: Path
    data_offset: int
    length: int
    slot_bytes: int
    slots: int
    shard: int


@dataclass(frozen=True, slots=True)
class SlabGroup:
    """The slabs that hold the shards of the same blocks.

    Attributes:
        group: number, never used again within a boot.
        shape: of the blocks.
        slots: blocks that fit.
        slabs: one per shard.
    """

    group: int
    shape: BlockShape
    slots: int
    slabs: tuple[SlabInfo, ...]

    @property
    def capacity_bytes(self) -> int:
        """Bytes that count against the pool's capacity: slots, not headers."""
        return self.slots * self.shape.block_bytes


@dataclass(frozen=True, slots=True, eq=False)
class KeptGroup:
    """A slab group that outlives its daemon.

    Attributes:
        group: number.
        shape: of the blocks.
        slots: blocks that fit.
        lengths: of the slab files, bytes, one per shard.
        generations: of the slots, shape (slots,).
    """

    group: int
    shape: BlockShape
    slots: int
    lengths: tuple[int, ...]
    generations: NDArray[np.uint64]

    @property
    def capacity_bytes(self) -> int:
        """Bytes that count against the pool's capacity: slots, not headers."""
        return self.slots * self.shape.block_bytes


def data_offset(slots: int) -> int:
    """Return where slot 0 begins: behind the generations, page aligned."""
    return round_up(8 * slots, PAGE_BYTES)


def group_slots(
    shape: BlockShape,
    capacity_bytes: int,
    remaining_bytes: int,
    min_group_bytes: int = MIN_GROUP_BYTES,
) -> int:
    """Return how many slots the next group of a shape gets; 0 when no block fits any more.

    A group is a 64th of the pool, within `min_group_bytes` … 1 GiB, and at least 8 blocks; at
    most a quarter of the pool, at least one block; the last one takes what remains.
    """
    block = shape.block_bytes
    wanted = min(max(capacity_bytes // _GROUPS_PER_POOL, min_group_bytes), _MAX_GROUP_BYTES)
    slots = max(wanted // block, _MIN_SLOTS)
    slots = max(min(slots, capacity_bytes // _LARGEST_PART // block), 1)
    return max(min(slots, remaining_bytes // block), 0)


class Pinner(Protocol):
    """Locks host memory for the DMA of a device; any thread. It counts and logs what fails."""

    def pin(self, address: int, length: int) -> bool:
        """Lock memory until `unpin`; False when that fails."""

    def unpin(self, address: int) -> None:
        """Undo one `pin`, before the memory is unmapped."""


class Slab:
    """One slab file, mapped and populated.

    Attributes:
        info: what clients are told.
        mapping: the memory.
    """

    def __init__(self, info: SlabInfo, mapping: Mapping) -> None:
        """Wrap a mapping of the whole file."""
        self.info = info
        self.mapping = mapping
        self._pinner: Pinner | None = None
        self._generations: NDArray[np.uint64] | None = mapping.array[: 8 * info.slots].view("<u8")

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        slots: int,
        slot_bytes: int,
        shard: int,
        populate_threads: int,
        hurry: Hurry | None = None,
    ) -> Slab:
        """Create the file and take all its memory. Blocks for about 0.5 s per GiB; any thread.

        With `hurry`, the threads that take it give way to others until somebody is in one.

        Raises:
            OSError: no room (ENOSPC, ENOMEM), or the file exists; nothing is left behind.
        """
        offset = data_offset(slots)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        mapping: Mapping | None = None
        try:
            # hugetlbfs: files and mappings are whole huge pages.
            length = round_up(offset + slots * slot_bytes, max(os.fstatvfs(fd).f_bsize, PAGE_BYTES))
            os.ftruncate(fd, length)
            mapping = Mapping(fd, length)
            mapping.dontfork()
            # Pages must come into being through the advised mapping: those that posix_fallocate
            # makes are small ones where huge pages are given on advice only.
            mapping.advise_huge()
            if mapping.populate(populate_threads, reserved=False, hurry=hurry):
                os.posix_fallocate(fd, 0, length)
            else:
                os.posix_fallocate(fd, 0, length)
                mapping.populate(populate_threads, hurry=hurry)
            return cls(SlabInfo(path, offset, length, slot_bytes, slots, shard), mapping)
        except BaseException:
            if mapping is not None:
                mapping.close()
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    @classmethod
    def adopt(cls, path: Path, *, slots: int, slot_bytes: int, shard: int, length: int) -> Slab:
        """Map a file that an earlier daemon made; nothing is faulted in. About 20 µs.

        Raises:
            OSError: it is not there, or not as it was: another size, or with holes.
        """
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            offset = data_offset(slots)
            # A page that is not there is SIGBUS once the file system is full.
            whole = status.st_size == length and status.st_blocks * _STAT_BLOCK_BYTES >= length
            if (
                not stat.S_ISREG(status.st_mode)
                or not whole
                or offset + slots * slot_bytes > length
            ):
                raise OSError(errno.EINVAL, "is not as it was", str(path))
            mapping = Mapping(fd, length)
            mapping.dontfork()
            mapping.advise_huge()
        finally:
            os.close(fd)
        return cls(SlabInfo(path, offset, length, slot_bytes, slots, shard), mapping)

    def set_generations(self, indices: NDArray[np.intp], values: NDArray[np.uint64]) -> None:
        """Store generations where every process sees them."""
        if self._generations is None:
            raise ValueError("the slab is closed")
        self._generations[indices] = values

    def view(self, index: int) -> memoryview:
        """Return one slot's bytes."""
        size = self.info.slot_bytes
        return self.mapping.view(self.info.data_offset + index * size, size)

    def address(self, index: int) -> int:
        """Return the address of one slot."""
        return self.mapping.address + self.info.data_offset + index * self.info.slot_bytes

    def pin(self, pinner: Pinner) -> None:
        """Lock the memory for DMA until `close`; not at the same time as that."""
        if not self.mapping.closed and pinner.pin(self.mapping.address, self.mapping.length):
            self._pinner = pinner

    def unlink(self) -> None:
        """Remove the name. Who maps the memory keeps it. Idempotent."""
        self.info.path.unlink(missing_ok=True)

    def close(self) -> bool:
        """Unmap. Idempotent.

        Returns:
            False when views of slots are alive: the memory goes with the last of them.
        """
        self._generations = None
        pinner, self._pinner = self._pinner, None
        if pinner is not None:
            pinner.unpin(self.mapping.address)
        return self.mapping.close()
