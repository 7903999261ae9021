"""What the connector shows at vLLM's own `/metrics`, and in its log.

Each half of the connector counts in a `StatsLog` of its process. vLLM takes what has come together
after a step (`get_kv_connector_stats`), adds the ranks' and the scheduler's up, carries the sum to
the API server as plain values, and has it observed there by what `build_prom_metrics` made. Nothing
of it is kept: what vLLM does not take is bounded, and the daemon counts by itself.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from statistics import median
from typing import Any, Final

from kvstore import tracing
from kvstore.connectors.vllm import guard

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
except ImportError:  # vLLM without connector metrics: then nothing asks for them
    KVConnectorPromMetrics = KVConnectorStats = object

__all__ = ["BUCKET_SECONDS", "KVStorePromMetrics", "KVStoreStats", "LoadTimer", "StatsLog"]

# Samples of one timing that may wait to be taken: far more than a step has.
_MOST_SAMPLES: Final = 4096
BUCKET_SECONDS: Final = (
    *(float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 2, 5)),
    10.0,
    60.0,
)
TIERS: Final = ("gpu", "host", "disk")

_TIMINGS: Final = {
    "lookup": "Time from asking the kvstore daemon for a request's blocks to its answer.",
    "load": "Time to load a request's blocks from kvstore, of each rank.",
    "store": "Time to copy computed blocks to kvstore and commit them, of each rank.",
}
_COUNTS: Final = {
    "requests": "Requests that kvstore was used for.",
    "prompt_tokens": "Prompt tokens of these requests.",
    "local_tokens": "Prompt tokens found in the engine's own prefix cache.",
    "loaded_bytes": "Bytes loaded from kvstore, all ranks together.",
    "stored_bytes": "Bytes stored in kvstore, all ranks together.",
    "lookup_failures": "Requests that the kvstore daemon did not answer.",
    "load_failures": "Loads that failed; their requests were computed.",
    "store_failures": "Stores that failed, of each rank; their blocks are not in kvstore.",
    "unfilled": "Pieces of kvstore's memory that could not be faulted in ahead of their first use.",
    "hook_failures": "Hooks of the connector that failed; the engine went on without kvstore.",
}
_HIT_TOKENS: Final = (
    "Prompt tokens loaded from kvstore instead of computed, by the tier that held them."
)


class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Counts and samples of one interval, in plain values that travel between processes.

    Attributes:
        data: `counts` by name (hit tokens as `hit_tokens/TIER`), and `seconds`: samples by name.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        """Take `data` as it is, or start with nothing."""
        self.data: dict[str, Any] = data or {}
        self.data.setdefault("counts", {})
        self.data.setdefault("seconds", {})

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counts": {}, "seconds": {}}

    def to_dict(self) -> dict[str, Any]:
        """Return what travels."""
        return self.data

    def is_empty(self) -> bool:
        """Return whether there is nothing to observe."""
        return not self.data["counts"] and not self.data["seconds"]

    def aggregate(self, other: Any) -> KVStoreStats:
        """Add another interval's, or another rank's; return this one."""
        counts, seconds = self.data["counts"], self.data["seconds"]
        for name, count in other.data["counts"].items():
            counts[name] = counts.get(name, 0) + count
        for name, samples in other.data["seconds"].items():
            mine = seconds.setdefault(name, [])
            mine.extend(samples[: _MOST_SAMPLES - len(mine)])
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log says about an interval."""
        said: dict[str, int | float] = {}
        for name, samples in self.data["seconds"].items():
            if samples:
                said[f"{name}s"] = len(samples)
                said[f"{name} P50 (ms)"] = round(median(samples) * 1e3, 3)
        said.update({name.replace("_", " "): n for name, n in self.data["counts"].items()})
        return said


