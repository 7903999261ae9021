"""Why a leading run ended, as values and in words."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.index import Pressure
from kvstore.miss import Miss, MissReason
from kvstore.units import format_duration, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.recent import Forecast
    from kvstore.index import SpaceIndex
    from kvstore.space import Difference

__all__ = ["Explanation", "OtherSpace", "forecast_words", "miss_words"]


@dataclass(frozen=True, slots=True)
class OtherSpace:
    """Another space that holds the block that is missing, or may hold it under another key.

    Attributes:
        space: which.
        blocks: leading run of the keys that it holds; 0: its keys cannot be compared.
        differences: what makes it another space.
    """

    space: SpaceIndex
    blocks: int
    differences: Sequence[Difference]


@dataclass(frozen=True, slots=True)
class Explanation:
    """How far a run goes and why it ends there; the fields are those of the contract."""

    space: SpaceIndex
    asked: int
    blocks: int
    miss: Miss
    key: bytes
    lines: Sequence[str]
    others: Sequence[OtherSpace]


def _when(unix_seconds: float) -> str:
    if unix_seconds <= 0:
        return ""
    ago = format_seconds(max(0.0, time.time() - unix_seconds))
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_seconds))
    return f" at {stamp} ({ago} ago)"


def forecast_words(forecast: Forecast) -> str:
    """Say what was predicted."""
    load = f"loading {forecast.blocks:,} blocks from disk: {format_seconds(forecast.load_seconds)}"
    if not forecast.compute_seconds:
        return load
    return f"{load}, computing them: {format_seconds(forecast.compute_seconds)}"


def miss_words(
    miss: Miss,
    pressure: Pressure = Pressure.NONE,
    forecast: Forecast | None = None,
    deadline_seconds: float = 0.0,
    unused_seconds: float = 0.0,
) -> str:
    """Say why a run ended.

    Args:
        miss: why.
        pressure: of an eviction.
        forecast: of what was not worth waiting for.
        deadline_seconds: how long the client would have waited.
        unused_seconds: how long an expired block was not used; 0: not known.
    """
    tier, when = miss.tier or "memory", _when(miss.unix_seconds)
    match miss.reason:
        case MissReason.NONE:
            return "every block is there"
        case MissReason.NEVER_SEEN:
            return "never seen: it was not stored in this space since the daemon started"
        case MissReason.FORGOTTEN:
            return "forgotten: never seen, or evicted longer ago than the daemon remembers"
        case MissReason.EVICTED:
            why = f": {pressure}" if pressure else ""
            return f"evicted from {tier}{when}{why}"
        case MissReason.EXPIRED:
            unused = f": not used for {format_duration(unused_seconds)}" if unused_seconds else ""
            return f"expired in {tier}{when}{unused}"
        case MissReason.OTHER_EPOCH:
            return f"other epoch: it was dropped when the space's epoch was bumped{when}"
        case MissReason.CORRUPT:
            return f"corrupt: damaged in {tier}, or below a block that was; dropped{when}"
        case MissReason.IO_ERROR:
            return "I/O error: the disk failed to deliver it"
        case MissReason.DEADLINE if deadline_seconds <= 0:
            return f"deadline: it was in {tier}, not ready to be read, and the client did not wait"
        case MissReason.DEADLINE:
            waited = format_seconds(deadline_seconds)
            return f"deadline: it was in {tier} and not ready within the client's {waited}"
        case MissReason.NOT_WORTH_WAITING:
            said = f" (predicted: {forecast_words(forecast)})" if forecast else ""
            return f"not worth waiting: on {tier}; computing is predicted to be faster{said}"
        case MissReason.NOT_READY:
            return "not ready: in flight, not all of its shards are committed"
        case MissReason.LEASE_CAP:
            return "lease cap: it is there, but the client's leases hold as much as they may"
        case MissReason.LEASE_LOST:
            return f"lease lost: the lease was revoked{when}"
        case MissReason.NO_ROOM:
            return f"no room: it is on {tier}, and no memory came free to bring it to"
