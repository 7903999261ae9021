"""The interface of an I/O engine: batches of file ranges to and from memory.

An engine knows files and bytes, nothing about blocks, digests or capacity. It opens files by
itself, because engines register them differently (a descriptor, a cuFile handle), and keeps a
bounded number open.

Threads: every method is called on the event loop's thread and returns at once or is a coroutine;
system calls and `landed` callbacks run on the engine's threads. A cancelled coroutine drops what
has not begun, waits for the system calls that have, then raises ``CancelledError``.

Errors are values, one ``errno`` per request, so that one bad block never fails its neighbours.
Besides the operating system's numbers: ``ENODATA`` (`SHORT`), the file ends before the request
does; ``ESTALE`` (`REPLACED`), the path no longer names the file it named when it was opened by
the tier; ``ECANCELED``, not begun.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = [
    "FILE_GONE",
    "REPLACED",
    "SHORT",
    "Buffer",
    "DeviceBuffer",
    "IoEngine",
    "IoFile",
    "IoRequest",
    "error_text",
]

SHORT: Final = errno.ENODATA
REPLACED: Final = errno.ESTALE
# The file itself is unusable, not just one place in it.
FILE_GONE: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, REPLACED, SHORT}
)
_WORDS: Final = {SHORT: "file is cut short", REPLACED: "file was replaced"}


def error_text(number: int) -> str:
    """Return an engine's errno in words."""
    return _WORDS.get(number) or os.strerror(number)


class IoFile(NamedTuple):
    """A file as the tier validated it.

    Attributes:
        path: absolute path.
        device: ``st_dev`` at validation.
        inode: ``st_ino`` at validation; bytes written to a file that has left its path would be
            lost with it, so engines compare.
    """

    path: str
    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Contiguous device memory, as an engine for device targets takes it.

    Attributes:
        address: of its first byte.
        length: bytes.
    """

    address: int
    length: int

    def __len__(self) -> int:
        """Return its bytes, as a memoryview of bytes does."""
        return self.length

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """What CUDA libraries read."""
        return {
            "shape": (self.length,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


Buffer = memoryview | DeviceBuffer


class IoRequest(NamedTuple):
    """One contiguous range of a file and the memory it goes to or comes from.

    Attributes:
        file: the file.
        offset: bytes from its start, a multiple of 4096.
        buffers: contiguous bytes each, multiples of 4096 long, one after the other in the file.
            Device memory only for engines that say so.
    """

    file: IoFile
    offset: int
    buffers: tuple[Buffer, ...]

    @property
    def length(self) -> int:
        """Bytes of the range."""
        return sum(map(len, self.buffers))


class IoEngine(ABC):
    """Moves batches of file ranges."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What really runs, for ``stats``: ``posix``, ``posix-buffered``, ``cufile-gds``."""

    @abstractmethod
    async def open(self) -> None:
        """Start the threads. Once, before any transfer."""

    @abstractmethod
    async def close(self) -> None:
        """Finish what was submitted, close files, end the threads. Idempotent."""

    @abstractmethod
    async def read(
        self, requests: Sequence[IoRequest], landed: Callable[[int], None] | None = None
    ) -> list[int]:
        """Fill buffers from files.

        Args:
            requests: ranges that do not overlap in memory.
            landed: called on an engine thread with a request's position as soon as all of its
                bytes are in place, so that checking them overlaps other requests' reads.

        Returns:
            One errno per request, 0 for done. After an error a buffer's content is undefined.
        """

    @abstractmethod
    async def write(self, requests: Sequence[IoRequest]) -> list[int]:
        """Write buffers to files; durable only after `sync`.

        Returns:
            One errno per request, 0 for done. After an error the range's content is undefined.
        """

    @abstractmethod
    async def sync(self, files: Sequence[IoFile]) -> list[int]:
        """Make everything written before the call durable.

        Returns:
            One errno per file, 0 for done. After an error, what was written to the file since its
            last good sync may be lost even if a later sync succeeds.
        """

    @abstractmethod
    def forget(self, file: IoFile) -> None:
        """Close the file as soon as nobody uses it; it may be deleted now."""