class StatsLog:
    """Counts of one half of the connector since vLLM took them last. Any thread may add."""

    def __init__(
        self, tell: Callable[[str, float], None], unfilled: Callable[[], int] = lambda: 0
    ) -> None:
        """Start at nothing.

        Args:
            tell: is told each time as well: the daemon shows the times of all its clients.
            unfilled: returns what the attachment counts, from 0 again with each new one.
        """
        self._tell = tell
        self._unfilled, self._seen_unfilled = unfilled, 0
        self._guard = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, deque[float]] = {}

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a count."""
        if amount:
            with self._guard:
                self._counts[name] += int(amount)

    def time(self, name: str, seconds: float) -> None:
        """Add a sample."""
        self._tell(name, seconds)
        with self._guard:
            samples = self._seconds.get(name)
            if samples is None:
                samples = self._seconds[name] = deque(maxlen=_MOST_SAMPLES)
            samples.append(seconds)

    def lookup(self, asked: Future[Any]) -> None:
        """Time a question that is sent now, until its answer is there."""
        began = time.perf_counter()

        def answered(answer: Future[Any]) -> None:
            if answer.exception() is None:
                self.time("lookup", time.perf_counter() - began)
            else:
                self.count("lookup_failures")

        asked.add_done_callback(answered)

    def take(self) -> KVStoreStats | None:
        """Return what was added since the last call; None for nothing."""
        failed = guard.take_failures()
        before, self._seen_unfilled = self._seen_unfilled, self._unfilled()
        again = self._seen_unfilled < before
        self.count("unfilled", self._seen_unfilled - (0 if again else before))
        if not (self._counts or self._seconds or failed):
            return None
        with self._guard:
            counts, self._counts = self._counts, Counter()
            seconds, self._seconds = self._seconds, {}
        if failed:
            counts["hook_failures"] += failed
        return KVStoreStats(
            {
                "counts": dict(counts),
                "seconds": {name: list(samples) for name, samples in seconds.items()},
            }
        )


class LoadTimer:
    """Times one load until its bytes are there, and counts them.

    A load that is reported early is over when it has `landed`; whether it was is known only when
    submitting it returns, and another thread may say before that it is `done`.
    """

    def __init__(self, stats: StatsLog, span: tracing.Span = tracing.OFF) -> None:
        """The load begins now; its span, if it has one, ends with it."""
        self._stats = stats
        self._span = span
        self._guard = threading.Lock()
        self._began = time.perf_counter()
        self._early: bool | None = None
        self._seconds: float | None = None

    def done(self, loaded_bytes: int) -> None:
        """It was reported, with so many bytes right."""
        with self._guard:
            self._span.set(loaded_bytes=loaded_bytes)
            if not loaded_bytes:
                self._span.fail("nothing could be loaded")
                self._span.end()
                return
            self._stats.count("loaded_bytes", loaded_bytes)
            self._seconds = time.perf_counter() - self._began
            self._tell()

    def submitted(self, *, early: bool) -> None:
        """It is known now whether `done` was called early."""
        with self._guard:
            self._early = early
            self._tell()

    def landed(self) -> None:
        """The bytes of an early load are there."""
        with self._guard:
            self._early = False
            self._seconds = time.perf_counter() - self._began
            self._tell()

    def _tell(self) -> None:
        if self._early is False and self._seconds is not None:
            self._stats.time("load", self._seconds)
            self._seconds = None
            self._span.end()


class KVStorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Our series beside vLLM's. Lives in the API server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Make the series; every label's child at once, so that all are there from the start."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        engines = per_engine_labelvalues.items()
        self._add: dict[tuple[int, str], Callable[[float], Any]] = {}
        self._observe: dict[tuple[int, str], Callable[[float], Any]] = {}
        for name, text in _COUNTS.items():
            counter = self._counter_cls(
                name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames
            )
            for engine, values in engines:
                self._add[engine, name] = counter.labels(*values).inc
        hits = self._counter_cls(
            name="vllm:kvstore_hit_tokens",
            documentation=_HIT_TOKENS,
            labelnames=[*labelnames, "tier"],
        )
        for engine, values in engines:
            for tier in TIERS:
                self._add[engine, f"hit_tokens/{tier}"] = hits.labels(*values, tier).inc
        for name, text in _TIMINGS.items():
            histogram = self._histogram_cls(
                name=f"vllm:kvstore_{name}_seconds",
                documentation=text,
                labelnames=labelnames,
                buckets=list(BUCKET_SECONDS),
            )
            for engine, values in engines:
                self._observe[engine, name] = histogram.labels(*values).observe

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in what an engine's processes have counted.

        What another version of the connector counts besides is left out.
        """
        counts: Iterable[tuple[str, int]] = transfer_stats_data.get("counts", {}).items()
        for name, amount in counts:
            add = self._add.get((engine_idx, name))
            if add is not None:
                add(amount)
        for name, samples in transfer_stats_data.get("seconds", {}).items():
            observe = self._observe.get((engine_idx, name))
            if observe is not None:
                for seconds in samples:
                    observe(seconds)
