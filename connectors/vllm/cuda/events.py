"""Events that are used again: making one costs the GPU's driver more than recording it."""

from __future__ import annotations

import contextlib
import queue
from typing import Protocol

__all__ = ["Events"]


class _Runtime(Protocol):
    def event_create(self, *, timing: bool = False, spin: bool = False) -> int: ...

    def event_destroy(self, event: int) -> None: ...

    def event_record(self, event: int, stream: int) -> None: ...


class Events:
    """Events of one kind; any thread."""

    def __init__(self, cuda: _Runtime, *, spin: bool = False) -> None:
        """Make none yet.

        Args:
            cuda: the runtime.
            spin: who waits for one does not sleep.
        """
        self._cuda = cuda
        self._spin = spin
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()

    def take(self) -> int:
        """Return an event that nobody else has."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return self._cuda.event_create(spin=self._spin)

    def recorded(self, stream: int) -> int:
        """Return one that stands for everything submitted to a stream so far."""
        event = self.take()
        try:
            self._cuda.event_record(event, stream)
        except BaseException:
            self.give(event)
            raise
        return event

    def give(self, event: int) -> None:
        """Give one back, which may still be waited for by streams, but not by threads."""
        self._free.put(event)

    def close(self) -> None:
        """Destroy those that were given back."""
        with contextlib.ExitStack() as each:
            while not self._free.empty():
                each.callback(self._cuda.event_destroy, self._free.get())
