"""How many bytes are read together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.units import KIB, MIB

if TYPE_CHECKING:
    from kvstore.prefetch.estimate import PathEstimate

__all__ = ["QUANTUM_SECONDS", "batch_bytes", "first_bytes", "passing_bytes"]

# A batch is what the path moves in this time, and at most so much.
QUANTUM_SECONDS: Final = 0.003
_BATCH_BYTES: Final = 16 * MIB
_FIRST_BATCH_BYTES: Final = 256 * KIB


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
