"""How many bytes are read together, and what may begin beside what is being read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kvstore.units import KIB, MIB

if TYPE_CHECKING:
    from kvstore.prefetch.estimate import PathEstimate

__all__ = [
    "BATCHES_AT_ONCE",
    "QUANTUM_SECONDS",
    "batch_bytes",
    "first_bytes",
    "least_priority",
    "passing_bytes",
]

BATCHES_AT_ONCE: Final = 3
# A batch is what the path moves in this time, and at most so much.
QUANTUM_SECONDS: Final = 0.003
_BATCH_BYTES: Final = 16 * MIB
_FIRST_BATCH_BYTES: Final = 256 * KIB
# Of lower priority than requests have: with more under way than the path moves in this time, none begins.
_BEHIND: Final = 0
_BEHIND_SECONDS: Final = (BATCHES_AT_ONCE - 1) * QUANTUM_SECONDS


def batch_bytes(path: PathEstimate, block_bytes: int) -> int:
    """Return how many bytes a batch has at most; of large blocks it is one."""
    # Of a path that nobody has seen at work nothing is taken for granted.
    largest = _BATCH_BYTES if path.observed else first_bytes(block_bytes)
    return path.quantum(QUANTUM_SECONDS, block_bytes, largest)


def first_bytes(block_bytes: int) -> int:
    """Return how many bytes a job's first batch has at most."""
    return max(block_bytes, _FIRST_BATCH_BYTES)


def passing_bytes(path: PathEstimate, block_bytes: int) -> int:
    """Return how many bytes are taken in passing, before jobs that stand in front, at most."""
    return min(batch_bytes(path, block_bytes), first_bytes(block_bytes))


def least_priority(path: PathEstimate) -> float:
    """Return the priority that a batch must have to begin beside what is under way."""
    if not path.in_flight:
        return -math.inf
    if not path.observed:
        # What comes first says how much may be under way.
        return math.inf
    # A request that comes next waits for what is under way, so of slow blocks there is one.
    return _BEHIND if path.in_flight > path.bytes_per_second * _BEHIND_SECONDS else -math.inf
