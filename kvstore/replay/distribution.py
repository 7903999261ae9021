"""A distribution of durations in constant memory."""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

__all__ = ["Distribution"]

# Buckets grow by 1 %: quantiles are exact to half of that.
_GROWTH: Final = math.log(1.01)
_LEAST: Final = 1e-9


class Distribution:
    """Counts durations in buckets of equal relative width."""

    __slots__ = ("_buckets", "count", "maximum", "total")

    def __init__(self) -> None:
        """Start empty."""
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.maximum = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._buckets[int(math.log(max(seconds, _LEAST)) // _GROWTH)] += 1
        self.count += 1
        self.total += seconds
        self.maximum = max(self.maximum, seconds)

    @property
    def mean(self) -> float:
        """Mean, seconds; 0 of none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, part: float) -> float:
        """Return the duration that `part` of all do not exceed; 0 of none."""
        left = part * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(self.maximum, math.exp((bucket + 0.5) * _GROWTH))
        return self.maximum

    def as_json(self) -> dict[str, float]:
        """Return its summary, in seconds."""
        return {
            "mean": self.mean,
            "p50": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "p99": self.quantile(0.99),
            "max": self.maximum,
        }
