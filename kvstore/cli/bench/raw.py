"""What the machine does without kvstore: memory copies, direct reads and direct writes.

The baselines are meant to be hard to beat: same bytes, same block size, as many threads as the
disk tier has, memory that has been touched before.
"""

from __future__ import annotations

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

__all__ = ["RawDisk", "copy_seconds", "touched"]

Blocks = npt.NDArray[np.uint8]

# A call of this size is large enough for any NVMe, and small enough to occupy all threads.
_CALL_BYTES: Final = 4 * MIB


def touched(blocks: int, block_bytes: int) -> Blocks:
    """Return page-aligned memory for blocks, every page of it touched."""
    memory = mmap.mmap(-1, blocks * block_bytes)
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

    def __init__(self, threads: int, memory: Blocks) -> None:
        """Start the threads.

        Args:
            threads: as many as the disk tier has.
            memory: page-aligned memory to read into and write from.
        """
        self._view = memory.reshape(-1).data
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
        jobs, at = [], 0
        for descriptor, offset, length in ranges:
            for start in range(offset, offset + length, _CALL_BYTES):
                size = min(_CALL_BYTES, offset + length - start)
                jobs.append((descriptor, start, self._view[at : at + size]))
                at += size

        def one(job: tuple[int, int, memoryview]) -> None:
            descriptor, start, view = job
            if call(descriptor, [view], start) != len(view):
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
