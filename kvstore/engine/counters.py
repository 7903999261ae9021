"""Counts and timings of one daemon run."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from kvstore import tracing
from kvstore.buckets import BUCKET_SECONDS, Buckets

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.index import Pressure
    from kvstore.tiers.base import TierName

__all__ = ["BUCKET_SECONDS", "Counters", "Histogram", "Timing", "UsageCounts"]

_SAMPLES = 4096
# Counts travel as uint64: what a client makes up must not make the sums unsendable.
_MAX_COUNT = (1 << 64) - 1


@dataclass(slots=True)
class UsageCounts:
    """What clients report: see `Usage` in the contract. Tokens, bytes and counts."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens_gpu: int = 0
    reused_tokens_host: int = 0
    reused_tokens_disk: int = 0
    local_tokens: int = 0
    load_failures: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0

    def add(self, other: UsageCounts) -> None:
        """Add another count to this one; sums end at what the wire can carry."""
        for name in _USAGE:
            total = getattr(self, name) + getattr(other, name)
            setattr(self, name, min(total, _MAX_COUNT))

    @classmethod
    def total(cls, counts: Sequence[UsageCounts]) -> UsageCounts:
        """Return the sum of many: several times faster than adding one after the other."""
        return cls(*(min(sum(map(attrgetter(name), counts)), _MAX_COUNT) for name in _USAGE))

    def values(self) -> dict[str, Any]:
        """Return the counts by name."""
        return {name: getattr(self, name) for name in _USAGE}


# There is one of these per space: looking the names up each time would take longer than adding.
_USAGE = tuple(field.name for field in fields(UsageCounts))


@dataclass(frozen=True, slots=True)
class Timing:
    """Percentiles of the last 4,096 samples, seconds; `count`, `total`, `longest` are of all.

    What clients report are percentiles of all samples, as exact as buckets are.
    """

    name: str
    count: int
    total: float
    p50: float
    p95: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """All samples of a timing since the start.

    Attributes:
        name: of the timing.
        buckets: samples up to each of `BUCKET_SECONDS` and above the one before; then the rest.
        total: sum, seconds.
        longest: seconds.
    """

    name: str
    buckets: tuple[int, ...]
    total: float
    longest: float


class Counters:
    """Named counts, misses by reason, and timings.

    Attributes:
        counts: by name.
        miss_blocks: blocks asked for and not served, by reason.
        miss_tokens: the same in tokens.
        client_times: what clients say that their operations took, by operation.
    """

    def __init__(self) -> None:
        """Start at zero."""
        self.counts: Counter[str] = Counter()
        self.miss_blocks: Counter[str] = Counter()
        self.miss_tokens: Counter[str] = Counter()
        self.client_times = {name: Buckets() for name in ("lookup", "load", "store")}
        self._samples: dict[str, deque[float]] = {}
        self._buckets: dict[str, list[int]] = {}
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._longest: dict[str, float] = {}

    def miss(self, reason: str, blocks: int, block_tokens: int) -> None:
        """Count the blocks of a request that were not served, by why the run ended."""
        if blocks > 0 and reason.lower() != "none":
            self.miss_blocks[reason.lower()] += blocks
            self.miss_tokens[reason.lower()] += blocks * block_tokens

    def evicted(self, tier: TierName, blocks: int, pressure: Pressure) -> None:
        """Count copies that left a tier, and say so in the trace of the request they left for."""
        if not blocks:
            return
        name = tier.name.lower()
        self.counts[f"evicted_blocks_{name}"] += blocks
        if tracing.recording():
            about = {"tier": name, "blocks": blocks, "pressure": pressure.name.lower()}
            tracing.batch_span("kvstore.evict", (tracing.carried(),), **about).end()

    def record(self, name: str, seconds: float) -> None:
        """Add one sample."""
        samples = self._samples.get(name)
        if samples is None:
            # Last, so that whoever finds it there finds the others, too: metrics are scraped by
            # another thread.
            self._buckets[name] = [0] * (len(BUCKET_SECONDS) + 1)
            self._seconds[name] = self._longest[name] = 0.0
            samples = self._samples[name] = deque(maxlen=_SAMPLES)
        samples.append(seconds)
        self._buckets[name][bisect_left(BUCKET_SECONDS, seconds)] += 1
        self._counts[name] += 1
        self._seconds[name] += seconds
        self._longest[name] = max(self._longest[name], seconds)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a block of code."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.record(name, time.perf_counter() - start)

    def histograms(self) -> list[Histogram]:
        """Return all samples since the start by name. Any thread."""
        return [
            Histogram(name, tuple(self._buckets[name]), self._seconds[name], self._longest[name])
            for name in sorted(self._samples)
        ]

    def timings(self) -> list[Timing]:
        """Return percentiles by name; what clients report last, as `client_OPERATION`."""
        result = []
        for name, samples in sorted(self._samples.items()):
            ordered = sorted(samples.copy())
            last = len(ordered) - 1
            at = [ordered[round(last * q)] for q in (0.5, 0.95, 0.99)]
            count, total = self._counts[name], self._seconds[name]
            result.append(Timing(name, count, total, at[0], at[1], at[2], self._longest[name]))
        for operation, times in self.client_times.items():
            if count := times.count:
                at = [times.quantile(q) for q in (0.5, 0.95, 0.99)]
                name = f"client_{operation}"
                result.append(Timing(name, count, times.total, at[0], at[1], at[2], times.longest))
        return result
