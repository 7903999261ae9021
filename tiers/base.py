"""The interface of a tier: slots and bytes, nothing about keys, order or policy.

Threads: every method is called on the event loop's thread that opened the tier and must not
block; `read`, `write` and `sync` are coroutines whose work runs on the tier's own threads.

Ownership: from the call until the coroutine returns, the caller owns the slots and keeps the
buffers alive; the tier owns nothing afterwards. A cancelled `read` or `write` first waits until
the last system call on the caller's buffers has returned, then raises ``CancelledError``: a
buffer is never written behind its owner's back.

Expected outcomes are values (`Outcome`, a short list of slots); a `TierError` is a fault of the
device as a whole and leaves every slot as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from kvstore.space import BlockShape

__all__ = ["Capabilities", "Outcome", "Slot", "Tier", "TierName", "TierUsage", "Transfer"]


class TierName(IntEnum):
    """Tiers, fastest first. The values are those of the wire format."""

    GPU = 1
    HOST = 2
    DISK = 3


class Slot(NamedTuple):
    """Where one block lies in a tier.

    Attributes:
        group: slab group (memory) or segment (disk).
        index: slot inside it; shard r fills slot `index` of the group's slab r.
    """

    group: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs


class Outcome(Enum):
    """What became of one transfer."""

    OK = "ok"
    CORRUPT = "corrupt"  # bytes came, and do not match the digest
    IO_ERROR = "io_error"  # the device failed for this block, or delivered too little


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block to read into, or write from, memory.

    Attributes:
        slot: the block's place in the tier.
        buffers: one per shard, each `slot_bytes` long, 4096-byte aligned, writable for reads.
        lengths: bytes of each shard that count; the rest of the slot is padding.
        digests: XXH3-64 of each shard's counted bytes, checked by `read`; None when not known.
    """

    slot: Slot
    buffers: tuple[memoryview, ...]
    lengths: tuple[int, ...]
    digests: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a tier can do.

    Attributes:
        mappable: clients on this machine can map its slabs.
        persistent: what `sync` made durable survives the process.
        direct_io: transfers bypass the page cache.
    """

    mappable: bool = False
    persistent: bool = False
    direct_io: bool = False


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Bytes of a tier.

    Attributes:
        capacity_bytes: configured limit.
        allocated_bytes: taken from the system in slabs or segments.
        used_bytes: of those, in slots that are allocated.
    """

    capacity_bytes: int
    allocated_bytes: int
    used_bytes: int


class Tier(ABC):
    """A place for blocks."""

    name: TierName
    capabilities: Capabilities

    @abstractmethod
    async def open(self) -> None:
        """Take the resources.

        Raises:
            ConfigError: directory or size is unusable; nothing is left behind.
        """

    @abstractmethod
    async def close(self) -> None:
        """Wait for transfers and give the resources back. Idempotent."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """Return the tier's bytes."""

    @abstractmethod
    def free_blocks(self, shape: BlockShape) -> int:
        """Return how many blocks `allocate` could give now without anything being freed."""

    @abstractmethod
    def allocate(self, shape: BlockShape, count: int) -> list[Slot]:
        """Take up to `count` slots; fewer, or none, when there is no room. Never waits.

        The tier's used bytes never exceed its capacity.
        """

    @abstractmethod
    def free(self, slots: Sequence[Slot]) -> None:
        """Give slots back; they may be allocated again at once.

        Raises:
            ValueError: a slot is not allocated (a bug of the caller); no slot was freed.
        """

    @abstractmethod
    async def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Copy blocks from the tier into buffers and check their digests, one outcome each.

        Raises:
            TierUnavailable, TierClosed: nothing useful was read.
        """

    @abstractmethod
    async def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Copy blocks from buffers into the tier, one outcome each (OK or IO_ERROR)."""

    @abstractmethod
    async def sync(self) -> None:
        """Return when everything written before the call is as durable as the tier can make it.

        Raises:
            TierUnavailable: some of it may not be; the caller writes it again elsewhere.
        """
