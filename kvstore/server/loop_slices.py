"""How long the event loop is busy between two looks at its sockets.

Whatever a handler does in one go delays everybody else by that much, the health check included.
A slice begins when the selector returns and ends when it is asked again, so it covers every
callback that ran between: nothing can hide from it, and measuring costs two clock readings.

Two timings come of it. `loop_slice` is what others wait for; on a machine whose processors are
shared it counts the time in which the daemon did not run at all. `loop_slice_cpu` is the part
that this daemon is to blame for: processor time of the loop's thread.
"""

from __future__ import annotations

import selectors
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.engine.counters import Counters

__all__ = ["SliceSelector"]


class SliceSelector(selectors.EpollSelector):
    """The loop's selector, which sees every slice begin and end."""

    def __init__(self) -> None:
        """Measure nothing yet: a start may take as long as it takes."""
        super().__init__()
        self._counters: Counters | None = None
        self._woke = self._woke_cpu = 0.0

    def measure(self, counters: Counters) -> None:
        """Record from now on. Called on the loop's thread."""
        self._woke, self._woke_cpu = time.perf_counter(), time.thread_time()
        self._counters = counters

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events as ever; what came before was a slice."""
        if self._counters is None:
            return super().select(timeout)
        self._counters.record("loop_slice", time.perf_counter() - self._woke)
        self._counters.record("loop_slice_cpu", time.thread_time() - self._woke_cpu)
        events = super().select(timeout)
        self._woke, self._woke_cpu = time.perf_counter(), time.thread_time()
        return events
