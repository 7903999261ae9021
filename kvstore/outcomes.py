"""Answers to Reserve and Commit that are not errors; the values are those of the contract."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["CommitOutcome", "Shortage"]


class CommitOutcome(IntEnum):
    """What became of one committed item."""

    COMMITTED = 1
    WAITING = 2
    EXISTS = 3
    PARENT_MISSING = 4
    UNKNOWN_SLOT = 5
    KEY_MISMATCH = 6
    ABORTED = 7


class Shortage(IntEnum):
    """Why a grant is smaller than asked."""

    NONE = 0
    BUSY = 1
    NO_ROOM = 2
    CLIENT_CAP = 3
    DRAINING = 4
    ORPHAN = 5
    QUOTA = 6
