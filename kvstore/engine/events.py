"""What the engine tells an attached client, as values; the server turns them into messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from kvstore.miss import Miss
    from kvstore.tiers.base import Slot
    from kvstore.tiers.gpu_slab import GpuSlabGroup
    from kvstore.tiers.slab import SlabGroup

__all__ = [
    "ActiveEvent",
    "BootEndEvent",
    "Event",
    "GenerationSlots",
    "GrantRevokedEvent",
    "LeaseDoneEvent",
    "LeaseGrownEvent",
    "LeasesRevokedEvent",
    "SlabEvent",
    "SlabRetireEvent",
]


@dataclass(frozen=True, slots=True)
class GenerationSlots:
    """Slots as a client needs them, each with the generation it was granted at."""

    slots: Sequence[Slot]
    generations: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ActiveEvent:
    """The attachment's lock was seen: it may write and lease."""


@dataclass(frozen=True, slots=True)
class SlabEvent:
    """A slab group is there to be mapped."""

    group: SlabGroup | GpuSlabGroup


@dataclass(frozen=True, slots=True)
class SlabRetireEvent:
    """Slab groups are to be unmapped."""

    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeaseGrownEvent:
    """A lease covers more blocks: their slots, and the tiers (`TierName`) they came from."""

    lease_id: int
    first: int
    slots: GenerationSlots
    tiers: bytes


@dataclass(frozen=True, slots=True)
class LeaseDoneEvent:
    """A lease has its final length."""

    lease_id: int
    blocks: int
    miss: Miss


@dataclass(frozen=True, slots=True)
class LeasesRevokedEvent:
    """Leases ended before their holder released them."""

    lease_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GrantRevokedEvent:
    """A grant's owner is gone: its writers are to stop and abort."""

    owner_id: int
    grant_id: int


@dataclass(frozen=True, slots=True)
class BootEndEvent:
    """The daemon is about to exit."""

    reason: str


Event = (
    ActiveEvent
    | SlabEvent
    | SlabRetireEvent
    | LeaseGrownEvent
    | LeaseDoneEvent
    | LeasesRevokedEvent
    | GrantRevokedEvent
    | BootEndEvent
)
