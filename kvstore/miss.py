"""Why a leading run ended: an answer, not an error."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Miss", "MissReason"]


class MissReason(StrEnum):
    """Reasons, by the names that metrics and people use; `.name` is the one of the wire."""

    NONE = "none"  # it did not end: every key is present
    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    EXPIRED = "expired"  # not used for as long as its space keeps blocks
    FORGOTTEN = "forgotten"  # never seen, or evicted longer ago than the daemon remembers
    OTHER_EPOCH = "other_epoch"
    CORRUPT = "corrupt"
    IO_ERROR = "io_error"
    DEADLINE = "deadline"  # on a slower tier, not promoted in time
    NOT_WORTH_WAITING = "not_worth_waiting"  # recomputing is predicted to be faster
    NOT_READY = "not_ready"  # not all shards are committed yet
    LEASE_CAP = "lease_cap"
    LEASE_LOST = "lease_lost"
    NO_ROOM = "no_room"  # on a slower tier; no slot to promote it to


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a run ended after its last block.

    Attributes:
        reason: why.
        tier: where the block was or is (``gpu``, ``host``, ``disk``); empty when that says
            nothing.
        unix_seconds: when it was evicted, dropped or lost; 0 when not known.
    """

    reason: MissReason = MissReason.NONE
    tier: str = ""
    unix_seconds: float = 0.0

    def __bool__(self) -> bool:
        """Return whether the run ended early."""
        return self.reason is not MissReason.NONE
