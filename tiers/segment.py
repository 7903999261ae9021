r"""Segment files: fixed places for blocks of one shape, preallocated.

On disk, format version 1, all integers little endian:

    offset 0      magic           8 bytes   b"KVSEGM\r\n"
           8      version         u32       1
          12      segment id      u32       as in the file's name
          16      store id        16 bytes  as in the directory's ``store-id``
          32      slot_bytes      u64       a multiple of 4096
          40      shards          u32
          44      blocks          u32
          48      zeros
        4088      checksum        u64       XXH3-64 of bytes 0 … 4087, in every version
        4096      block 0: shards * slot_bytes bytes, its shards one after the other
                  block 1: …

Creation:

    1. write ``seg-000007.kvs.tmp``: reserve its full length, so that no write to a block can run
       out of space later, then the header;
    2. fsync the file, so that a name never leads to a header that is not there;
    3. rename it to ``seg-000007.kvs``;
    4. fsync the directory. Only now is the segment used.

Deletion: no slot of it is in use and no durable record names one; unlink; fsync the directory. Killed
in between it may be back, empty.

A temporary file found at start is the rest of a crash before 3 and is removed. Which blocks hold
data is not recorded here: the index's records name slots and the digests of what is in them.

A header with another magic, checksum, store id, or an id unlike its name is not ours: the file is
left alone and its number is not used. A header that is intact and of an unknown version is
refused, since writing beside it could destroy what a later release stored.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from kvstore.errors import FormatVersionError
from kvstore.space import BlockShape
from kvstore.syncpoint import reach
from kvstore.tiers.io_engine import IoFile
from kvstore.units import PAGE_BYTES

__all__ = [
    "HEADER_BYTES",
    "SEGMENT_FORMAT_VERSION",
    "TEMPORARY_SUFFIX",
    "Segment",
    "SegmentHeader",
    "create_segment",
    "open_segment",
    "segment_name",
    "sync_directory",
]

# Don't forget to bump when the layout above changes; the tests hold a golden header per version.
SEGMENT_FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = PAGE_BYTES
TEMPORARY_SUFFIX: Final = ".tmp"

_MAGIC: Final = b"KVSEGM\r\n"
_FIELDS: Final = struct.Struct("<8sII16sQII")
_CHECKSUM: Final = struct.Struct("<Q")
_CHECKED_BYTES: Final = HEADER_BYTES - _CHECKSUM.size
assert _FIELDS.size == 48


def segment_name(segment_id: int) -> str:
    """Return the file name of a segment."""
    return f"seg-{segment_id:06d}.kvs"


def sync_directory(directory: Path) -> None:
    """Make renames and deletions in a directory durable. Blocks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What the first page of a segment says.

    Attributes:
        store_id: 16 bytes that name the directory's store.
        segment_id: number in the file's name.
        shape: of every block in it.
        blocks: places for blocks.
    """

    store_id: bytes
    segment_id: int
    shape: BlockShape
    blocks: int

    @property
    def data_bytes(self) -> int:
        """Bytes of all blocks, without the header."""
        return self.blocks * self.shape.block_bytes

    def encode(self) -> bytes:
        """Return the header page."""
        fields = _FIELDS.pack(
            _MAGIC,
            SEGMENT_FORMAT_VERSION,
            self.segment_id,
            self.store_id,
            self.shape.slot_bytes,
            self.shape.shards,
            self.blocks,
        )
        checked = fields.ljust(_CHECKED_BYTES, b"\x00")
        return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked))

    @classmethod
    def decode(cls, page: bytes, path: str) -> SegmentHeader | None:
        """Return the header, or None when the page is not one.

        Raises:
            FormatVersionError: an intact header of another version.
        """
        if len(page) != HEADER_BYTES or not page.startswith(_MAGIC):
            return None
        checked = page[:_CHECKED_BYTES]
        if _CHECKSUM.unpack_from(page, _CHECKED_BYTES)[0] != xxhash.xxh3_64_intdigest(checked):
            return None
        _, version, segment_id, store_id, slot_bytes, shards, blocks = _FIELDS.unpack_from(page)
        if version != SEGMENT_FORMAT_VERSION:
            raise FormatVersionError(path, version, SEGMENT_FORMAT_VERSION)
        if not slot_bytes or slot_bytes % PAGE_BYTES or not shards:
            return None
        return cls(store_id, segment_id, BlockShape(slot_bytes, shards), blocks)


class Segment:
    """An open segment's places: which are taken, which are free. Loop thread only.

    Attributes:
        id: segment number, the `group` of its slots.
        file: for the I/O engine.
        shape: of its blocks.
        blocks: places in it.
        used: one byte per place, 1 when it is allocated.
        used_blocks: how many are.
        retired: no place is given out any more.
        broken: why the file cannot be used any more; empty while it can.
        unsynced: places written since the last sync.
        lost: places that a failed sync may have lost, until written again or freed.
    """

    __slots__ = (
        "_free",
        "_suspect",
        "blocks",
        "broken",
        "file",
        "id",
        "lost",
        "retired",
        "shape",
        "unsynced",
        "used",
        "used_blocks",
    )

    def __init__(self, segment_id: int, file: IoFile, shape: BlockShape, blocks: int) -> None:
        """Describe a segment whose places are all free, and not given out before `ready`."""
        self.id = segment_id
        self.file = file
        self.shape = shape
        self.blocks = blocks
        self.used = bytearray(blocks)
        self.used_blocks = 0
        self.retired = False
        self.broken = ""
        self.unsynced: set[int] = set()
        self.lost: set[int] = set()
        self._free: list[int] = []
        self._suspect: set[int] = set()

    @property
    def data_bytes(self) -> int:
        """Bytes of all its blocks."""
        return self.blocks * self.shape.block_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of its allocated blocks."""
        return self.used_blocks * self.shape.block_bytes

    @property
    def available(self) -> int:
        """Places that `take` would give."""
        return 0 if self.retired or self.broken else len(self._free)

    @property
    def offered(self) -> list[int]:
        """Places that are free, in no order."""
        return [index % self.blocks for index in self._free]

    def ready(self) -> None:
        """Offer every place that is not in use."""
        self._free = [index for index, used in enumerate(self.used) if not used]

    def offset(self, index: int) -> int:
        """Return where a block begins in the file."""
        return HEADER_BYTES + index * self.shape.block_bytes

    def holds(self, index: int) -> bool:
        """Tell whether the place exists and is allocated."""
        return 0 <= index < self.blocks and bool(self.used[index])

    def adopt(self, index: int) -> None:
        """Mark a place as allocated, before `ready`."""
        self.used[index] = 1
        self.used_blocks += 1

    def take(self, count: int) -> Iterator[int]:
        """Allocate up to ``count`` places, lowest first so that a chain lies in one piece."""
        for _ in range(min(count, self.available)):
            index = heapq.heappop(self._free)
            # Places whose last write failed sort behind all others.
            index %= self.blocks
            self.used[index] = 1
            self.used_blocks += 1
            yield index

    def give(self, index: int) -> None:
        """Free an allocated place."""
        self.used[index] = 0
        self.used_blocks -= 1
        self.unsynced.discard(index)
        self.lost.discard(index)
        heapq.heappush(self._free, index + self.blocks if index in self._suspect else index)

    def written(self, index: int) -> None:
        """Note a good write that is not synced."""
        self.unsynced.add(index)
        self.lost.discard(index)
        self._suspect.discard(index)

    def write_failed(self, index: int) -> None:
        """Note a failed write: the place is tried again after all others."""
        self._suspect.add(index)


