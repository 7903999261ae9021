"""What the status page shows: the daemon's numbers now, and every ten seconds of the last hour.

The ring belongs to one thread of its own, which sleeps except for some milliseconds in ten seconds,
so that an hour is there when somebody opens the page. Like the metrics it reads plain numbers from
the engine, each of which is consistent. It holds counts since the start; the page makes rates of
them. A restart begins an empty hour; nothing is written anywhere.

Times are seconds since the daemon began to serve, from a monotonic clock: a wall clock that is set
must not tear the hour apart.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import kvstore
from kvstore.engine.counters import UsageCounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.engine import Engine

__all__ = ["HOUR_SECONDS", "SAMPLE_SECONDS", "StatusSamples"]

log = logging.getLogger(__name__)

SAMPLE_SECONDS: Final = 10.0
HOUR_SECONDS: Final = 3600.0
# Any number of open pages costs the daemon one look a second.
_FRESH_SECONDS: Final = 1.0
_PREFIXES: Final = 8


class StatusSamples:
    """The ring, and answers for the page. Safe to ask from any thread."""

    def __init__(
        self, engine: Engine, boot_id: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch an engine.

        Args:
            engine: whose numbers these are.
            boot_id: tells pages that another run has begun.
            clock: seconds, monotonic.
        """
        self._engine = engine
        self._boot_id = boot_id.hex()
        self._clock = clock
        self._started = clock()
        self._ring: deque[dict[str, Any]] = deque(maxlen=int(HOUR_SECONDS / SAMPLE_SECONDS) + 1)
        self._lock = threading.Lock()
        self._now: dict[str, Any] | None = None
        self._timings: list[dict[str, Any]] = []
        self._prefixes: list[dict[str, Any]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-samples", daemon=True)

    def start(self) -> None:
        """Begin to take samples."""
        self._thread.start()

    def close(self) -> None:
        """Take no more samples."""
        self._stop.set()
        self._thread.join()

    def take(self) -> None:
        """Put one sample into the ring."""
        sample = self._sample()
        with self._lock:
            self._ring.append(sample)

    def answer(self, since: float) -> dict[str, Any]:
        """Return the numbers of now and the samples that are younger than `since`.

        Args:
            since: seconds since the daemon began to serve; below 0: all there are.
        """
        with self._lock:
            at = self._clock() - self._started
            if self._now is None or at - self._now["at"] >= _FRESH_SECONDS:
                self._now = self._sample()
                self._timings = self._calls()
                self._prefixes = self._hottest()
            return {
                "version": kvstore.__version__,
                "boot_id": self._boot_id,
                "spaces": len(self._engine.index.spaces),
                "now": self._now,
                "timings": self._timings,
                "prefixes": self._prefixes,
                "samples": [sample for sample in self._ring if sample["at"] > since],
            }

    def _run(self) -> None:
        while True:
            try:
                self.take()
            except Exception:
                # A page without its history must not cost the daemon anything else.
                log.exception("status page: taking samples ends")
                return
            if self._stop.wait(SAMPLE_SECONDS):
                return

    def _calls(self) -> list[dict[str, Any]]:
        return [
            {
                "name": timing.name,
                "count": timing.count,
                "p50_seconds": timing.p50,
                "p99_seconds": timing.p99,
                "max_seconds": timing.longest,
            }
            for timing in self._engine.counters.timings()
        ]

    def _hottest(self) -> list[dict[str, Any]]:
        """Return what is asked for most, by size and place only: a key could confirm a guess."""
        return [
            {
                "shared_tokens": prefix.shared_blocks * prefix.space.spec.block_tokens,
                "shared_bytes": prefix.shared_blocks * prefix.space.shape.block_bytes,
                "shared_blocks": prefix.shared_blocks,
                "blocks": {tier.name.lower(): blocks for tier, blocks in prefix.tiers.items()},
                "requests": prefix.requests,
                "hit_tokens": prefix.hit_blocks * prefix.space.spec.block_tokens,
                "idle_seconds": prefix.idle_seconds,
            }
            for prefix in self._engine.hot_prefixes.hottest(_PREFIXES)
        ]

    def _tiers(self) -> list[dict[str, Any]]:
        engine = self._engine
        counts = engine.counters.counts
        spaces = list(engine.index.spaces.values())
        # Name, usage, blocks, bytes read, bytes written, state.
        rows: list[tuple[str, Any, int, int, int, str]] = []
        if engine.gpu is not None:
            blocks = sum(space.gpu_blocks for space in spaces)
            gpu = engine.gpu
            moved = gpu.copied_out_bytes, gpu.copied_in_bytes
            rows.append(("gpu", gpu.usage(), blocks, *moved, gpu.state))
        blocks = sum(space.host_blocks for space in spaces)
        rows.append(("host", engine.host.usage(), blocks, 0, 0, engine.host.state))
        if engine.disk is not None:
            blocks = sum(space.disk_blocks for space in spaces)
            disk = engine.disk
            moved = disk.read_bytes, disk.written_bytes
            rows.append(("disk", disk.usage(), blocks, *moved, engine.disk_state))
        return [
            {
                "tier": name,
                "capacity_bytes": usage.capacity_bytes,
                "used_bytes": usage.used_bytes,
                "blocks": blocks,
                "hit_blocks": counts.get(f"hit_blocks_{name}", 0),
                "evicted_blocks": counts.get(f"evicted_blocks_{name}", 0),
                "read_bytes": read,
                "written_bytes": written,
                "state": state or "ok",
            }
            for name, usage, blocks, read, written, state in rows
        ]

    def _sample(self) -> dict[str, Any]:
        engine = self._engine
        counts = engine.counters.counts
        usage = UsageCounts()
        for of_space in list(engine.usage.values()):
            usage.add(of_space)
        return {
            "at": round(self._clock() - self._started, 3),
            "tiers": self._tiers(),
            "usage": asdict(usage),
            "misses_blocks": dict(engine.counters.miss_blocks),
            "evictions": {
                "background": counts.get("evictions_background", 0),
                "inline": counts.get("evictions_inline", 0),
                "by_request": counts.get("evicted_by_request", 0),
            },
            "queue": {
                "dirty_blocks": engine.dirty_blocks(),
                "leases": engine.leases.count,
                "granted_slots": engine.grants.slot_count,
            },
        }
