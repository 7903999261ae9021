"""Reading a file as a whole, and nothing but a file.

What stands in the state directory in a file's place must not hold up a start: opening a FIFO waits
for a writer, and a device has no end.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_regular", "read_regular"]


def read_regular(path: Path, most_bytes: int | None = None) -> bytes:
    """Return what is in a regular file.

    Args:
        path: of the file; a link to one is as good.
        most_bytes: what is longer is not read; None: any length.

    Raises:
        OSError: it is not there, no regular file, too long, or cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    # Given to a file object only when it is one: of a directory that would fail, and keep it open.
    try:
        found = os.fstat(fd)
        _check(found, path)
        if most_bytes is not None and found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"has {found.st_size} bytes", str(path))
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def check_regular(path: Path) -> None:
    """Refuse what is no regular file, without opening it; a link to one is as good.

    Raises:
        OSError: it is not there, or no regular file.
    """
    _check(path.stat(), path)


def _check(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))
