"""Byte locks that belong to an open file, not to a process.

An open-file-description (OFD) lock is held by what `open` returned: it is gone when the last
descriptor of that open file is closed, which the kernel does when a process dies, however it dies
and whatever pid namespace it lives in. Closing *another* descriptor of the same file does not
drop it, as it would a POSIX lock (`fcntl.lockf`).

A forked child shares the open file and so keeps the lock alive: open the file with O_CLOEXEC and
close it in children. A lock never conflicts with its own open file, so ask `is_locked` through a
descriptor that was opened separately.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Final

__all__ = ["is_locked", "lock_byte", "unlock_byte"]

# struct flock of 64-bit Linux, native alignment: type, whence, (4 bytes), start, length, pid,
# (4 bytes). The kernel refuses OFD calls with a pid other than 0.
_FLOCK: Final = struct.Struct("@hh4xqqi4x")


def _flock(kind: int, offset: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0)


def lock_byte(fd: int, offset: int) -> bool:
    """Take the exclusive lock on one byte, without waiting. The byte need not exist.

    Args:
        fd: descriptor opened for writing.
        offset: the byte.

    Returns:
        True when this open file holds the lock now (also when it already did), False when another
        open file holds it.

    Raises:
        OSError: the file system has no locks, or `fd` is unusable.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, offset))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock_byte(fd: int, offset: int) -> None:
    """Drop this open file's lock on one byte; nothing happens when it holds none.

    Raises:
        OSError: `fd` is unusable.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, offset))


def is_locked(fd: int, offset: int) -> bool:
    """Return whether an open file other than `fd`'s holds a lock on one byte.

    Raises:
        OSError: the file system has no locks, or `fd` is unusable.
    """
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, offset))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK
