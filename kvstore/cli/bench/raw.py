"""What the machine does without kvstore: memory copies, direct reads and direct writes.

The baselines are meant to be hard to beat: same bytes, same block size, as many threads as the
disk tier has, memory that has been touched before and is of the same kind as kvstore's: direct
I/O into ordinary pages runs at half the speed of direct I/O into huge ones.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.units import MIB

__all__ = ["RawDisk", "at_addresses", "copy_seconds", "huge", "pieces", "touched"]

Blocks = npt.NDArray[np.uint8]

# A call of this size is large enough for any NVMe, and small enough to occupy all threads.
_CALL_BYTES: Final = 4 * MIB


def touched(blocks: int, block_bytes: int) -> Blocks:
    """Return page-aligned memory for blocks, every page of it touched."""
    memory = mmap.mmap(-1, blocks * block_bytes)
    array = np.frombuffer(memory, np.uint8).reshape(blocks, block_bytes)
    array[:] = 1
    return array


def pieces(blocks: Blocks) -> list[memoryview]:
    """Return each block's memory."""
    return [row.data for row in blocks]


def at_addresses(addresses: Sequence[int], size: int) -> list[memoryview]:
    """Return `size` bytes at each address; the caller keeps them mapped."""
    return [memoryview((ctypes.c_char * size).from_address(a)).cast("B") for a in addresses]


def huge(blocks: int, block_bytes: int) -> Blocks:
    """Return touched memory in huge pages, as far as the machine gives any."""
    memory = mmap.mmap(-1, blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8).reshape(blocks, block_bytes)
    array[:] = 1
    return array


def copy_seconds(source: Blocks, target: Blocks) -> float:
    """Copy block by block on one thread, and return how long it took."""
    begin = time.perf_counter()
    for row in range(len(source)):
        np.copyto(target[row], source[row])
    return time.perf_counter() - begin


class RawDisk:
    """Direct I/O on plain files with a few threads."""

    def __init__(self, threads: int, memory: Sequence[memoryview]) -> None:
        """Start the threads.

        Args:
            threads: as many as the disk tier has.
            memory: page-aligned pieces of equal length, to read into and write from.
        """
        self._memory = memory
        self._pool = ThreadPoolExecutor(threads, "raw disk")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _run(
        self,
        call: Callable[[int, Sequence[Any], int], int],
        ranges: Sequence[tuple[int, int, int]],
        syncs: int,
    ) -> float:
        """Do (descriptor, offset, length) ranges one after the other through memory."""
        piece = len(self._memory[0])
        together = max(1, _CALL_BYTES // piece)
        jobs, at = [], 0
        for descriptor, offset, length in ranges:
            for start in range(offset, offset + length, together * piece):
                size = min(together * piece, offset + length - start)
                views = list(self._memory[at : at + -(-size // piece)])
                views[-1] = views[-1][: size - (len(views) - 1) * piece]
                jobs.append((descriptor, start, views, size))
                at += len(views)

        def one(job: tuple[int, int, list[memoryview], int]) -> None:
            descriptor, start, views, size = job
            if call(descriptor, views, start) != size:
                raise OSError(f"short transfer at {start}")

        descriptors = {descriptor for descriptor, _, _ in ranges}
        begin = time.perf_counter()
        # As many syncs as kvstore made, spread as it spreads them: after equal parts.
        parts = max(1, syncs)
        for part in range(parts):
            first, last = part * len(jobs) // parts, (part + 1) * len(jobs) // parts
            list(self._pool.map(one, jobs[first:last]))
            if syncs:
                for descriptor in descriptors:
                    os.fdatasync(descriptor)
        return time.perf_counter() - begin

    def read_seconds(self, files: Sequence[tuple[Path, int]]) -> float:
        """Read the first bytes of each file, and return how long it took.

        Args:
            files: path and number of bytes, a multiple of 4096.
        """
        opened = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in files]
        try:
            ranges = [(fd, 0, size) for fd, (_, size) in zip(opened, files, strict=True)]
            return self._run(os.preadv, ranges, syncs=0)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def write_seconds(self, file: Path, size: int, syncs: int) -> float:
        """Write the first `size` bytes of a file, and return how long it took.

        Args:
            file: is created when it is not there.
            size: bytes, a multiple of 4096.
            syncs: fdatasync calls in all, the last one at the end.
        """
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            return self._run(os.pwritev, [(descriptor, 0, size)], syncs)
        finally:
            os.close(descriptor)
