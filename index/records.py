"""The records that LMDB keeps: their bytes, and how each proves that it is intact.

All integers are little endian unless noted. Every record's key in LMDB is

    uint32 space number, big endian (so that a space's records are neighbours) ‖ key

except a space's own, whose key is the number alone. Every record's value ends in

    uint64 checksum = XXH3-64 over  space id (32) ‖ key ‖ value without the checksum

A record that was copied under another key, moved to another space, cut short or changed in one
bit does not match. The checksum's place and formula are the same in every version, so that damage
is never taken for an unknown version.

    BLOCK   uint8 version = 1      uint8 flags: bit 0 set if there is a parent
            uint64 epoch           uint32 segment    uint32 slot    uint64 sequence
            uint16 n               n × uint64 digest (XXH3-64 of each shard)
            parent (as long as the key), if flagged                 uint64 checksum
    SPACE   uint8 version = 1      uint8 flags = 0   uint64 epoch
            space id (32)          spec as JSON: UTF-8, sorted keys, no spaces
                                                                    uint64 checksum
    PIN     uint8 version = 1      uint8 flags = 0
            float64 expires, Unix seconds, 0: never                 uint64 checksum
    LIMITS  uint8 version = 1      uint8 flags: bit i set if limit i is
            4 × uint64: bytes in gpu, host, disk, milliseconds to live; all ones: no limit
                                                                    uint64 checksum
    USES    uint8 version = 1      uint8 flags = 0   uint32 n
            3 × float64: own seconds, seconds since boot, Unix seconds, when it was written
            boot id (16)           n × (uint64 sequence, float64 own seconds)
                                                                    uint64 checksum

A pin's key is the block's key, followed by the owner's name in UTF-8 if it has one. The key of limits
is the space's number alone. A space's checksum covers its number (4 bytes, big endian) in the key's
place; that of limits, nothing there; that of uses, no space and its key in `meta`.

Databases: "meta" (key "format": uint32 format version ‖ uint64 XXH3-64 of it; key "uses": USES),
"spaces", "pins", "limits", and "blocks:<store id, hex>" for each disk store. Limits, uses and pins
with an owner came with format version 2: what holds none of them stays at 1.

Don't forget to bump `RECORD_VERSION` when a field changes, `FORMAT_VERSION` when databases or keys
do, and to add a golden file.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Final

import xxhash

from kvstore.errors import FormatVersionError, InvalidRequest
from kvstore.index.limits import SpaceLimits
from kvstore.space import SpaceSpec

__all__ = [
    "BLOCKS",
    "FIRST_FORMAT",
    "FORMAT_KEY",
    "FORMAT_VERSION",
    "LIMITS",
    "META",
    "PINS",
    "RECORD_VERSION",
    "SPACES",
    "USES_KEY",
    "BlockRecord",
    "DamagedRecord",
    "PinRecord",
    "SpaceRecord",
    "UsesRecord",
    "blocks_database",
    "decode_block",
    "decode_limits",
    "decode_pin",
    "decode_space",
    "decode_uses",
    "encode_block",
    "encode_format",
    "encode_limits",
    "encode_pin",
    "encode_space",
    "encode_uses",
    "format_version",
    "intact",
    "is_database",
    "number_key",
    "pin_name",
    "space_id_of",
]

FORMAT_VERSION: Final = 2
# What is written until something needs the later one.
FIRST_FORMAT: Final = 1
RECORD_VERSION: Final = 1

META: Final = b"meta"
SPACES: Final = b"spaces"
PINS: Final = b"pins"
LIMITS: Final = b"limits"
BLOCKS: Final = b"blocks:"
FORMAT_KEY: Final = b"format"
USES_KEY: Final = b"uses"

_HAS_PARENT: Final = 1
_BLOCK: Final = struct.Struct("<BBQIIQH")
_SPACE: Final = struct.Struct("<BBQ")
_PIN: Final = struct.Struct("<BBd")
_LIMITS: Final = struct.Struct("<BB4Q")
_USES: Final = struct.Struct("<BBI3d16s")
_USE: Final = struct.Struct("<Qd")
_CHECKSUM: Final = struct.Struct("<Q")
_NUMBER: Final = struct.Struct(">I")
_DIGESTS: Final = [struct.Struct(f"<{n}Q") for n in range(257)]

_hash: Final = xxhash.xxh3_64_intdigest


class DamagedRecord(ValueError):
    """A record's bytes are not what was written; the caller skips and counts it."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One block on disk. Its shards' lengths follow from its space.

    Attributes:
        space_id: fingerprint of the space, 32 bytes.
        key: the block's key.
        parent: key of the block before it; None when it starts a chain.
        epoch: the space's epoch when the block was committed.
        segment: segment of the disk store.
        slot: slot inside the segment.
        digests: XXH3-64 of each shard's counted bytes.
        sequence: place in the LRU order when the record was written; higher is younger.
    """

    space_id: bytes
    key: bytes
    parent: bytes | None
    epoch: int
    segment: int
    slot: int
    digests: tuple[int, ...]
    sequence: int


@dataclass(frozen=True, slots=True)
class SpaceRecord:
    """One space.

    Attributes:
        number: what names the space inside the keys of this environment.
        spec: the space itself.
        epoch: its current epoch.
    """

    number: int
    spec: SpaceSpec
    epoch: int

    @property
    def space_id(self) -> bytes:
        """The space's fingerprint, 32 bytes."""
        return self.spec.fingerprint


