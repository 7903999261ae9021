"""How fast a path moves bytes, as measured while it is used.

Rate is bytes over *busy* time: the time in which at least one transfer was under way. Several
transfers share a device, so the time of each says little; bytes and busy time are summed up and
decay together, which weighs every stretch of time alike however its transfers ended in bursts. While
the path idles what is believed loses weight, too, so that a path that is only tried now and then is
believed what it shows then.
One outlier moves the estimate by little (a stretch counts at most as if the path were eight times
slower than believed), a path that has changed is believed after a few.

Latency is what a lone transfer takes beyond its bytes: one during which nothing else was under way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvstore.units import MIB

__all__ = ["PathEstimate", "Prior"]

# Busy time after which an observation has lost 63 % of its weight.
_MEMORY_SECONDS: Final = 2.0
# The same for time in which the path idled, down to the weight of so much busy time.
_IDLE_MEMORY_SECONDS: Final = 10.0
_LEAST_WEIGHT_SECONDS: Final = 0.03
# How much busy time at the believed rate weighs against what is under way and late, and after how
# long that has lost 63 % of its weight.
_STEADY_SECONDS: Final = 0.1
_DOUBT_SECONDS: Final = 1.0
_OUTLIER: Final = 8.0
_LATENCY_WEIGHT: Final = 0.2
# Of the time of a transfer that is alone, what may be put down to its latency: what both are is not
# known where none is ever beside another.
_LATENCY_PART: Final = 0.05


@dataclass(frozen=True, slots=True)
class Prior:
    """What is believed before anything was measured.

    Attributes:
        bytes_per_second: rate.
        latency_seconds: of a transfer.
    """

    bytes_per_second: float = 1e9
    latency_seconds: float = 1e-3


class PathEstimate:
    """Moving estimate of one path. Times are loop times, in seconds.

    Attributes:
        measured: whether anything has been observed.
        observed_at: when a transfer ended last; minus infinity before.
        latency_seconds: of a transfer, beyond the time of its bytes.
        in_flight: bytes under way.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        """Believe the prior."""
        prior = prior or Prior()
        self._bytes = 0.0
        self._seconds = 0.0
        self._prior = prior.bytes_per_second
        self.latency_seconds = prior.latency_seconds
        self.measured = False
        self.observed_at = -math.inf
        self.in_flight = 0
        # Of each transfer under way: when it began, its bytes, all bytes under way just then.
        self._begun: dict[int, tuple[float, int, int]] = {}
        self._next = 0
        self._mark = 0.0
        # Transfer that nothing else was under way with; 0: none.
        self._lone = 0

    @property
    def bytes_per_second(self) -> float:
        """Believed rate."""
        return self._bytes / self._seconds if self.measured else self._prior

    @property
    def observed(self) -> bool:
        """Whether something was measured since the start."""
        return self.observed_at > -math.inf

    def recall(self, bytes_per_second: float, latency_seconds: float) -> None:
        """Believe what was measured before a restart, until something is measured now."""
        self._seconds = _LEAST_WEIGHT_SECONDS
        self._bytes = bytes_per_second * self._seconds
        self.latency_seconds = latency_seconds
        self.measured = True

    def begin(self, size: int, now: float) -> int:
        """Take note that a transfer begins; return its number for `end`."""
        idle = not self._begun
        if idle:
            self._fade(now)
            self._mark = now
        self._next += 1
        self._lone = self._next if idle else 0
        self.in_flight += size
        self._begun[self._next] = (now, size, self.in_flight)
        return self._next

    def _fade(self, now: float) -> None:
        """Let what was measured before the path idled weigh less."""
        if self._seconds > _LEAST_WEIGHT_SECONDS:
            keep = math.exp((self.observed_at - now) / _IDLE_MEMORY_SECONDS)
            keep = max(keep, _LEAST_WEIGHT_SECONDS / self._seconds)
            self._bytes *= keep
            self._seconds *= keep

    def end(self, number: int, moved: int, now: float) -> float:
        """Take note that a transfer is over.

        Args:
            number: from `begin`.
            moved: bytes that arrived; 0 for one that failed, which says nothing about speed.
            now: loop time.

        Returns:
            seconds that it took.
        """
        begun, size, _ = self._begun.pop(number)
        self.in_flight -= size
        stretch = max(now - self._mark, 1e-9)
        self._mark = now
        took = now - begun
        if number == self._lone:
            # Several at a time hide each other's latency: of one alone it is no sign of slowness.
            stretch -= min(self.latency_seconds, _LATENCY_PART * stretch)
        if moved <= 0:
            return took
        expected = moved / self.bytes_per_second + self.latency_seconds
        # Of another day, or a guess: nothing to call what is seen now an outlier by.
        if self.observed:
            stretch = min(stretch, _OUTLIER * expected)
        keep = math.exp(-stretch / _MEMORY_SECONDS) if self.observed else 0.0
        # However short the stretch, a transfer replaces some of what is believed: a fast device
        # would else be measured for seconds before a slow prior is forgotten.
        keep = min(keep, 0.97)
        self._bytes = keep * self._bytes + moved
        self._seconds = keep * self._seconds + stretch
        self.measured = True
        self.observed_at = now
        if number == self._lone:
            extra = max(0.0, took - moved / self.bytes_per_second)
            extra = min(extra, _OUTLIER * max(self.latency_seconds, 1e-4))
            self.latency_seconds += _LATENCY_WEIGHT * (extra - self.latency_seconds)
        return took

    def oldest_seconds(self, now: float) -> float:
        """Return how long the oldest transfer has been under way; 0 without one."""
        return now - min((begun for begun, _, _ in self._begun.values()), default=now)

    def seconds(self, size: int, ahead: int, now: float) -> float:
        """Predict how long it takes until `size` bytes have arrived.

        Args:
            size: bytes.
            ahead: bytes that go first, those in flight not counted.
            now: loop time.
        """
        return (self.in_flight + ahead + size) / self.pace(now) + self.latency_seconds

    def pace(self, now: float) -> float:
        """Return the rate to count on now: the believed one, unless what is under way belies it.

        A transfer that should have ended long ago says that the path is slow before it ends: a
        little, when it is late by a hiccup, and all the more the longer it takes. It shares the path
        with what was under way when it began, most of which may have ended since.
        """
        rate = self.bytes_per_second
        begun, _, size = min(self._begun.values(), default=(now, 0, 0))
        age = now - begun
        if age > 2 * (size / rate + self.latency_seconds):
            steady = _STEADY_SECONDS * math.exp(-age / _DOUBT_SECONDS)
            return max(min(rate, (rate * steady + size) / (steady + age)), 1.0)
        return rate

    def quantum(self, seconds: float, least: int, most: int = 16 * MIB) -> int:
        """Return how many bytes the path moves in so many seconds, within limits."""
        return int(min(max(self.bytes_per_second * seconds, least), most))
