"""Times added up in buckets: any number of samples in a fixed number of counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

__all__ = ["BUCKET_SECONDS", "Buckets"]

# Upper limits: 1, 2, 5 a decade, from a microsecond to a minute. Part of the contract.
BUCKET_SECONDS: Final = (
    *(float(f"{digit}e{power}") for power in range(-6, 1) for digit in (1, 2, 5)),
    10.0,
    20.0,
    60.0,
)


class Buckets:
    """Samples of one timing. Not for several threads at once.

    Attributes:
        counts: samples up to each limit and above the one before; then the rest.
        total: sum, seconds.
        longest: seconds.
    """

    __slots__ = ("counts", "longest", "total")

    def __init__(self) -> None:
        """Start with no sample."""
        self.counts = [0] * (len(BUCKET_SECONDS) + 1)
        self.total = 0.0
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        """Add a sample."""
        self.counts[bisect_left(BUCKET_SECONDS, seconds)] += 1
        self.total += seconds
        self.longest = max(self.longest, seconds)

    def merge(self, counts: Sequence[int], total: float, longest: float) -> None:
        """Add others' samples; `counts` may leave out zeros at its end."""
        for at, count in enumerate(counts):
            self.counts[at] += count
        self.total += total
        self.longest = max(self.longest, longest)

    @property
    def count(self) -> int:
        """Number of samples."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Return a time that `share` of the samples did not exceed, seconds: a bucket's limit.

        Args:
            share: above 0 and at most 1.
        """
        wanted, seen = share * self.count, 0
        for limit, count in zip(BUCKET_SECONDS, self.counts, strict=False):
            seen += count
            if seen and seen >= wanted:
                return min(limit, self.longest)
        return self.longest
