"""Whether a directory takes O_DIRECT, and in which units: found out by doing it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstore.units import KIB

__all__ = ["direct_alignment"]

_UNITS: Final = tuple(size * KIB // 2 for size in (1, 2, 4, 8, 16, 32, 64, 128))
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)


@contextmanager
def _scratch(directory: Path) -> Iterator[str]:
    """Yield a path that opens a file which has no name, so that nothing is ever left behind."""
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as failure:
        # EISDIR comes from file systems that do not know the flag.
        if failure.errno not in (*_REFUSED, errno.EISDIR):
            raise
        descriptor, name = tempfile.mkstemp(prefix=".doctor-", dir=directory)
        os.unlink(name)  # noqa: PTH108 - a Path for one call
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _round_trip(descriptor: int, unit: int, buffer: mmap.mmap) -> bool:
    """Write and read one unit whose file offset, length and address are multiples of `unit` only.

    Returns:
        False when the file system wants larger units.

    Raises:
        OSError: the device fails, or what was read is not what was written.
    """
    pattern = secrets.token_bytes(unit)
    with memoryview(buffer)[unit : 2 * unit] as part:
        part[:] = pattern
        try:
            written = os.pwritev(descriptor, [part], unit)
            part[:] = bytes(unit)
            read = os.preadv(descriptor, [part], unit)
        except OSError as failure:
            if failure.errno == errno.EINVAL:
                return False
            raise
        if written != unit or read != unit or part != pattern:
            raise OSError(errno.EIO, "what was read is not what was written")
    return True


def direct_alignment(directory: Path) -> int | None:
    """Return the smallest unit of direct I/O in bytes, None when O_DIRECT is refused. Blocks.

    Raises:
        OSError: no file can be made in the directory, or its device fails.
    """
    with _scratch(directory) as path, contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as failure:
            if failure.errno in _REFUSED:
                return None
            raise
        stack.callback(os.close, descriptor)
        # A file has blocks where units smaller than a block are tried, as segments do.
        with contextlib.suppress(OSError):
            os.posix_fallocate(descriptor, 0, 2 * _UNITS[-1])
        buffer = stack.enter_context(mmap.mmap(-1, 2 * _UNITS[-1]))
        return next((unit for unit in _UNITS if _round_trip(descriptor, unit, buffer)), None)
