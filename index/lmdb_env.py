"""An LMDB environment: the one module that imports lmdb.

It adds what LMDB leaves to its user: a map that grows, errors of one kind, an environment that
is opened again after it failed, and no use across fork. Databases hold bytes; what they mean is
not known here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import lmdb

from kvstore.errors import KVStoreError
from kvstore.index.lmdb_file import DATA_NAME, missing_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

__all__ = ["LmdbEnv", "StoreDamaged", "Txn"]

T = TypeVar("T")
Txn: TypeAlias = Any  # lmdb.Transaction: the library has no types of its own in every release

_MAX_DBS: Final = 64
_FIRST_MAP_BYTES: Final = 64 << 20


class StoreDamaged(KVStoreError):
    """LMDB failed. The call changed nothing; the next call opens the file again.

    Attributes:
        path: the environment.
        errno: the operating system's number (ENOSPC, EIO, EROFS: the device's fault), else 0.
    """

    def __init__(self, path: str, problem: object, errno: int = 0) -> None:
        """Build the one-line message."""
        # LMDB names the path when it cannot open it.
        text = " ".join(str(problem).split()).removeprefix(f"{path}: ")
        super().__init__(f"{path}: {text}")
        self.path = path
        self.errno = errno


class LmdbEnv:
    """One environment, opened at the first call.

    Threads: any; calls take turns and block on the disk.
    """

    def __init__(self, directory: Path, readonly: bool = False, map_bytes: int = 0) -> None:
        """Name the environment; nothing is opened yet.

        Args:
            directory: holds the data file; must exist.
            readonly: read without locks a file that nobody writes to.
            map_bytes: least size of the map. It is address space: files grow by what is written.
        """
        self.path = directory
        self._readonly = readonly
        self._map_bytes = max(map_bytes, _FIRST_MAP_BYTES)
        self._env: Any = None
        self._dbs: dict[bytes, Any] = {}
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closed = False

    def check_size(self) -> None:
        """Refuse a data file that is cut short: touching its missing pages would be fatal.

        Raises:
            StoreDamaged: it is.
            FormatVersionError: it has LMDB's format of another version.
        """
        data = self.path / DATA_NAME
        try:
            if not data.exists() or not data.stat().st_size or not (missing := missing_bytes(data)):
                return
        except OSError as error:
            raise StoreDamaged(str(data), error, error.errno or 0) from error
        what = "is not an LMDB file" if missing < 0 else f"lacks {missing} bytes at its end"
        raise StoreDamaged(str(data), what)

    def close(self) -> None:
        """Close it. Idempotent; in a forked child it leaves the parent's locks alone."""
        with self._lock:
            self._closed = True
            if os.getpid() == self._pid:
                self._drop()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Hold the environment for several calls, and turn what fails into StoreDamaged.

        Raises:
            StoreDamaged: LMDB or the operating system failed.
            KVStoreError: it is closed, or was opened before fork.
        """
        if os.getpid() != self._pid:
            raise KVStoreError(f"{self.path}: opened before fork; a child must not use it")
        with self._lock:
            if self._closed:
                raise KVStoreError(f"{self.path}: closed")
            try:
                self._open()
                yield
            except lmdb.Error as error:
                # A failed commit can leave the environment unusable (MDB_PANIC): start over.
                self._drop()
                code = max(0, getattr(error, "code", 0))
                raise StoreDamaged(str(self.path), error, code) from error
            except OSError as error:
                name = self.path if error.filename is None else error.filename
                text = error.strerror or error
                raise StoreDamaged(str(name), text, error.errno or 0) from error

    def write(self, name: bytes, body: Callable[[Txn], T]) -> T:
        """Run `body` in a transaction on one database, durable on return; all of it or nothing.

        `body` may run more than once: when the map is full, it is doubled and `body` repeated.

        Raises:
            StoreDamaged: nothing changed.
        """
        with self.use():
            while True:
                try:
                    with self._env.begin(write=True, db=self._db(name)) as txn:
                        return body(txn)
                except lmdb.MapFullError:
                    self._env.set_mapsize(2 * self._env.info()["map_size"])

    def clear(self, name: bytes) -> None:
        """Remove every record of a database, durably.

        Raises:
            StoreDamaged: nothing changed.
        """
        with self.use():
            db = self._db(name)
            self.write(name, lambda txn: txn.drop(db, delete=False))

    def put_sorted(self, name: bytes, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Fill an empty database, page after page, in one transaction.

        Args:
            name: the database.
            items: in ascending order of keys; read once, so the map must be large enough.

        Raises:
            StoreDamaged: nothing was added.
        """
        with self.use(), self._env.begin(write=True, db=self._db(name)) as txn:
            txn.cursor().putmulti(items, append=True)

    def sync(self) -> None:
        """Write everything to the device.

        Raises:
            StoreDamaged: some of it may not be there.
        """
        with self.use():
            self._env.sync(True)

    def names(self) -> list[bytes]:
        """Return the databases' names.

        Raises:
            StoreDamaged: they cannot be read.
        """
        with self.use(), self._env.begin() as txn:
            return [bytes(name) for name, _ in txn.cursor()]

    def get(self, name: bytes, key: bytes) -> bytes | None:
        """Return one value, None if there is none.

        Raises:
            StoreDamaged: it cannot be read.
        """
        with self.use():
            if not self._exists(name):
                return None
            with self._env.begin(db=self._db(name)) as txn:
                value: bytes | None = txn.get(key)
                return value

    def items(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over one database in key order, none if there is no such database.

        The environment is held until the iterator ends or is closed.

        Raises:
            StoreDamaged: LMDB fails, or it has more or fewer records than it says.
        """
        with self.use():
            if not self._exists(name):
                return
            db, seen = self._db(name), 0
            with self._env.begin(db=db) as txn:
                expected = txn.stat(db)["entries"]
                for item in txn.cursor():
                    seen += 1
                    yield item
            if seen != expected:
                raise StoreDamaged(str(self.path), f"{seen} of {expected} records found")

    def _exists(self, name: bytes) -> bool:
        return name in self._dbs or name in self.names()

    def _db(self, name: bytes) -> Any:
        while name not in self._dbs:
            try:
                self._dbs[name] = self._env.open_db(name, create=not self._readonly)
            except lmdb.MapFullError:
                self._env.set_mapsize(2 * self._env.info()["map_size"])
        return self._dbs[name]

    def _open(self) -> None:
        if self._env is not None:
            return
        data = self.path / DATA_NAME
        size = data.stat().st_size if data.exists() else 0
        self._env = lmdb.open(
            os.fspath(self.path),
            map_size=max(self._map_bytes, 2 * size),
            max_dbs=_MAX_DBS,
            max_readers=16,
            mode=0o600,
            readonly=self._readonly,
            lock=not self._readonly,
        )
        if not self._readonly:
            self._env.reader_check()

    def _drop(self) -> None:
        self._dbs.clear()
        if self._env is not None:
            self._env.close()
            self._env = None