@dataclass(frozen=True, slots=True)
class PinRecord:
    """One pinned block.

    Attributes:
        space_id: fingerprint of the space, 32 bytes.
        key: the block's key.
        expires_unix: Unix seconds; 0 pins until unpinned.
        owner: whose pin it is; empty: nobody's in particular.
    """

    space_id: bytes
    key: bytes
    expires_unix: float
    owner: str = ""


@dataclass(frozen=True, slots=True)
class UsesRecord:
    """When blocks were used: which sequence number was the highest at some times.

    Attributes:
        seconds: the daemon's own time at which it was written.
        clock: seconds since the machine's boot at that time.
        wall: Unix time then.
        boot: the boot's id, 16 bytes.
        marks: (sequence, own seconds), both ascending.
    """

    seconds: float
    clock: float
    wall: float
    boot: bytes
    marks: tuple[tuple[int, float], ...]


def blocks_database(store_id: bytes) -> bytes:
    """Return the name of a disk store's database.

    In hexadecimal: LMDB takes a name up to its first zero byte, and one id in sixteen has one.
    """
    return BLOCKS + store_id.hex().encode()


def is_database(name: bytes) -> bool:
    """Return whether this release knows a database of that name."""
    return name in (META, SPACES, PINS, LIMITS) or name.startswith(BLOCKS)


def encode_format(version: int) -> bytes:
    """Return the value of `FORMAT_KEY`."""
    return _sealed(b"", b"", version.to_bytes(4, "little"))


def format_version(value: bytes, path: str) -> int | None:
    """Return the version that the format's value names; None if it is not intact.

    Raises:
        FormatVersionError: it is, and the version is another release's.
    """
    if len(value) != 12 or not intact(b"", b"", value):
        return None
    version = int.from_bytes(value[:4], "little")
    if not FIRST_FORMAT <= version <= FORMAT_VERSION:
        raise FormatVersionError(path, version, FORMAT_VERSION)
    return version


def number_key(number: int) -> bytes:
    """Return a space number as it stands at the front of LMDB keys."""
    return _NUMBER.pack(number)


def intact(space_id: bytes, key: bytes, value: bytes) -> bool:
    """Return whether a value's checksum holds, whatever the record's kind and version."""
    return _hash(space_id + key + value[:-8]) == int.from_bytes(value[-8:], "little")


def _sealed(space_id: bytes, key: bytes, body: bytes) -> bytes:
    return body + _CHECKSUM.pack(_hash(space_id + key + body))


def _checked(space_id: bytes, key: bytes, value: bytes, path: str) -> None:
    """Refuse damage first, then versions, so that a flipped version byte counts as damage."""
    if len(value) < 9 or not intact(space_id, key, value):
        raise DamagedRecord
    if value[0] != RECORD_VERSION:
        raise FormatVersionError(path, value[0], RECORD_VERSION)


def encode_block(record: BlockRecord) -> bytes:
    """Return a block record's value.

    Raises:
        ValueError: a field is out of its range, or the parent is not as long as the key.
    """
    parent, digests = record.parent, record.digests
    if parent is not None and len(parent) != len(record.key):
        raise ValueError(f"parent has {len(parent)} bytes, the key has {len(record.key)}")
    try:
        body = (
            _BLOCK.pack(
                RECORD_VERSION,
                0 if parent is None else _HAS_PARENT,
                record.epoch,
                record.segment,
                record.slot,
                record.sequence,
                len(digests),
            )
            + _DIGESTS[len(digests)].pack(*digests)
            + (parent or b"")
        )
    except (struct.error, IndexError) as error:
        raise ValueError(f"{record} does not fit its record: {error}") from error
    return _sealed(record.space_id, record.key, body)


def decode_block(space_id: bytes, key: bytes, value: bytes, path: str = "record") -> BlockRecord:
    """Return the block that a value describes.

    Args:
        space_id: of the space that the LMDB key's number names.
        key: the LMDB key without the number.
        value: the LMDB value.
        path: where it was found, for the error.

    Raises:
        DamagedRecord: the bytes are not what was written.
        FormatVersionError: they are, by a release with another format.
    """
    # Hot: a daemon reads a record per block on disk before it serves from there.
    if len(value) < 36 or _hash(space_id + key + value[:-8]) != int.from_bytes(
        value[-8:], "little"
    ):
        raise DamagedRecord
    version, flags, epoch, segment, slot, sequence, count = _BLOCK.unpack_from(value)
    if version != RECORD_VERSION:
        raise FormatVersionError(path, version, RECORD_VERSION)
    at = 28 + 8 * count
    parent = value[at:-8] if flags else None
    if flags > _HAS_PARENT or at + (len(key) if flags else 0) + 8 != len(value) or count > 256:
        raise DamagedRecord
    digests = _DIGESTS[count].unpack_from(value, 28)
    return BlockRecord(space_id, key, parent, epoch, segment, slot, digests, sequence)


