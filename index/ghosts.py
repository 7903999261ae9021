"""A finite memory of keys that were evicted or dropped, to say why a run ended."""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from kvstore.tiers.base import TierName

__all__ = ["Ghost", "GhostList", "Pressure"]

Cause = Literal["evicted", "expired", "corrupt", "io_error", "epoch"]


class Pressure(StrEnum):
    """What made an evicted block leave, as people read it."""

    NONE = ""
    ROOM = "room was needed for newer blocks"
    OTHER_SIZE = "its memory was given to blocks of another size"
    RESIZE = "the tier was made smaller"
    REQUEST = "somebody asked for its eviction"
    QUOTA = "over the quota of its space"
    EXPIRED = "not used for as long as its space keeps blocks"


class Ghost(NamedTuple):
    """How a block went.

    Attributes:
        cause: evicted, expired (not used for too long), corrupt, io_error or epoch (the space's epoch
            was bumped).
        tier: where its last copy was.
        unix_seconds: when.
        pressure: what an eviction was for.
        unused_seconds: how long an expired one was not used, at least.
    """

    cause: Cause
    tier: TierName
    unix_seconds: float
    pressure: Pressure = Pressure.NONE
    unused_seconds: float = 0.0


class GhostList:
    """The last `capacity` keys that went, oldest forgotten first."""

    __slots__ = ("_capacity", "_ghosts", "forgot")

    def __init__(self, capacity: int = 100_000) -> None:
        """Make an empty list; a ghost costs about 250 bytes."""
        self._capacity = capacity
        self._ghosts: OrderedDict[tuple[bytes, bytes], Ghost] = OrderedDict()
        # Once true, a key that is not here may have been evicted long ago.
        self.forgot = False

    def __len__(self) -> int:
        """Return the number of ghosts."""
        return len(self._ghosts)

    def add(self, space_id: bytes, key: bytes, ghost: Ghost) -> None:
        """Remember how a block went."""
        self._ghosts[(space_id, key)] = ghost
        self._ghosts.move_to_end((space_id, key))
        if len(self._ghosts) > self._capacity:
            self._ghosts.popitem(last=False)
            self.forgot = True

    def get(self, space_id: bytes, key: bytes) -> Ghost | None:
        """Return how the block went, if remembered."""
        return self._ghosts.get((space_id, key))

    def discard(self, space_id: bytes, key: bytes) -> None:
        """Forget a block that is back."""
        self._ghosts.pop((space_id, key), None)
