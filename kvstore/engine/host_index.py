"""The saved host index: what a daemon that stops in order tells the next one about its memory.

The slabs stay where they are, in shared memory; this file in the state directory says what lies in
them. It is good for one start, under the same kernel, on the same pool directory.

Layout, little endian:

    "KVHOST" CR LF        uint32 version = 1
    machine               uint16 length, UTF-8: id of the kernel's boot
    pool directory        uint16 length, bytes of the path
    uint64 inode of the pool's control file
    uint64 last attachment id      uint32 last slab group
    uint32 n, then n slab groups:
        uint32 group      uint64 slot_bytes   uint16 shards   uint32 slots
        shards × uint64 length of the slab's file
        slots × uint64 generation
    uint32 n, then n spaces:
        space id (32)     uint64 epoch        uint8 key_bytes   uint16 shards   uint32 m
        m blocks, parents before children:
            key           uint8 flags: bit 0 set if there is a parent     parent, or zeros
            uint32 group  uint32 index        uint64 sequence
            shards × uint64 digest (XXH3-64 of the shard's counted bytes)
    uint32 n, then n busy slots, which somebody may still be writing to:
        uint32 group      uint32 index        uint16 m, m × uint64 attachment id
    uint64 checksum: XXH3-64 of everything before

Saving (the daemon stops)
  1. Nothing takes a host slot any more: no grant, no promotion. What the file says of slots stays
     true until the process ends, however it ends.
  2. Digests that are missing are computed. A block without them is left out.
  3. The file is written under a temporary name and synced, renamed, the directory synced. Only
     then are the slabs kept at the end; without it they are removed.

Adopting (the next one starts)
  1. Under the state directory's lock, read and check: checksum, then version, then that kernel,
     pool directory and control file are the same. Otherwise: one line in the log, the file is
     removed, the pool is discarded.
  2. Map the slab files that are as they were; take in the blocks whose epoch is current and whose
     parent is there. Slots that are still being written to stay out of circulation until each
     writer has dropped its lock. Everything else is free.
  3. Before the first slot is granted, durably remove the file: from the first grant on it would
     lie. A crash from here on discards the pool.
  4. Adopted bytes are compared with their digests before they are first used.

A start that fails before 3 leaves file and slabs for the one after it.

Don't forget to bump `HOST_INDEX_VERSION` when the layout changes, and to add a golden file.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import xxhash

from kvstore.errors import FormatVersionError
from kvstore.index.epoch_log import sync_directory
from kvstore.regular_file import read_regular
from kvstore.space import BlockShape
from kvstore.syncpoint import reach
from kvstore.tiers.base import Slot
from kvstore.tiers.slab import KeptGroup

__all__ = [
    "HOST_INDEX_NAME",
    "HOST_INDEX_VERSION",
    "BusySlot",
    "DamagedHostIndex",
    "HostIndex",
    "SavedBlock",
    "SavedSpace",
    "decode",
    "encode",
    "read_host_index",
    "remove_host_index",
    "write_host_index",
]

HOST_INDEX_NAME: Final = "host-index"
HOST_INDEX_VERSION: Final = 1

_MAGIC: Final = b"KVHOST\r\n"
_VERSION: Final = struct.Struct("<I")
_COUNT: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<H")
_POOL: Final = struct.Struct("<QQI")
_GROUP: Final = struct.Struct("<IQHI")
_SPACE: Final = struct.Struct("<32sQBHI")
_BUSY: Final = struct.Struct("<IIH")
_CHECKSUM: Final = struct.Struct("<Q")
_HAS_PARENT: Final = 1


class DamagedHostIndex(ValueError):
    """The bytes are not what was written."""


class SavedBlock(NamedTuple):
    """One block in host memory.

    Attributes:
        key: its key.
        parent: key of the block before it; None starts a chain. It may be on disk only.
        slot: where it lies.
        sequence: place in the LRU order.
        digests: XXH3-64 of each shard's counted bytes.
    """

    key: bytes
    parent: bytes | None
    slot: Slot
    sequence: int
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedSpace:
    """The blocks of one space.

    Attributes:
        space_id: fingerprint, 32 bytes.
        epoch: of all these blocks.
        key_bytes: length of a key.
        shards: digests per block.
        blocks: parents before children.
    """

    space_id: bytes
    epoch: int
    key_bytes: int
    shards: int
    blocks: Sequence[SavedBlock]


class BusySlot(NamedTuple):
    """A slot that was granted and is not settled.

    Attributes:
        slot: which.
        writers: attachments that may still be copying into it.
    """

    slot: Slot
    writers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostIndex:
    """Everything that is saved.

    Attributes:
        machine: id of the kernel's boot.
        pool: the pool's directory.
        control_inode: of the control file, whose locks say which writers live.
        last_attachment: no id up to this one is given out again.
        last_group: no slab group up to this one is given out again.
        groups: slab groups in service.
        spaces: blocks.
        busy: slots to keep away from.
    """

    machine: str
    pool: Path
    control_inode: int
    last_attachment: int
    last_group: int
    groups: Sequence[KeptGroup]
    spaces: Sequence[SavedSpace]
    busy: Sequence[BusySlot]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(len(space.blocks) for space in self.spaces)


def _block(key_bytes: int, shards: int) -> struct.Struct:
    return struct.Struct(f"<{key_bytes}sB{key_bytes}sIIQ{shards}Q")


def _text(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def encode(index: HostIndex) -> bytes:
    """Return the file's bytes. About 1 µs a block.

    Raises:
        ValueError: a field is out of its range.
    """
    try:
        body = b"".join(_parts(index))
    except (struct.error, OverflowError) as error:
        raise ValueError(f"the host index does not fit its format: {error}") from error
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _parts(index: HostIndex) -> list[bytes]:
    parts = [
        _MAGIC,
        _VERSION.pack(HOST_INDEX_VERSION),
        _text(index.machine.encode()),
        _text(os.fsencode(index.pool)),
        _POOL.pack(index.control_inode, index.last_attachment, index.last_group),
        _COUNT.pack(len(index.groups)),
    ]
    for group in index.groups:
        shape = group.shape
        parts.append(_GROUP.pack(group.group, shape.slot_bytes, shape.shards, group.slots))
        parts.append(np.array(group.lengths, "<u8").tobytes())
        parts.append(np.ascontiguousarray(group.generations, "<u8").tobytes())
    parts.append(_COUNT.pack(len(index.spaces)))
    for space in index.spaces:
        header = (space.space_id, space.epoch, space.key_bytes, space.shards, len(space.blocks))
        parts.append(_SPACE.pack(*header))
        pack = _block(space.key_bytes, space.shards).pack
        for key, parent, (group_number, at), sequence, digests in space.blocks:
            if len(key) != space.key_bytes or len(parent or key) != space.key_bytes:
                raise ValueError(f"a key of space {space.space_id.hex()[:12]} has another length")
            flags = 0 if parent is None else _HAS_PARENT
            parts.append(pack(key, flags, parent or b"", group_number, at, sequence, *digests))
    parts.append(_COUNT.pack(len(index.busy)))
    for slot, writers in index.busy:
        parts.append(_BUSY.pack(*slot, len(writers)) + np.array(writers, "<u8").tobytes())
    return parts


class _Reader:
    """Takes fields off the front of a buffer."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise DamagedHostIndex("it is shorter than it says")
        part = self._data[self._at : end]
        self._at = end
        return part

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def number(self, layout: struct.Struct) -> int:
        return self.unpack(layout)[0]

    def numbers(self, count: int) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.take(8 * count), "<u8").tolist())

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)


