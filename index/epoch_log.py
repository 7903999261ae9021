"""The epochs file: every epoch that was ever bumped, outside LMDB, so that none runs backwards.

An epoch is what keeps blocks of old weights unreachable. If LMDB's copy is lost, a space that
started again at epoch 1 could be served blocks that were saved under the first epoch 1. So each
bump is appended here, and synced, before LMDB commits it; after a loss spaces resume from here.

Layout: 56-byte entries, little endian, one after the other. The last one of a space counts.

    "KVEPOCH" ‖ uint8 version = 1 ‖ space id (32) ‖ uint64 epoch ‖ uint64 XXH3-64 of the 48 before

An entry whose space id is all zero is a floor: no space's epoch is below it. The file is created
with floor 1, so that its absence next to an index is noticed. When entries are damaged, or the
file is missing, and LMDB cannot say what they held, the floor is raised to the Unix time: above
any number that bumps, one by one, can have reached. That happens before whatever LMDB lost is out of
sight, so that a crash in between does not make both look whole.

Append protocol
  1. Write the entry at the end of the last whole entry: a torn tail is overwritten.
  2. fsync. Only then is the epoch used.
  3. LMDB commits it (`kvstore.index.lmdb_store`). Killed between 2 and 3, the next start brings LMDB
     up to this file: the bump was not acknowledged, and happened.
Recovery: read whole entries; skip and count those whose checksum does not hold. A torn tail is
an append that nobody was told about.

What remains: a file that loses whole entries off its end, together with the loss of LMDB, is not
noticed.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final, Self

import xxhash

from kvstore.errors import FormatVersionError
from kvstore.regular_file import read_regular
from kvstore.syncpoint import reach

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EPOCH_LOG_VERSION", "EpochLog", "sync_directory"]

EPOCH_LOG_VERSION: Final = 1

_MAGIC: Final = b"KVEPOCH"
_ENTRY: Final = struct.Struct("<7sB32sQ")
_ENTRY_BYTES: Final = _ENTRY.size + 8
_EVERY_SPACE: Final = bytes(32)


def sync_directory(path: Path) -> None:
    """Make a directory's names durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def _entry(space_id: bytes, epoch: int) -> bytes:
    body = _ENTRY.pack(_MAGIC, EPOCH_LOG_VERSION, space_id, epoch)
    return body + _checksum(body)


class EpochLog:
    """The open epochs file. Calls block on the disk; one thread at a time.

    Attributes:
        damaged: entries that were skipped.
        missing: there was no file; `create`, or the first entry, makes it.
    """

    def __init__(self, path: Path, epochs: dict[bytes, int], size: int) -> None:
        """Use `EpochLog.open`."""
        self._path = path
        self._epochs = epochs
        self._size = size
        self.damaged = 0
        self.missing = False

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the file, if there is one. Nothing is changed.

        Raises:
            FormatVersionError: an intact entry is of another version.
            OSError: it cannot be read.
        """
        try:
            data = read_regular(path)
        except FileNotFoundError:
            log = cls(path, {}, 0)
            log.missing = True
            return log
        epochs: dict[bytes, int] = {}
        damaged = 0
        whole = len(data) // _ENTRY_BYTES * _ENTRY_BYTES
        for at in range(0, whole, _ENTRY_BYTES):
            body, checksum = data[at : at + _ENTRY.size], data[at + _ENTRY.size :][:8]
            magic, version, space_id, epoch = _ENTRY.unpack(body)
            if magic != _MAGIC or _checksum(body) != checksum:
                damaged += 1
            elif version != EPOCH_LOG_VERSION:
                raise FormatVersionError(str(path), version, EPOCH_LOG_VERSION)
            else:
                epochs[space_id] = max(epoch, epochs.get(space_id, 0))
        log = cls(path, epochs, whole)
        # The floor is written first: a file without one has lost its beginning.
        log.damaged = damaged + (_EVERY_SPACE not in epochs)
        return log

    def epoch(self, space_id: bytes) -> int:
        """Return the space's epoch as far as this file knows; at least 1."""
        return max(1, self._epochs.get(_EVERY_SPACE, 1), self._epochs.get(space_id, 1))

    def create(self) -> None:
        """Make the file if there is none.

        Raises:
            OSError: it is not made.
        """
        if not self._size:
            self.append(_EVERY_SPACE, 1)

    def append(self, space_id: bytes, epoch: int) -> None:
        """Record a space's epoch durably.

        Raises:
            OSError: it is not recorded.
        """
        if space_id != _EVERY_SPACE:
            self.create()
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, self._size)
            entry = _entry(space_id, epoch)
            written = os.pwrite(fd, entry, self._size)
            if written != len(entry):
                os.pwrite(fd, entry[written:], self._size + written)
            reach("epoch_log.written")
            os.fsync(fd)
            if os.fstat(fd).st_size != self._size + _ENTRY_BYTES:
                raise OSError(f"{self._path}: an entry was written in part")
        finally:
            os.close(fd)
        if self._size == 0:
            sync_directory(self._path.parent)
        self._size += _ENTRY_BYTES
        self._epochs[space_id] = max(epoch, self._epochs.get(space_id, 0))

    def raise_floor(self, epoch: int) -> None:
        """Let no space's epoch be below `epoch` from now on.

        Raises:
            OSError: it is not recorded.
        """
        if epoch > self._epochs.get(_EVERY_SPACE, 0):
            self.append(_EVERY_SPACE, epoch)
