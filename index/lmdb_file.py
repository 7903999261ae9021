"""LMDB's data file seen from outside, with plain reads: is it safe to map into this process?

LMDB maps its file and trusts it: a file that was cut short or changed kills the process that
walks it (SIGBUS, SIGSEGV, a failed assertion) or misleads it. LMDB has no page checksums, so the
whole file gets one when the daemon stops in order: the seal.

    seal:  "KVSEAL" ‖ uint8 0 ‖ uint8 version = 1 ‖ uint64 file size ‖ XXH3-128 of the file (16)
           ‖ uint64 XXH3-64 of the 32 before                                    (40 bytes)

Sealing (a stop in order, after the last commit): 1. write ``seal.new`` and sync it; 2. rename it to
``seal``; 3. sync the directory. Breaking (a start, before the first commit): 1. remove it; 2. sync
the directory. Killed in between, the seal is there or not; one that is there and should not be does
not hold any more after the next commit.

A seal that holds proves that the file is the one a healthy process left, bit by bit. A seal that
is missing, or does not hold, proves nothing: the file then goes through a child process
(`kvstore.index.lmdb_check`). Hashing runs at several GB/s; the file has some 400 bytes a block.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final

import xxhash

from kvstore.errors import FormatVersionError
from kvstore.index.epoch_log import sync_directory
from kvstore.syncpoint import reach

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "DATA_NAME",
    "FILE_NAMES",
    "SEAL_VERSION",
    "break_seal",
    "missing_bytes",
    "seal_holds",
    "write_seal",
]

SEAL_VERSION: Final = 1
DATA_NAME: Final = "data.mdb"

_SEAL_NAME: Final = "seal"
# Whatever is opened in the directory.
FILE_NAMES: Final = (DATA_NAME, "lock.mdb", _SEAL_NAME, f"{_SEAL_NAME}.new")
_SEAL: Final = struct.Struct("<7sBQ16s")
_SEAL_MAGIC: Final = b"KVSEAL\0"
_CHUNK_BYTES: Final = 1 << 20

# Source: lmdb.h and mdb.c of LMDB 0.9, MDB_page header (16 bytes) followed by MDB_meta.
_META: Final = struct.Struct("=IIQQ 8s40s 48s QQ")
_META_OFFSET: Final = 16
_MDB_MAGIC: Final = 0xBEEFC0DE


def missing_bytes(data: Path) -> int:
    """Return how many bytes the file lacks of what its two meta pages say it has.

    Reading a mapping behind the file's end raises SIGBUS, which no handler survives.

    Returns:
        0 if it is whole; -1 if a meta page is not one.

    Raises:
        FormatVersionError: both meta pages are LMDB's, of a version that this reader does not
            know.
        OSError: the file cannot be read.
    """
    with data.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        page = 0
        needed, versions = 0, set()
        for _ in range(2):
            head = os.pread(file.fileno(), _META.size, page + _META_OFFSET)
            if len(head) < _META.size:
                return -1
            magic, version, _, _, first, _, _, last, _ = _META.unpack(head)
            # The size of a page lies in the first database's unused padding field.
            page_bytes = int.from_bytes(first[:4], "little")
            if magic != _MDB_MAGIC or (page and page_bytes != page):
                return -1
            if page_bytes < 512 or page_bytes > 1 << 16 or page_bytes & (page_bytes - 1):
                return -1
            versions.add(version)
            needed = max(needed, (last + 1) * page_bytes)
            page = page_bytes
    if versions != {1}:
        if len(versions) == 1:
            raise FormatVersionError(str(data), versions.pop(), 1)
        return -1
    return max(0, needed - size)


def _file_digest(data: Path) -> tuple[int, bytes]:
    hasher, size = xxhash.xxh3_128(), 0
    with data.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return size, hasher.digest()


def _sealed(size: int, digest: bytes) -> bytes:
    body = _SEAL.pack(_SEAL_MAGIC, SEAL_VERSION, size, digest)
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def write_seal(directory: Path) -> None:
    """Seal the directory's data file, durably. Nobody may write to it meanwhile.

    Raises:
        OSError: it is not sealed.
    """
    seal, fresh = directory / _SEAL_NAME, directory / f"{_SEAL_NAME}.new"
    fresh.unlink(missing_ok=True)
    with fresh.open("xb") as file:
        file.write(_sealed(*_file_digest(directory / DATA_NAME)))
        file.flush()
        os.fsync(file.fileno())
    reach("seal.synced")
    fresh.replace(seal)
    reach("seal.renamed")
    sync_directory(directory)


def break_seal(directory: Path) -> None:
    """Remove the seal, durably. Idempotent.

    Raises:
        OSError: it may still be there.
    """
    (directory / _SEAL_NAME).unlink(missing_ok=True)
    reach("seal.unlinked")
    sync_directory(directory)


def seal_holds(directory: Path) -> bool:
    """Return whether the data file is exactly the one that was sealed.

    Raises:
        OSError: the data file cannot be read.
    """
    try:
        seal = (directory / _SEAL_NAME).read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return False
    data = directory / DATA_NAME
    if not data.exists() or len(seal) != _SEAL.size + 8:
        return False
    size = data.stat().st_size
    if _SEAL.unpack(seal[: _SEAL.size])[2] != size:
        return False
    return seal == _sealed(*_file_digest(data))
