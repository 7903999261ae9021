"""Space identity: everything that must agree for two blocks' bytes to be interchangeable.

The fingerprint is SHA-256 over a canonical encoding: a domain tag, then for every field its name
and its value, each prefixed with its length, so that no two different specs have the same
encoding (``model="ab", dtype="c"`` and ``model="a", dtype="bc"`` differ). A field added later
changes the format version, and with it every fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Self

from kvstore.errors import InvalidRequest
from kvstore.keys import KEY_BYTES
from kvstore.units import PAGE_BYTES, round_up

__all__ = ["SPACE_FORMAT_VERSION", "BlockShape", "Difference", "SpaceSpec"]

# Don't forget to bump when a field is added, removed or changes its meaning.
SPACE_FORMAT_VERSION: Final = 1

_TAG: Final = b"kvstore.space\x00"
_MAX_SHARDS: Final = 256
_MAX_BLOCK_BYTES: Final = 1 << 32


@dataclass(frozen=True, slots=True, order=True)
class BlockShape:
    """What a tier needs to know to store a block: how many slots of which size.

    Spaces of equal shape share slabs and segments.

    Attributes:
        slot_bytes: bytes of one slot, a multiple of 4096.
        shards: slots per block.
    """

    slot_bytes: int
    shards: int

    @classmethod
    def of(cls, shard_bytes: Sequence[int]) -> Self:
        """Return the shape of blocks with such shards.

        Raises:
            InvalidRequest: there can be no such block.
        """
        if not 1 <= len(shard_bytes) <= _MAX_SHARDS:
            raise InvalidRequest("shard_bytes", f"must name 1 to {_MAX_SHARDS} shards")
        if min(shard_bytes) < 1 or sum(shard_bytes) > _MAX_BLOCK_BYTES:
            raise InvalidRequest("shard_bytes", "each must be at least 1, together at most 4 GiB")
        return cls(round_up(max(shard_bytes), PAGE_BYTES), len(shard_bytes))

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes in a tier."""
        return self.slot_bytes * self.shards


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which two specs differ, and its values as text."""

    field: str
    here: str
    there: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceSpec:
    """Names a space. Specs that differ in any field name different spaces.

    Attributes:
        model: model name.
        dtype: dtype of the KV values, e.g. ``bfloat16``.
        block_tokens: tokens per block.
        shard_bytes: bytes of a block that each tensor-parallel rank holds, one entry per shard.
        layout: id of the engine's memory layout inside a shard; ``opaque`` for bytes that only
            the writer understands.
        weights_version: revision of the weights.
        tensor_parallel: engine's tensor-parallel size.
        pipeline_parallel: engine's pipeline-parallel size.
        pipeline_rank: pipeline stage whose layers the blocks hold.
        context_parallel: engine's context-parallel size.
        kv_group: id of the KV-cache group.
        hash_algorithm: how keys are made (``xxh3-128``, ``sha256``, or the engine's own name).
        root_seed: seed of the chain's root, when the engine hashes by itself.
        tenant: separates users who must not share blocks.
        key_bytes: length of a key, 16 or 32; 0 derives it from ``hash_algorithm``.
    """

    model: str
    dtype: str
    block_tokens: int
    shard_bytes: tuple[int, ...]
    layout: str = "opaque"
    weights_version: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    pipeline_rank: int = 0
    context_parallel: int = 1
    kv_group: str = ""
    hash_algorithm: str = "xxh3-128"
    root_seed: str = ""
    tenant: str = ""
    key_bytes: int = 0

    def __post_init__(self) -> None:
        """Normalise and check.

        Raises:
            InvalidRequest: naming the first field that is wrong.
        """
        object.__setattr__(self, "shard_bytes", tuple(int(b) for b in self.shard_bytes))
        if self.key_bytes == 0:
            object.__setattr__(self, "key_bytes", KEY_BYTES.get(self.hash_algorithm, 32))
        for name in ("model", "dtype", "layout", "hash_algorithm"):
            if not getattr(self, name):
                raise InvalidRequest(name, "must not be empty")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and len(value.encode()) > 4096:
                raise InvalidRequest(field.name, "is longer than 4096 bytes")
        for name in ("block_tokens", "tensor_parallel", "pipeline_parallel", "context_parallel"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise InvalidRequest(
                    name, f"must be within 1 … 2**31 - 1, not {getattr(self, name)}"
                )
        if not 0 <= self.pipeline_rank < self.pipeline_parallel:
            raise InvalidRequest("pipeline_rank", "must be below pipeline_parallel")
        BlockShape.of(self.shard_bytes)
        if self.key_bytes not in (16, 32):
            raise InvalidRequest("key_bytes", f"must be 16 or 32, not {self.key_bytes}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block as a client sees it: its shards one after the other."""
        return sum(self.shard_bytes)

    @property
    def shape(self) -> BlockShape:
        """Slots that one block takes."""
        return BlockShape.of(self.shard_bytes)

    def differences(self, other: SpaceSpec) -> tuple[Difference, ...]:
        """Return the fields in which another spec differs, in their order here."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return tuple(
            Difference(name, _text(ours), _text(theirs))
            for name, ours, theirs in pairs
            if ours != theirs
        )

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that name the space."""
        digest = hashlib.sha256(_TAG + SPACE_FORMAT_VERSION.to_bytes(4, "little"))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                encoded = b"".join(v.to_bytes(8, "little") for v in value)
            elif isinstance(value, int):
                encoded = value.to_bytes(8, "little")
            else:
                encoded = value.encode()
            for part in (field.name.encode(), encoded):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