def encode_space(record: SpaceRecord) -> bytes:
    """Return a space record's value."""
    spec = json.dumps(
        asdict(record.spec), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    body = _SPACE.pack(RECORD_VERSION, 0, record.epoch) + record.space_id + spec.encode()
    return _sealed(record.space_id, _NUMBER.pack(record.number), body)


def decode_space(number: int, value: bytes, path: str = "record") -> SpaceRecord:
    """Return the space that a value describes.

    Raises:
        DamagedRecord: the bytes are not what was written, or the spec does not have the
            fingerprint that was written with it.
        FormatVersionError: another release's format.
    """
    space_id = space_id_of(value)
    _checked(space_id, _NUMBER.pack(number), value, path)
    _, flags, epoch = _SPACE.unpack_from(value)
    try:
        spec = SpaceSpec(**json.loads(value[_SPACE.size + 32 : -8]))
    except (ValueError, TypeError, InvalidRequest) as error:
        raise DamagedRecord from error
    if flags or spec.fingerprint != space_id:
        raise DamagedRecord
    return SpaceRecord(number, spec, epoch)


def space_id_of(value: bytes) -> bytes:
    """Return the space id that a space record's value names, unchecked."""
    return value[_SPACE.size : _SPACE.size + 32]


def pin_name(key: bytes, owner: str = "") -> bytes:
    """Return what names a pin within its space."""
    return key + owner.encode()


def encode_pin(record: PinRecord) -> bytes:
    """Return a pin record's value."""
    body = _PIN.pack(RECORD_VERSION, 0, record.expires_unix)
    return _sealed(record.space_id, pin_name(record.key, record.owner), body)


def decode_pin(
    space_id: bytes, name: bytes, value: bytes, key_bytes: int, path: str = "record"
) -> PinRecord:
    """Return the pin that a value describes.

    Args:
        space_id: of the space that the LMDB key's number names.
        name: the LMDB key without the number.
        value: the LMDB value.
        key_bytes: length of the space's keys; the rest of the name is the owner's.
        path: where it was found, for the error.

    Raises:
        DamagedRecord: the bytes are not what was written.
        FormatVersionError: another release's format.
    """
    _checked(space_id, name, value, path)
    if len(value) != _PIN.size + 8 or len(name) < key_bytes:
        raise DamagedRecord
    _, flags, expires = _PIN.unpack_from(value)
    try:
        owner = name[key_bytes:].decode()
    except UnicodeDecodeError as error:
        raise DamagedRecord from error
    if flags:
        raise DamagedRecord
    return PinRecord(space_id, name[:key_bytes], expires, owner)


def encode_limits(space_id: bytes, limits: SpaceLimits) -> bytes:
    """Return the value of a space's limits."""
    values = limits.values()
    flags = sum(1 << i for i, value in enumerate(values) if value is not None)
    body = _LIMITS.pack(RECORD_VERSION, flags, *(value or 0 for value in values))
    return _sealed(space_id, b"", body)


def decode_limits(space_id: bytes, value: bytes, path: str = "record") -> SpaceLimits:
    """Return the limits that a value describes.

    Raises:
        DamagedRecord: the bytes are not what was written.
        FormatVersionError: another release's format.
    """
    _checked(space_id, b"", value, path)
    if len(value) != _LIMITS.size + 8:
        raise DamagedRecord
    _, flags, *values = _LIMITS.unpack_from(value)
    if flags >> len(values):
        raise DamagedRecord
    return SpaceLimits(*(v if flags >> i & 1 else None for i, v in enumerate(values)))


def encode_uses(record: UsesRecord) -> bytes:
    """Return the value of `USES_KEY`."""
    body = _USES.pack(
        RECORD_VERSION, 0, len(record.marks), record.seconds, record.clock, record.wall, record.boot
    )
    body += b"".join(_USE.pack(*mark) for mark in record.marks)
    return _sealed(b"", USES_KEY, body)


def decode_uses(value: bytes, path: str = "record") -> UsesRecord:
    """Return the times that a value describes.

    Raises:
        DamagedRecord: the bytes are not what was written.
        FormatVersionError: another release's format.
    """
    _checked(b"", USES_KEY, value, path)
    if len(value) < _USES.size + 8:
        raise DamagedRecord
    _, flags, count, seconds, clock, wall, boot = _USES.unpack_from(value)
    packed = value[_USES.size : -8]
    if flags or len(packed) != count * _USE.size:
        raise DamagedRecord
    marks = tuple((sequence, at) for sequence, at in _USE.iter_unpack(packed))
    return UsesRecord(seconds, clock, wall, boot, marks)
