"""Which of two ways blocks take: straight, or in stages that overlap.

The straight way (disk to GPU) leaves host memory alone and is taken unless the other one is measured
to be clearly faster: a storage driver that works in its compatibility mode may be. Stages overlap
block by block, so a way of several takes as long as its slowest. A way that lost is measured again
from time to time, with a little of what there is to move, or nobody would find out that it got better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.prefetch.estimate import PathEstimate
from kvstore.units import MIB

__all__ = ["LEAST_BYTES", "Leg", "straight_bytes"]

# Less than this is over before the difference matters.
LEAST_BYTES: Final = 32 * MIB
# What the straight way may take more, for the host memory that it spares.
_MARGIN: Final = 0.25
_MEASURE_AGAIN_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Leg:
    """One path, and what goes first on it.

    Attributes:
        path: how fast it is.
        ahead_bytes: queued on it; what is in flight not counted.
    """

    path: PathEstimate
    ahead_bytes: int


def straight_bytes(size: int, straight: Leg, stages: Sequence[Leg], now: float) -> int:
    """Return how many of `size` bytes go straight; the rest goes by the stages.

    Args:
        size: bytes to move.
        straight: the way without a stop.
        stages: the others, each of which all bytes pass.
        now: loop time.
    """
    measured = straight.path.measured and all(leg.path.measured for leg in stages)
    if size < LEAST_BYTES or not measured:
        return size
    direct = straight.path.seconds(size, straight.ahead_bytes, now)
    staged = max(leg.path.seconds(size, leg.ahead_bytes, now) for leg in stages)
    if direct <= staged * (1 + _MARGIN):
        return size
    stale = now - straight.path.observed_at > _MEASURE_AGAIN_SECONDS
    return LEAST_BYTES if stale and not straight.path.in_flight else 0