def decode(data: bytes, path: str = HOST_INDEX_NAME) -> HostIndex:
    """Return what `encode` was given.

    Args:
        data: the file's bytes.
        path: where they are from, for the error.

    Raises:
        DamagedHostIndex: they are not what was written.
        FormatVersionError: they are, by a release with another format.
    """
    start = len(_MAGIC) + _VERSION.size
    if len(data) < start + _CHECKSUM.size or not data.startswith(_MAGIC):
        raise DamagedHostIndex("it is no host index")
    body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    if xxhash.xxh3_64_intdigest(body) != _CHECKSUM.unpack(checksum)[0]:
        raise DamagedHostIndex("its checksum does not match")
    version = _VERSION.unpack_from(body, len(_MAGIC))[0]
    if version != HOST_INDEX_VERSION:
        raise FormatVersionError(path, version, HOST_INDEX_VERSION)
    reader = _Reader(body, start)
    machine = reader.take(reader.number(_LENGTH)).decode(errors="replace")
    pool = Path(os.fsdecode(reader.take(reader.number(_LENGTH))))
    control_inode, last_attachment, last_group = reader.unpack(_POOL)
    groups = [_read_group(reader) for _ in range(reader.number(_COUNT))]
    spaces = [_read_space(reader) for _ in range(reader.number(_COUNT))]
    busy = []
    for _ in range(reader.number(_COUNT)):
        group, at, writers = reader.unpack(_BUSY)
        busy.append(BusySlot(Slot(group, at), reader.numbers(writers)))
    if not reader.at_end:
        raise DamagedHostIndex("it is longer than it says")
    return HostIndex(
        machine=machine,
        pool=pool,
        control_inode=control_inode,
        last_attachment=last_attachment,
        last_group=last_group,
        groups=groups,
        spaces=spaces,
        busy=busy,
    )


def _read_group(reader: _Reader) -> KeptGroup:
    number, slot_bytes, shards, slots = reader.unpack(_GROUP)
    lengths = reader.numbers(shards)
    generations = np.frombuffer(reader.take(8 * slots), "<u8").astype(np.uint64)
    return KeptGroup(number, BlockShape(slot_bytes, shards), slots, lengths, generations)


def _read_space(reader: _Reader) -> SavedSpace:
    space_id, epoch, key_bytes, shards, count = _SPACE.unpack(reader.take(_SPACE.size))
    layout = _block(key_bytes, shards)
    blocks = [
        SavedBlock(key, parent if flags else None, Slot(group, at), sequence, tuple(digests))
        for key, flags, parent, group, at, sequence, *digests in layout.iter_unpack(
            reader.take(layout.size * count)
        )
    ]
    return SavedSpace(space_id, epoch, key_bytes, shards, blocks)


def write_host_index(path: Path, data: bytes) -> None:
    """Put the file in place, durably and as a whole.

    Raises:
        OSError: it is not there; an earlier one may be.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            reach("host_index.written")
            os.fsync(fd)
        reach("host_index.synced")
        temporary.replace(path)
        reach("host_index.renamed")
        sync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_host_index(path: Path) -> HostIndex | None:
    """Return what was saved; None when nothing was.

    Raises:
        DamagedHostIndex, FormatVersionError: see `decode`.
        OSError: it cannot be read.
    """
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return None
    return decode(data, str(path))


def remove_host_index(path: Path) -> None:
    """Remove the file, durably. Nothing happens when there is none.

    Raises:
        OSError: it may be there still.
    """
    temporary = path.with_name(path.name + ".tmp")
    # What is no file was not saved by anybody, and is not read either.
    if temporary.is_file():
        temporary.unlink()
    if path.is_file() or path.is_symlink():
        path.unlink()
        reach("host_index.unlinked")
        sync_directory(path.parent)
