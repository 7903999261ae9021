"""Fills the page tables of announced slabs, in the background.

The daemon's pages are there; this process's page tables are not. A copy that meets an unmapped
page takes a fault for every 4 KiB: 128 MiB took 22 ms instead of 8 to write. Filling a slab's
tables at once takes less than those faults, and no copy waits for it.

That is worth nothing to whoever copies nothing, and costs more than it saves while all processors
compute: a thread of an engine that loses its processor for a few milliseconds makes all the others
wait for it. So `Rest` says when to work, and work is done in small pieces: between them a
slab may be unmapped, and who begins to compute waits for nobody.

Where filling means pinning for a GPU, whoever pins knows what that costs: it rests by itself, and says
how many threads may work (`pace`). That number may fall while they work: those that are too
many end the piece that they have begun, and begin no other one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Final

from kvstore.units import GIB

__all__ = ["Prefaulter", "Rest"]

# Page tables cost 2 MiB a GiB, and a start should not burn seconds of CPU for a pool of which
# little will be used: beyond this, slabs are filled once they are used.
_EAGER_BYTES: Final = 8 * GIB
# Share of the time that the thread works: it competes with the engine's start.
_DUTY: Final = 0.5
# Between two steps of an engine there is no time for anything else.
_LULL_SECONDS: Final = 0.02


class Rest:
    """Whether background work rests, because this process computes or needs none of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Let it work."""
        self._clock = clock
        self._changed = threading.Condition()
        self._resting = False
        self._until = 0.0

    def set(self, resting: bool) -> None:
        """Begin to rest, or end it; work goes on a moment later. Any thread."""
        if resting == self._resting:
            return
        with self._changed:
            self._resting = resting
            self._until = self._clock() + _LULL_SECONDS
            self._changed.notify_all()

    def wake(self) -> None:
        """Let those who wait look at their `ended` again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, ended: Callable[[], bool]) -> None:
        """Return when there may be work, or when `ended`."""
        with self._changed:
            while not ended():
                left = self._until - self._clock()
                if self._resting:
                    self._changed.wait()
                elif left > 0:
                    self._changed.wait(left)
                else:
                    return


def _one() -> int:
    return 1


class Prefaulter:
    """A thread that fills slabs one by one; several where somebody waits for them."""

    def __init__(self, fill: Callable[[int, int, int], int], rest: Rest | None = None) -> None:
        """Start nothing yet.

        Args:
            fill: maps one slab (group, shard) and fills a piece of it, from an offset on; blocks,
                without the GIL. Returns the offset of the next piece; 0 when there is none, or
                the slab is gone.
            rest: says when to work; None: always.
        """
        self._fill = fill
        self._rest = rest or Rest()
        self._waiting: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._seen: set[tuple[int, int]] = set()
        self._bytes = 0
        self._ended = False
        self._running = 0
        self._changed = threading.Condition()
        self._open = 0
        # Threads that are at a piece, of so many that may be.
        self._working = 0
        self._threads: Callable[[], int] = _one
        self._duty = _DUTY

    def pace(self, threads: Callable[[], int]) -> None:
        """Let filling rest by itself from now on.

        Args:
            threads: asked before each piece: how many threads may work. Must not wait.
        """
        with self._changed:
            self._threads, self._duty = threads, 1.0
            self._changed.notify_all()

    def announced(self, group: int, shard: int, length: int) -> None:
        """Fill a new slab unless much is filled already. The caller serialises calls."""
        if self._bytes + length <= _EAGER_BYTES:
            self.used(group, shard, length)

    def used(self, group: int, shard: int, length: int) -> None:
        """Fill a slab that a copy needs. The caller serialises calls."""
        if (group, shard) in self._seen or self._ended:
            return
        self._bytes += length
        with self._changed:
            self._seen.add((group, shard))
            self._open += 1
            self._changed.notify_all()
        self._waiting.put((group, shard))
        if self._running < min(self._threads(), len(self._seen)):
            self._running += 1
            threading.Thread(target=self._run, name="kvstore-prefault", daemon=True).start()

    def again(self, group: int, shard: int, length: int) -> None:
        """Fill a slab, also one that was filled before. The caller serialises calls."""
        if (group, shard) in self._seen:
            with self._changed:
                self._seen.discard((group, shard))
            self._bytes -= length
        self.used(group, shard, length)

    def end(self) -> None:
        """Fill nothing more. Idempotent."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for _ in range(self._running):
            self._waiting.put(None)
        self._rest.wake()

    def wait(self, timeout_s: float, groups: Collection[int] = ()) -> bool:
        """Wait until nothing is left to fill; return whether that is so. Any thread.

        Args:
            timeout_s: at most.
            groups: of which slabs must have been there to be filled.
        """
        wanted = set(groups)

        def filled() -> bool:
            return not self._open and wanted <= {group for group, _ in self._seen}

        with self._changed:
            return self._changed.wait_for(lambda: self._ended or filled(), timeout_s)

    def _run(self) -> None:
        while (place := self._waiting.get()) is not None and not self._ended:
            self._fill_all(*place)
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _fill_all(self, group: int, shard: int) -> None:
        """Fill a slab piece by piece, when there is time for it."""
        at = 0
        while True:
            self._rest.wait(lambda: self._ended)
            if not self._begin():
                return
            began = time.monotonic()
            try:
                at = self._fill(group, shard, at)
            finally:
                self._end()
            if not at:
                return
            time.sleep((time.monotonic() - began) * (1 / self._duty - 1))

    def _begin(self) -> bool:
        """Wait until one more thread may work; return False when nothing is to be done any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._working < self._threads())
            self._working += not self._ended
            return not self._ended

    def _end(self) -> None:
        with self._changed:
            self._working -= 1
            self._changed.notify_all()
