"""What a daemon was told and what it promised, in plain dicts and sets.

Blocks carry who they are: space, epoch, key and version, in their first words and, mixed into every
other word, throughout. So whatever is returned can be told to be right, or named.

What must be there is kept as lower bounds, per key:

* `sure`: it is present in some tier;
* `durable`: its record on disk is durable, and its bytes there are right;
* `pinned`: its last copy may not leave for want of room;
* `known`: which version it has, for as long as it stays sure.

A space with a quota is promised less, and the others no less than before.

`weaken` takes back what the tiers' sizes, the write policy and the disk's faults no longer promise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore import Keys, SpaceSpec, chain_keys

__all__ = [
    "CHAINS",
    "LONGEST",
    "MIB",
    "SLOT_BYTES",
    "SPECS",
    "Model",
    "SpaceModel",
    "content",
    "keys_of",
]

MIB = 1 << 20
CHAINS = 4
LONGEST = 8
# Two shapes, so that slab groups and segments change hands; the second one's shards differ.
SPECS = (
    SpaceSpec(model="oracle", dtype="u8", block_tokens=4, shard_bytes=(192 << 10,)),
    SpaceSpec(model="oracle", dtype="u8", block_tokens=4, shard_bytes=(96 << 10, 95 << 10)),
)
# What a block takes in a tier.
SLOT_BYTES = tuple(spec.shape.block_bytes for spec in SPECS)
_MAGIC = 0x6B765F6F7261636C
_HEAD = 5
# With these sizes everything there is fits, whatever slab groups and segments the shapes take.
_HOST_FITS = 32 * MIB
_DISK_FITS = 64 * MIB

Identity = tuple[int, int, int, int]


def _chain(name: int, length: int) -> Keys:
    # Chains 2 and 3 share their first two blocks with 0 and 1.
    own = [name if i >= 2 else name % 2 for i in range(length)]
    return chain_keys([t for who in own for t in (who, 7, who, 9)], 4)


_CHAINS = [_chain(name, LONGEST) for name in range(CHAINS)]
_NUMBERS: dict[bytes, int] = {}
for _keys in _CHAINS:
    for _key in _keys:
        _NUMBERS.setdefault(_key, len(_NUMBERS))
ALL_KEYS = frozenset(_NUMBERS)


def keys_of(name: int, length: int = LONGEST) -> Keys:
    """Return a chain's first keys; every space has the same."""
    return _CHAINS[name][:length]


