"""The disk tier's directory: who owns it, which store lies in it, which segments.

    lock                 flock held by the daemon that uses the directory
    store-id             one line: ``kvstore-disk <version> <32 hex digits>``
    seg-000000.kvs …     segments (`kvstore.tiers.segment`)
    *.tmp                the rest of a creation that a crash cut short

Opening: 1. lock; 2. read ``store-id``, or create it (write ``store-id.tmp``, fsync, rename, fsync
the directory: the name is either absent or complete); 3. remove temporary files; 4. validate the
headers of all segments. Files of any other name are not ours and are never touched.

Every function here blocks: call it on a thread.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError, FormatVersionError
from kvstore.regular_file import read_regular
from kvstore.syncpoint import reach
from kvstore.tiers.segment import (
    HEADER_BYTES,
    TEMPORARY_SUFFIX,
    Segment,
    open_segment,
    sync_directory,
)
from kvstore.units import PAGE_BYTES, format_bytes

__all__ = ["STORE_FORMAT_VERSION", "DiskDirectory", "make_directory"]

_log = logging.getLogger(__name__)

STORE_FORMAT_VERSION: Final = 1

_LOCK: Final = "lock"
_STORE_ID: Final = "store-id"
_MOST_STORE_ID_BYTES: Final = 1 << 16
_PROBE: Final = "probe" + TEMPORARY_SUFFIX
_STORE_LINE: Final = re.compile(r"kvstore-disk (\d+) ([0-9a-f]{32})\n")
_SEGMENT_NAME: Final = re.compile(r"seg-(\d{6,10})\.kvs(\.tmp)?")


class DiskDirectory:
    """A locked directory.

    Attributes:
        path: absolute.
        store_id: 16 random bytes, made with the store.
        segments: what was found, by number, in order.
        next_id: number that no file in the directory has.
    """

    def __init__(self, path: Path, store_id: bytes, lock: int) -> None:
        """Wrap a directory that `open` has locked."""
        self.path = path
        self.store_id = store_id
        self.segments: dict[int, Segment] = {}
        self.next_id = 0
        self._lock = lock

    @classmethod
    def open(cls, path: Path, capacity_bytes: int) -> DiskDirectory:
        """Lock the directory, created if missing, and list its segments.

        Raises:
            ConfigError: it is not a directory, not writable, in use, too small, or not readable.
            FormatVersionError: a later release wrote it.
        """
        path = path.absolute()
        with _one_line(path):
            make_directory(path)
            status = os.statvfs(path)
            size_bytes = status.f_blocks * status.f_frsize
            if size_bytes and capacity_bytes > size_bytes:
                raise ConfigError(
                    f"disk capacity {format_bytes(capacity_bytes)}: the file system of {path} "
                    f"has only {format_bytes(size_bytes)}"
                )
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            with _one_line(path):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(f"disk directory {path}: another daemon uses it") from None
                directory = cls(path, _store_id(path), lock)
                directory._scan()
                try:
                    directory.probe()
                except OSError as error:
                    # A disk that is full, of our own segments maybe, still serves them.
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
        except BaseException:
            os.close(lock)
            raise
        return directory

    def _scan(self) -> None:
        for entry in sorted(self.path.iterdir()):
            if entry.name == _PROBE or entry.name == _STORE_ID + TEMPORARY_SUFFIX:
                entry.unlink()
                continue
            match = _SEGMENT_NAME.fullmatch(entry.name)
            if match is None:
                continue
            if match[2]:
                if entry.is_file() or entry.is_symlink():
                    # Of a link only the link goes: what it points to is not ours.
                    _log.info("removing %s: its creation was cut short", entry)
                    entry.unlink()
                else:
                    _log.warning("leaving %s alone: it is no file", entry)
                    self.next_id = max(self.next_id, int(match[1]) + 1)
                continue
            self.next_id = max(self.next_id, int(match[1]) + 1)
            try:
                segment = open_segment(entry, self.store_id)
            except OSError as error:
                _log.warning("leaving %s alone: %s", entry, error.strerror)
                continue
            if segment is None:
                _log.warning("leaving %s alone: it is not a segment of this store", entry)
                continue
            self.segments[segment.id] = segment

    def delete(self, segment: Segment) -> None:
        """Remove a segment's file; one that is gone or replaced already is left alone.

        Raises:
            OSError: it is still there.
        """
        path = Path(segment.file.path)
        try:
            status = path.lstat()
        except FileNotFoundError:
            return
        if (status.st_dev, status.st_ino) == (segment.file.device, segment.file.inode):
            path.unlink()
            reach("segment.unlinked")
            sync_directory(self.path)

    def misfits(self, segments: Sequence[Segment]) -> Iterator[str]:
        """Yield one line for each file that is no segment's, and each segment without its file."""
        names = {Path(segment.file.path).name: segment for segment in segments}
        for entry in self.path.iterdir():
            match = _SEGMENT_NAME.fullmatch(entry.name)
            if entry.name.endswith(TEMPORARY_SUFFIX):
                yield f"{entry.name} is left over"
            elif match is not None and entry.name not in names:
                yield f"{entry.name} is no segment's file"
        for name, segment in names.items():
            size = (self.path / name).stat().st_size if (self.path / name).exists() else -1
            if size < HEADER_BYTES + segment.data_bytes:
                yield f"{name} has {size} bytes, not {HEADER_BYTES + segment.data_bytes}"

    def takes_direct_io(self) -> bool:
        """Tell whether the file system opens files with O_DIRECT."""
        try:
            os.close(os.open(self.path / _STORE_ID, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return False
        return True

    def probe(self) -> None:
        """Write, sync, read back and remove a page.

        Raises:
            OSError: the file system cannot do it.
        """
        path = self.path / _PROBE
        page = secrets.token_bytes(PAGE_BYTES)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            written = os.pwrite(descriptor, page, 0)
            os.fsync(descriptor)
            if written != PAGE_BYTES or os.pread(descriptor, PAGE_BYTES, 0) != page:
                raise OSError(errno.EIO, "a page did not read back as written", str(path))
        finally:
            os.close(descriptor)
            with suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def make_directory(path: Path) -> None:
    """Create a directory and those above it as needed, so that a loss of power does not undo it.

    Raises:
        OSError: it is not there, or may not be after a loss of power.
    """
    made = [directory for directory in (path, *path.parents) if not directory.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    for directory in made:
        sync_directory(directory.parent)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"disk directory {path}: not a directory") from None
    except OSError as error:
        name = path if error.filename is None else error.filename
        what = "" if Path(name) == path else f"{Path(name).name}: "
        raise ConfigError(f"disk directory {path}: not usable: {what}{error.strerror}") from error


def _store_id(directory: Path) -> bytes:
    """Read the store's id, or make one."""
    path = directory / _STORE_ID
    try:
        line = read_regular(path, _MOST_STORE_ID_BYTES).decode("ascii", "replace")
    except FileNotFoundError:
        return _make_store_id(directory)
    match = _STORE_LINE.fullmatch(line)
    if match is None:
        # Making a new id would orphan every segment in silence.
        raise ConfigError(f"disk directory {directory}: its file {_STORE_ID} is damaged")
    if int(match[1]) != STORE_FORMAT_VERSION:
        raise FormatVersionError(str(path), int(match[1]), STORE_FORMAT_VERSION)
    return bytes.fromhex(match[2])


def _make_store_id(directory: Path) -> bytes:
    store_id = secrets.token_bytes(16)
    temporary = directory / (_STORE_ID + TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, f"kvstore-disk {STORE_FORMAT_VERSION} {store_id.hex()}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    reach("store_id.synced")
    temporary.rename(directory / _STORE_ID)
    reach("store_id.renamed")
    sync_directory(directory)
    return store_id
