"""The pool's control file: who is alive.

Layout: none. The file is empty; attachment `i` holds an OFD write lock on byte `i`, which need not
exist. The lock is gone when the process is, whatever stopped it and whatever its pid namespace;
heartbeats can only ever say that a process is silent.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kvstore.errors import TierClosed
from kvstore.locks import is_locked

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CONTROL_NAME", "ControlFile"]

CONTROL_NAME: Final = "control"


class ControlFile:
    """The daemon's side of the locks. Calls take about 2 µs and may be made on the event loop.

    Attributes:
        path: of the file; clients open it themselves, read-write and once per attachment.
    """

    def __init__(self, directory: Path) -> None:
        """Create the file, or open the one that a previous daemon of this pool left.

        Raises:
            OSError: the directory is not writable.
        """
        self.path = directory / CONTROL_NAME
        # The daemon must never take a lock through this descriptor: it could not see a conflict.
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._last_id = 0

    def next_id(self) -> int:
        """Return an attachment id: at least 1, and never the same one twice."""
        self._last_id += 1
        return self._last_id

    @property
    def last_id(self) -> int:
        """The last id that was handed out."""
        return self._last_id

    @property
    def inode(self) -> int:
        """Number that tells this file from another of its name."""
        return os.fstat(self._fd).st_ino

    def skip_to(self, attachment_id: int) -> None:
        """Hand out no id up to this one: a daemon that adopts a pool does not reuse its ids."""
        self._last_id = max(self._last_id, attachment_id)

    def lock_offset(self, attachment_id: int) -> int:
        """Return the byte that this attachment locks."""
        return attachment_id

    def is_alive(self, attachment_id: int) -> bool:
        """Return whether the attachment's lock is held.

        Raises:
            TierClosed: the control file was closed; nothing is known about anybody.
        """
        if self._fd < 0:
            raise TierClosed("host", "the control file is closed")
        return is_locked(self._fd, attachment_id)

    def close(self) -> None:
        """Close the descriptor; the file stays. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
