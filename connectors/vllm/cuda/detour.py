"""The way of copies that the engine's thread cannot submit without waiting.

Slots that are not pinned (yet) go through a bounce buffer, which takes copies by the CPU; slots that are
not mapped yet must be mapped first. A thread per direction does that and submits. What it has not
begun with can be given up at once, and a store under way between two chunks: the engine hands
blocks to new owners and does not wait for the CPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final

from kvstore.connectors.vllm.copier import Lane
from kvstore.connectors.vllm.cuda.flight import Flight, submit
from kvstore.connectors.vllm.cuda.pipe import GivenUp, Pipe
from kvstore.connectors.vllm.cuda.routes import Job
from kvstore.connectors.vllm.guard import tell_failed

__all__ = ["Detour"]

# Stores that may be on it, at a time; one alone may be larger. It takes a second: blocks that have
# new owners by then are not stored.
_MOST_BYTES: Final = 4 << 30


class Detour:
    """A thread and a pipe per direction. Every method returns at once, but for `synchronize`."""

    def __init__(
        self,
        make_pipe: Callable[[bool], Pipe],
        begin: Callable[[], None],
        wait: Callable[[int], None],
    ) -> None:
        """Take buffers, of both pipes or of none; start the threads.

        Args:
            make_pipe: makes one that bounces; told whether it leads to the KV cache.
            begin: called on each thread first.
            wait: waits for an event.
        """
        ways = (True, False)
        self._pipes: Final = dict[bool, Pipe]()
        with contextlib.ExitStack() as taken:
            for to_cache in ways:
                self._pipes[to_cache] = make_pipe(to_cache)
                taken.callback(self._pipes[to_cache].close)
            self._taken = taken.pop_all()
        self.lanes: Final = {to_cache: Lane("kvstore-bounce", begin) for to_cache in ways}
        self._wait = wait
        self._guard = threading.Lock()
        self.stored_bytes = 0

    def admit(self, flight: Flight, length: int) -> bool:
        """Return whether one more store of some bytes may take it, until `left`."""
        with self._guard:
            if self.stored_bytes and self.stored_bytes + length > _MOST_BYTES:
                return False
            flight.length = length
            self.stored_bytes += length
            return True

    def left(self, flight: Flight) -> None:
        """Say that a store is over, whether or not it was admitted here."""
        with self._guard:
            self.stored_bytes -= flight.length

    def submit(self, flight: Flight, make_job: Callable[[], Job], *, to_cache: bool) -> None:
        """Submit a copy on the direction's thread, after those before it.

        Args:
            flight: the copy.
            make_job: called there; may wait until slots are mapped.
            to_cache: which way.
        """

        def work() -> None:
            try:
                job = None if flight.given_up else make_job()
                if job is not None and not to_cache:
                    # Its first chunk would wait for it, and so would an engine that wants the blocks.
                    self._wait(flight.begun)
                with self._guard:
                    flight.begun_by_cpu = job is not None and not flight.given_up
                if job is not None and flight.begun_by_cpu:
                    submit(self._pipes[to_cache], flight, job, to_cache=to_cache)
            except GivenUp:
                pass
            except Exception as error:  # noqa: BLE001 - the thread's boundary: fail this copy
                tell_failed("copy", error)
            finally:
                # Whatever has been submitted of it, it is not whole.
                flight.failed = not flight.submitted.is_set()
                flight.submitted.set()

        self.lanes[to_cache].submit(work)

    def give_up(self, flight: Flight) -> bool:
        """Give a copy up that is not submitted yet; return whether it has begun nevertheless."""
        with self._guard:
            flight.given_up = True
            return flight.begun_by_cpu

    def synchronize(self, *ways: bool) -> None:
        """Wait until nothing is under way, to the KV cache (True) or from it (False)."""
        with contextlib.ExitStack() as each:
            for to_cache in ways:
                each.callback(self._pipes[to_cache].synchronize)

    def end(self) -> None:
        """Submit what there is, then stop the threads."""
        for lane in self.lanes.values():
            lane.close()

    def close(self) -> None:
        """Wait for the GPU, then give everything back; the threads have ended."""
        self._taken.close()
