"""What survives the daemon, in LMDB: spaces, epochs, pins, limits, where each block on disk lies.

Files in the state directory:

    index.mdb/data.mdb   LMDB's data (records in `kvstore.index.records`)
    index.mdb/lock.mdb   LMDB's lock and readers; nothing in it outlives its users
    index.mdb/seal       proof that data.mdb is whole (`kvstore.index.lmdb_file`)
    epochs               every bumped epoch (`kvstore.index.epoch_log`)
    index.mdb.damaged-T  an index that was put aside at Unix time T; the newest three are kept

Commit protocol, for one group of blocks
  1. The blocks' bytes are written to the disk tier and synced. (The caller's part. A record that
     is durable before its bytes would name garbage after a power loss.)
  2. Every record is encoded, before any transaction: a bad one changes nothing.
  3. One write transaction: deletes, then puts, so that a block that moved keeps its new place.
     If the map is full it is doubled and the whole transaction runs again.
  4. The commit syncs the data pages, then writes and syncs the meta page (LMDB's own order).
     When `commit_blocks` returns, the group is durable as a whole; if it raises, no part of it is.
  5. Slots of deleted records may be used again from here on, not earlier. (The caller's part.)
A bumped epoch is appended to the epochs file, and synced, before LMDB commits it.

Recovery protocol, `MetaStore.open_or_reset`
  1. The seal holds: the file is, bit by bit, what an orderly stop left. It is opened.
  2. Otherwise a child process walks the file and copies every record whose checksum holds into a
     fresh environment, `index.mdb.copy-…`, of another name each time: a child whose parent was
     killed may still be writing to the last one. What kills a process that walks a damaged file kills the child. This
     process maps only what the child wrote: broken pages, also those of LMDB's free list, which
     no walk can see and the next commit would step into, stay behind with the old file.
  3. The copy replaces data.mdb by an atomic rename, then the directory is synced. Killed at any
     moment: the old file or the new one. If records were lost the old file is kept aside.
  4. The child died, hung, or could make nothing of the file: the directory is put aside and an
     empty one is created. Epochs come from the epochs file and do not run backwards.
  5. A format version of another release is refused, and the file left alone.

Damage can bring back an older state of a record whose checksum holds (a page of an earlier
transaction). Such a record may name a slot that holds another block by now: the block's digests
tell. Whoever loads records must expect blocks without parent, and slots that are named twice.

What remains: damage done to the file, or by the device, while the environment is open; a device
that returns other bytes to LMDB than it returned to the seal's reader a moment earlier.
"""

from __future__ import annotations

import contextlib
import errno
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from kvstore.errors import ConfigError
from kvstore.index import records
from kvstore.index.epoch_log import EpochLog, sync_directory
from kvstore.index.lmdb_env import StoreDamaged
from kvstore.index.lmdb_file import (
    DATA_NAME,
    FILE_NAMES,
    break_seal,
    seal_holds,
    write_seal,
)
from kvstore.index.lmdb_recovery import ENV_NAME, CheckResult, check_in_child, put_aside, renew
from kvstore.index.lmdb_settings import StoredSettings
from kvstore.mounts import network_filesystem
from kvstore.regular_file import check_regular
from kvstore.syncpoint import reach

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.index.lmdb_env import Txn
    from kvstore.index.records import BlockRecord, SpaceRecord
    from kvstore.space import SpaceSpec

__all__ = ["CheckResult", "LoadResult", "MetaStore", "StoreDamaged", "check_in_child"]

