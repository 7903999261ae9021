"""One measured figure, and the one that it is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Figure", "most", "rate", "times"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A median, beside the median of a baseline taken in turns with it.

    Attributes:
        name: what was measured.
        unit: ``GB/s`` (more is better), or another, such as ``ms`` or ``%`` (less is better).
        value: kvstore's median.
        samples: what it is the median of.
        baseline: the baseline's median; None: there is none.
        against: what the baseline is.
        target: least ratio to the baseline (GB/s), or the most that the value may be (others);
            None: no target.
    """

    name: str
    unit: str
    value: float
    samples: tuple[float, ...]
    baseline: float | None = None
    against: str = ""
    target: float | None = None

    @property
    def ratio(self) -> float | None:
        """Value over baseline."""
        return None if self.baseline is None else self.value / self.baseline

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        if self.unit != "GB/s":
            return self.value <= self.target
        assert self.ratio is not None
        return self.ratio >= self.target

    def as_json(self) -> dict[str, Any]:
        """Return every field, and what follows from them."""
        return {
            "name": self.name,
            "unit": self.unit,
            "value": self.value,
            "baseline": self.baseline,
            "against": self.against,
            "ratio": self.ratio,
            "target": self.target,
            "met": self.met,
            "samples": list(self.samples),
        }


def rate(
    name: str,
    size: int,
    seconds: Sequence[float],
    baseline_seconds: Sequence[float] = (),
    against: str = "",
    target: float | None = None,
) -> Figure:
    """Return a rate in GB/s (10⁹ bytes) from the times that `size` bytes took."""
    rates = tuple(size / s / 1e9 for s in seconds)
    baseline = median(size / s / 1e9 for s in baseline_seconds) if baseline_seconds else None
    return Figure(name, "GB/s", median(rates), rates, baseline, against, target)


def times(
    name: str,
    seconds: Sequence[float],
    baseline_seconds: Sequence[float] = (),
    against: str = "",
    target_ms: float | None = None,
) -> Figure:
    """Return a time in milliseconds."""
    samples = tuple(s * 1e3 for s in seconds)
    baseline = median(baseline_seconds) * 1e3 if baseline_seconds else None
    return Figure(name, "ms", median(samples), samples, baseline, against, target_ms)


def most(name: str, unit: str, values: Sequence[float], target: float) -> Figure:
    """Return something of which there is to be little, such as a share or a count."""
    return Figure(name, unit, median(values), tuple(values), target=target)
