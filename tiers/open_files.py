"""Files that an I/O engine keeps open, least recently used first, a bounded number while idle."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvstore.tiers.io_engine import REPLACED, IoFile

__all__ = ["OpenFiles", "check_identity"]

H = TypeVar("H")


def check_identity(found: os.stat_result, file: IoFile) -> None:
    """Raise OSError (`REPLACED`) unless this is the file that the tier has validated."""
    if (found.st_dev, found.st_ino) != (file.device, file.inode):
        raise OSError(REPLACED, os.strerror(REPLACED), file.path)


class _Entry(Generic[H]):
    """An open file. Guarded by the lock of its `OpenFiles`."""

    __slots__ = ("doomed", "handle", "users")

    def __init__(self, handle: H) -> None:
        self.handle = handle
        self.users = 0
        self.doomed = False


class OpenFiles(Generic[H]):
    """Handles by file. Any thread."""

    def __init__(self, open_file: Callable[[IoFile], H], close_file: Callable[[H], None]) -> None:
        """Start empty.

        Args:
            open_file: opens a file and checks its identity; raises OSError.
            close_file: closes what `open_file` returned.
        """
        # A quarter of what the process may open: sockets and slabs need theirs.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = 512 if soft == resource.RLIM_INFINITY else max(8, min(512, soft // 4))
        self._open_file = open_file
        self._close_file = close_file
        self._lock = threading.Lock()
        self._open: OrderedDict[IoFile, _Entry[H]] = OrderedDict()

    @contextmanager
    def use(self, file: IoFile) -> Iterator[H]:
        """Yield the file's handle, opened if need be.

        Raises:
            OSError: the path is gone, or names something else by now (`REPLACED`).
        """
        # Also for a file that is open already: its bytes may live on without a name, and what
        # is written there is gone with the last descriptor.
        check_identity(os.stat(file.path), file)  # noqa: PTH116 - a Path costs more than the stat
        entry = self._take(file)
        try:
            yield entry.handle
        finally:
            with self._lock:
                entry.users -= 1
                self._shrink(entry)

    def _take(self, file: IoFile) -> _Entry[H]:
        with self._lock:
            entry = self._open.get(file)
            if entry is not None:
                entry.users += 1
                self._open.move_to_end(file)
                return entry
        fresh = _Entry(self._open_file(file))
        with self._lock:
            entry = self._open.setdefault(file, fresh)
            entry.users += 1
            self._open.move_to_end(file)
        if entry is not fresh:
            self._close_file(fresh.handle)
        return entry

    def _shrink(self, entry: _Entry[H]) -> None:
        """Close what is doomed or too much and idle. The lock is held."""
        if entry.doomed and not entry.users:
            self._close_file(entry.handle)
        if len(self._open) > self._limit:
            idle = next((f for f, e in self._open.items() if not e.users), None)
            if idle is not None:
                self._close_file(self._open.pop(idle).handle)

    def forget(self, file: IoFile) -> None:
        """Close the file now, or when its last user is done."""
        with self._lock:
            entry = self._open.pop(file, None)
            if entry is not None:
                entry.doomed = True
                if not entry.users:
                    self._close_file(entry.handle)

    def close(self) -> None:
        """Close every file; nobody uses one any more."""
        with self._lock:
            for entry in self._open.values():
                self._close_file(entry.handle)
            self._open.clear()

    def __len__(self) -> int:
        """Return how many are open."""
        with self._lock:
            return len(self._open)