_EPOCHS_NAME: Final = "epochs"
# The device's fault, not the file's: an empty file in its place would not do better.
_DEVICE_ERRORS: Final = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ENOSPC, errno.EROFS}
)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What `MetaStore.load_blocks` found.

    Attributes:
        records: every intact record; those of a space in the order of their keys.
        damaged: records that were skipped.
    """

    records: list[BlockRecord]
    damaged: int


class MetaStore(StoredSettings):
    """The open store.

    Threads: any; calls take turns and block on the disk. The daemon uses one thread for them.
    Never across fork: a child's calls raise KVStoreError.

    Attributes:
        was_clean: the store was new, or was closed in order and not touched since.
    """

    def __init__(self, path: Path, was_clean: bool, epochs: EpochLog) -> None:
        """Use `MetaStore.open` or `MetaStore.open_or_reset`."""
        super().__init__(path / ENV_NAME)
        self._epochs = epochs
        self.was_clean = was_clean

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the store of a state directory, or create it.

        Args:
            path: an existing directory that no other process uses.

        Raises:
            ConfigError: the directory cannot hold a store.
            FormatVersionError: it holds one of another release.
            StoreDamaged: LMDB cannot open what is there, or the file is cut short.
        """
        _check_directory(path)
        return cls._open(path, False, _open_epochs(path))

    @classmethod
    def _open(cls, path: Path, lost: bool, epochs: EpochLog) -> Self:
        directory = path / ENV_NAME
        new = not (directory / DATA_NAME).exists()
        try:
            was_clean = new or seal_holds(directory)
            directory.mkdir(mode=0o700, exist_ok=True)
            store = cls(path, was_clean, epochs)
            if not was_clean:
                store._env.check_size()
            store._prepare(new, lost)
            if new:
                sync_directory(directory)
                sync_directory(path)
        except OSError as error:
            raise _failed(directory, error) from error
        return store

    @classmethod
    def open_or_reset(cls, path: Path, timeout_s: float = 120.0) -> tuple[Self, str | None]:
        """Open the store; if it is not whole, save what can be saved.

        Args:
            path: as for `open`.
            timeout_s: seconds for the child that walks it after an unclean stop.

        Returns:
            The store, and one line about what was lost, None if nothing was.

        Raises:
            ConfigError, FormatVersionError: as for `open`.
            StoreDamaged: the device fails or is full: not even an empty one can be created.
        """
        _check_directory(path)
        directory = path / ENV_NAME
        note: str | None = None
        clean = True
        # First of all: what is wrong with the epochs file is no reason to touch the index.
        epochs = _open_epochs(path)
        try:
            if (directory / DATA_NAME).exists() and not seal_holds(directory):
                clean = False
                note = renew(path, timeout_s, lambda: _raise_floor(epochs))
            try:
                store = cls._open(path, note is not None, epochs)
            except StoreDamaged as error:
                if error.errno in _DEVICE_ERRORS:
                    raise
                clean = False
                _raise_floor(epochs)
                note = f"{error}; starting empty, the old index is {put_aside(path)}"
                store = cls._open(path, True, epochs)
        except OSError as error:
            raise _failed(directory, error) from error
        store.was_clean = clean
        return store, note

    def close(self) -> None:
        """Close the store. Idempotent."""
        self._env.close()

    def mark_open(self) -> None:
        """Break the seal: from here on a stop without `mark_clean` is an unclean one.

        Raises:
            StoreDamaged: the seal may still be there. (It would not hold after a commit.)
        """
        with self._env.use():
            break_seal(self._directory)

    def mark_clean(self) -> None:
        """Seal the file; call it last. A later commit makes the seal worthless, not wrong.

        Raises:
            StoreDamaged: it is not sealed.
        """
        with self._env.use():
            self._env.sync()
            write_seal(self._directory)

    def spaces(self) -> list[SpaceRecord]:
        """Return every space, in the order in which they were first put."""
        with self._env.use():
            return sorted(self._spaces.values(), key=lambda record: record.number)

    def put_space(self, spec: SpaceSpec) -> SpaceRecord:
        """Return the space's record; make it, durably, if there is none. Idempotent.

        Raises:
            StoreDamaged: there is none and it was not made.
        """
        space_id = spec.fingerprint
        with self._env.use():
            if space_id in self._spaces:
                return self._spaces[space_id]
            epoch = self._epochs.epoch(space_id)

            def put(txn: Txn) -> SpaceRecord:
                # The next number follows from the keys, which are never deleted: a damaged
                # space's number must not pass to another one, and its records with it.
                cursor = txn.cursor()
                last = int.from_bytes(cursor.key(), "big") if cursor.last() else 0
                record = records.SpaceRecord(last + 1, spec, epoch)
                txn.put(records.number_key(record.number), records.encode_space(record))
                return record

            return self._remember(self._env.write(records.SPACES, put))

    def bump_epoch(self, space_id: bytes) -> int:
        """Return the space's new epoch, durable.

        Raises:
            UnknownSpace: it was never put.
            StoreDamaged: the epoch is still the old one; after the next start it may be new.
        """
        with self._env.use():
            old = self._space(space_id)
            epoch = max(old.epoch, self._epochs.epoch(space_id)) + 1
            self._epochs.append(space_id, epoch)
            reach("epoch.logged")
            bumped = self._put_epoch(old, epoch).epoch
            reach("epoch.committed")
            return bumped

    def stores(self) -> list[bytes]:
        """Return the ids of the disk stores that something was ever committed for."""
        prefix = records.BLOCKS
        found: list[bytes] = []
        for name in self._env.names():
            if name.startswith(prefix):
                with contextlib.suppress(ValueError):
                    found.append(bytes.fromhex(name.removeprefix(prefix).decode()))
        return found

    def clear_store(self, store_id: bytes) -> None:
        """Forget every block of a disk store, durably. Idempotent.

        Raises:
            StoreDamaged: nothing changed.
        """
        self._env.clear(records.blocks_database(store_id))

    def load_blocks(self, store_id: bytes) -> LoadResult:
        """Return every intact record of a disk store, of all epochs.

        Raises:
            FormatVersionError: a record is of another release.
            StoreDamaged: LMDB fails.
        """
        found: list[BlockRecord] = []
        path, decode, damaged = str(self._directory), records.decode_block, 0
        with self._env.use():
            for space_id, key, value in self._records(records.blocks_database(store_id)):
                try:
                    found.append(decode(space_id, key, value, path))
                except records.DamagedRecord:
                    damaged += 1
        self.damaged += damaged
        return LoadResult(found, damaged)

    def commit_blocks(
        self,
        store_id: bytes,
        puts: Sequence[BlockRecord],
        deletes: Sequence[tuple[bytes, bytes]],
    ) -> None:
        """Commit one group: deletes, then puts, in one transaction, durable on return.

        Args:
            store_id: the disk store, at most 128 bytes.
            puts: records, whose blocks' bytes are durable.
            deletes: (space id, key) of records; unknown ones are ignored.

        Raises:
            UnknownSpace, ValueError: a record cannot be written; nothing changed.
            StoreDamaged: nothing changed; the same call may be repeated.
        """
        if not (puts or deletes):
            return
        with self._env.use():
            items = [(self._key(r.space_id, r.key), records.encode_block(r)) for r in puts]
            gone = [self._key(*name) for name in deletes if name[0] in self._spaces]

            def commit(txn: Txn) -> None:
                for key in gone:
                    txn.delete(key)
                for key, value in items:
                    txn.put(key, value)
                reach("blocks.put")

            self._env.write(records.blocks_database(store_id), commit)
            reach("blocks.committed")

    def _prepare(self, new: bool, lost: bool) -> None:
        """Check the format, read the spaces, bring both copies of the epochs together."""
        path = str(self._directory)
        try:
            with self._env.use():
                value = self._env.get(records.META, records.FORMAT_KEY)
                found = None if value is None else records.format_version(value, path)
                if found is not None:
                    self._format = found
                else:
                    # Of a damaged one, what it held is not known: the later version reads both.
                    lost_version = value is not None or not new
                    least = records.FORMAT_VERSION if lost_version else records.FIRST_FORMAT
                    self._need_format(least)
                for key, value in list(self._env.items(records.SPACES)):
                    number = int.from_bytes(key, "big")
                    try:
                        self._remember(records.decode_space(number, value, path))
                    except records.DamagedRecord:
                        self.damaged += 1
                # If both LMDB and the epochs file lost something, no small epoch is safe any
                # more, not even of a space that is here: its record may be an old one.
                if lost or self.damaged or (new and self._epochs.damaged):
                    _raise_floor(self._epochs)
                self._epochs.create()
                for record in list(self._spaces.values()):
                    epoch = self._epochs.epoch(record.space_id)
                    if epoch < record.epoch:
                        self._epochs.append(record.space_id, record.epoch)
                    elif epoch > record.epoch:
                        self._put_epoch(record, epoch)
        except BaseException:
            self._env.close()
            raise

    def _put_epoch(self, old: SpaceRecord, epoch: int) -> SpaceRecord:
        record = records.SpaceRecord(old.number, old.spec, epoch)
        key, value = records.number_key(record.number), records.encode_space(record)
        self._env.write(records.SPACES, lambda txn: txn.put(key, value))
        return self._remember(record)


def _failed(path: Path, error: OSError) -> StoreDamaged:
    """Return what the operating system says, about the file that it says it of."""
    name = path if error.filename is None else error.filename
    return StoreDamaged(str(name), error.strerror or error, error.errno or 0)


def _raise_floor(epochs: EpochLog) -> None:
    """LMDB lost something: if the epochs file did, too, no small epoch is safe any more."""
    if epochs.damaged or epochs.missing:
        epochs.raise_floor(int(time.time()))


def _open_epochs(path: Path) -> EpochLog:
    """Read the epochs file of a state directory.

    Raises:
        FormatVersionError: it is of another release.
        StoreDamaged: it cannot be read.
    """
    file = path / _EPOCHS_NAME
    try:
        return EpochLog.open(file)
    except OSError as error:
        raise _failed(file, error) from error


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"{path}: not a directory")
    if kind := network_filesystem(path):
        raise ConfigError(f"{path}: is on {kind}; the state directory needs a local file system")
    # LMDB opens what is there: a FIFO would hold up the start, and a lock file that is none would
    # pass for damage to the data.
    for file in (path / ENV_NAME / name for name in FILE_NAMES):
        try:
            check_regular(file)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _failed(file, error) from error