def create_segment(directory: Path, header: SegmentHeader) -> Segment:
    """Create a segment file durably and return it, all places offered. Blocks, maybe for seconds.

    Raises:
        OSError: no space, no permission, …; nothing is left behind.
    """
    path = directory / segment_name(header.segment_id)
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            length = HEADER_BYTES + header.data_bytes
            try:
                os.posix_fallocate(descriptor, 0, length)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(descriptor, length)
            reach("segment.reserved")
            page = header.encode()
            if os.pwrite(descriptor, page, 0) != len(page):
                raise OSError(errno.EIO, "short write", str(temporary))
            reach("segment.written")
            os.fsync(descriptor)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        reach("segment.synced")
        temporary.rename(path)
        reach("segment.renamed")
        sync_directory(directory)
    except OSError:
        for rest in (temporary, path):
            with contextlib.suppress(OSError):
                rest.unlink()
        raise
    file = IoFile(str(path), status.st_dev, status.st_ino)
    segment = Segment(header.segment_id, file, header.shape, header.blocks)
    segment.ready()
    return segment


def open_segment(path: Path, store_id: bytes) -> Segment | None:
    """Validate a segment file and return it without offering its places. Blocks.

    A file that is shorter than its header says has fewer places.

    Returns:
        None when the file is not a segment of this store.

    Raises:
        FormatVersionError: an intact header of another version.
        OSError: it cannot be read.
    """
    # Without O_NONBLOCK a pipe of that name would hang the start.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        header = SegmentHeader.decode(os.pread(descriptor, HEADER_BYTES, 0), str(path))
    finally:
        os.close(descriptor)
    if header is None or header.store_id != store_id:
        return None
    if path.name != segment_name(header.segment_id):
        return None
    present = (status.st_size - HEADER_BYTES) // header.shape.block_bytes
    file = IoFile(str(path), status.st_dev, status.st_ino)
    return Segment(header.segment_id, file, header.shape, min(header.blocks, present))