def content(identity: Identity, size: int) -> NDArray[np.uint8]:
    """Return the bytes of a block: space, epoch, number of its key, version."""
    words = np.arange((size + 7) // 8, dtype=np.uint64)
    seed = hash((_MAGIC, *identity)) & 0xFFFFFFFFFFFFFFFF
    words = words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    words ^= words >> np.uint64(29)
    words[:_HEAD] = (_MAGIC, *identity)
    return words.view(np.uint8)[:size]


def identity_of(block: NDArray[np.uint8]) -> Identity | None:
    """Return who a block says it is."""
    magic, *identity = (int(w) for w in block[: 8 * _HEAD].view(np.uint64))
    return (identity[0], identity[1], identity[2], identity[3]) if magic == _MAGIC else None


@dataclass
class SpaceModel:
    """One space: a dict of everything that was put in the epoch, and what must be there."""

    number: int
    epoch: int
    versions: defaultdict[bytes, set[int]] = field(default_factory=lambda: defaultdict(set))
    sure: set[bytes] = field(default_factory=set)
    durable: set[bytes] = field(default_factory=set)
    pinned: set[bytes] = field(default_factory=set)
    known: dict[bytes, int] = field(default_factory=dict)
    tainted: set[bytes] = field(default_factory=set)
    next_version: int = 0
    quotas: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return SPECS[self.number].block_bytes

    def blocks(self, keys: Sequence[bytes]) -> NDArray[np.uint8]:
        """Return new bytes for keys that are about to be put: from now on they may be returned."""
        self.next_version += 1
        for key in keys:
            self.versions[key].add(self.next_version)
        identities = [(self.number, self.epoch, _NUMBERS[key], self.next_version) for key in keys]
        return np.stack([content(identity, self.size) for identity in identities])

    def returned(self, keys: Sequence[bytes], rows: Sequence[NDArray[np.uint8]]) -> None:
        """Check a leading run that was returned."""
        for key, row in zip(keys, rows, strict=False):
            found = identity_of(row)
            wanted = (self.number, self.epoch, _NUMBERS[key])
            assert found is not None, f"{wanted}: no block of ours: {bytes(row[:40])!r}"
            assert found[:3] == wanted, f"asked for {wanted}, got {found}"
            assert found[3] in self.versions[key], f"{found} was never put"
            right = content(found, self.size)
            if not np.array_equal(row, right):
                bad = np.flatnonzero(row != right)
                raise AssertionError(f"{found}: {len(bad)} wrong bytes, {bad[0]} … {bad[-1]}")
            if key in self.sure:
                before = self.known.setdefault(key, found[3])
                assert before == found[3], f"{found} was version {before}, and never left"

    def run(self, keys: Sequence[bytes], among: set[bytes] | None = None) -> int:
        """Return how long a leading run must be there."""
        present = self.sure if among is None else among
        return next((i for i, key in enumerate(keys) if key not in present), len(keys))

    def seen(self, keys: Iterable[bytes], *, on_disk: Iterable[bytes] = ()) -> None:
        """Keys were found to be present, some of them on disk."""
        self.sure.update(key for key in keys if key not in self.tainted)
        self.durable.update(key for key in on_disk if key not in self.tainted)

    def lost(self, keys: Iterable[bytes]) -> None:
        """Keys may be gone from everywhere."""
        for key in list(keys):
            self.sure.discard(key)
            self.durable.discard(key)
            self.pinned.discard(key)
            self.known.pop(key, None)

    def keep(self, keys: set[bytes]) -> None:
        """Only these are sure any more."""
        self.sure &= keys
        self.pinned &= self.sure
        self.known = {key: version for key, version in self.known.items() if key in self.sure}

    def taint(self, keys: set[bytes]) -> None:
        """What is on disk of these may be damaged from now on."""
        self.tainted |= keys
        self.lost(keys)

    def bumped(self, epoch: int) -> None:
        """A new epoch: nothing of the old one is there."""
        number, version, quotas = self.number, self.next_version, self.quotas
        self.__init__(number, epoch)  # type: ignore[misc]
        self.next_version, self.quotas = version, quotas


@dataclass
class Model:
    """The daemon: its spaces, and what its tiers promise now."""

    policy: str
    has_disk: bool
    first_host: int
    first_disk: int
    spaces: list[SpaceModel] = field(default_factory=list)
    fault: str = ""
    # Writes failed since the last flush that left nothing out: host copies may leave unwritten.
    refused: bool = False
    # A file was found cut short: it serves nothing before the next start.
    broken: bool = False

    def __post_init__(self) -> None:
        self.host, self.disk = self.first_host, self.first_disk

    @property
    def host_fits(self) -> bool:
        return self.host >= _HOST_FITS

    @property
    def disk_fits(self) -> bool:
        return self.has_disk and self.disk >= _DISK_FITS

    @property
    def keeps(self) -> bool:
        """Whether nothing leaves for want of room."""
        if self.host_fits and (self.disk_fits or not self.has_disk):
            return True
        return self.disk_fits and self.policy != "reused" and not self.refused

    @property
    def loads(self) -> bool:
        """Whether what is on disk can be read."""
        return not self.broken and (not self.fault or not self.fault.startswith(("read", "tier")))

    def weaken(self) -> None:
        """Take back what is no longer promised."""
        damaged: bool = self.fault in ("write flip", "write torn", "tier torn")
        dropped: bool = self.fault in ("read flip", "read ends", "tier short")
        for space in self.spaces:
            if dropped or self.broken:
                space.taint(set(ALL_KEYS))
            elif damaged:
                space.taint(set(ALL_KEYS - space.durable))
            if not self.disk_fits:
                space.durable.clear()
            if not self.keeps:
                space.keep(space.pinned | space.durable)
            if "disk" in space.quotas:
                space.durable &= space.pinned
                space.keep(space.pinned)
            elif "host" in space.quotas:
                space.keep(space.pinned | space.durable)

    def flushed(self, skipped: set[tuple[int, bytes]]) -> None:
        """A flush is done and left these out."""
        if not self.fault and not skipped:
            self.refused = False
        for space in self.spaces:
            left_out = {key for number, key in skipped if number == space.number}
            space.durable |= space.sure - left_out - space.tainted

    @property
    def spoiled(self) -> bool:
        """Whether something on disk may be damaged."""
        return any(space.tainted for space in self.spaces)

    def verified(self) -> None:
        """Everything on disk was read and is right, or gone by now."""
        for space in self.spaces:
            space.tainted.clear()

    def crashed(self) -> None:
        """Memory is gone."""
        for space in self.spaces:
            space.keep(space.durable)
        self._started()

    def restarted(self, *, kept: bool) -> None:
        """It stopped in order and started again, with or without its memory."""
        if self.host > self.first_host:
            kept = False
        if self.disk > self.first_disk:
            for space in self.spaces:
                space.durable.clear()
        # What had no second use is not written at a stop either.
        written = self.disk_fits and self.policy != "reused" and not self.refused
        for space in self.spaces:
            if not kept and not (written and not self.fault):
                space.keep(space.durable)
        self._started()

    def _started(self) -> None:
        if self.disk > self.first_disk:
            for space in self.spaces:
                space.keep(set())
                space.durable.clear()
        self.host, self.disk = self.first_host, self.first_disk
        self.broken = False
        self.weaken()
