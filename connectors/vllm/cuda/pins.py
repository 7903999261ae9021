"""Pins slabs for one GPU, range by range.

While a range is being pinned the driver holds a lock that everybody needs who launches work on the GPU.
How long that is, is not in our hands: 12 ms for 256 MiB as a rule, and more than 100 on a machine whose
kernel is busy making memory. So:

* While the engine starts nobody waits for the GPU, and the first requests need pinned slabs: ranges are
  large (each call costs two turns of Python's lock, which a busy engine gives away every 5 ms) and several
  threads pin at once. The engine says that it is ready when that is over, or when it has waited long
  enough; no large range is under way then (`settled`).
* Once it serves, one thread pins, in ranges that take a few milliseconds: smaller ones when they take
  longer. After each it rests twice as long as the call took, however long that was, so that
  whoever launches all the time loses a third of the time at worst; launches run ahead of the GPU,
  so usually that is not seen at all. Longer rests would be dearer: at 64 MiB in 3 ms this is 7 GB/s, and
  an engine fills a new pool with 5; what is not pinned by then goes through a small buffer, or
  is not stored. When the last step has been over for a second the engine is idle, and there is nothing
  to rest for. (A step that is under way may itself wait for the driver: it is no sign of idleness.)
* No range is begun while the engine's own thread submits copies.

Unpinning holds the same lock for as long. All slabs go when the daemon does, beside an engine that goes on
serving: so ranges are unpinned one by one by the same rules. An engine that leaves serves nobody,
and rests no more (`hurry`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from kvstore.connectors.vllm.guard import failures, log_once
from kvstore.cudart import CudaError

__all__ = ["SlabPins"]

# An engine that starts beside a daemon with a full pool is asked for it seconds later.
_STARTING_THREADS: Final = 4
# Not more: unpinning one, should its slab be given up later, holds the same lock.
_STARTING_BYTES: Final = 256 << 20
_SERVING_BYTES: Final = 64 << 20
# A call of a range that takes longer than this is followed by smaller ones. A few milliseconds may be
# Python's lock, which another thread has.
_LONG_SECONDS: Final = 0.02
# Rests, in times of what the call took.
_REST: Final = 2.0
# Whose last step has been over so long is idle.
_IDLE_SECONDS: Final = 1.0


class _Runtime(Protocol):
    def set_device(self, device: int) -> None: ...

    def relax_capture(self) -> None: ...

    def host_register(self, address: int, length: int) -> None: ...

    def host_unregister(self, address: int) -> None: ...


class SlabPins:
    """See `kvstore.attach.mapped.Pins`. Failures are counted as ``pin`` among the hooks' failures.

    Attributes:
        range_bytes: how much to pin in one call; less once the engine serves.
        pinned_bytes: now.
        failed: ranges that could not be pinned; copies from and to them, and what follows them in
            their slab, go through a buffer.
    """

    def __init__(
        self,
        cuda: _Runtime,
        device: int,
        pause: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Pin nothing yet.

        Args:
            cuda: the runtime.
            device: to pin for.
            pause: waits some seconds; None: until `hurry` at most.
            clock: seconds.
        """
        self._leaving = threading.Event()
        self._cuda = cuda
        self._device = device
        self._pause = pause or self._leaving.wait
        self._clock = clock
        self._changed = threading.Condition()
        self._serving = False
        # Ranges under way that were begun while the engine started.
        self._large = 0
        # Calls of the engine's thread that are submitting copies.
        self._submitting = 0
        self._stepping = False
        self._used_at = clock()
        # Held while a range is pinned and rested from.
        self._turn = threading.Lock()
        self._lengths: dict[int, int] = {}
        self.range_bytes = _STARTING_BYTES
        self.pinned_bytes = 0
        self.failed = 0

    def threads(self) -> int:
        """Return how many threads may pin now."""
        return 1 if self._serving else _STARTING_THREADS

    def serving(self) -> None:
        """From now on somebody waits for the GPU. Idempotent; never waits."""
        self._used_at = self._clock()
        if not self._serving:
            with self._changed:
                self._serving, self.range_bytes = True, _SERVING_BYTES

    def settled(self, timeout_s: float) -> bool:
        """Wait until no range is under way that was begun before `serving`; return whether so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._large, timeout_s)

    def step(self, *, under_way: bool) -> None:
        """Say that the engine begins a step, or has ended it. Never waits."""
        self._used_at = self._clock()
        self._stepping = under_way

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """Let no range begin while the engine's thread is in here. It never waits."""
        with self._changed:
            self._submitting += 1
        try:
            yield
        finally:
            with self._changed:
                self._submitting -= 1
                self._changed.notify_all()

    def pin(self, address: int, length: int, step: int) -> int:
        """Pin a range of a slab, then rest if the engine serves; return how much is pinned."""
        with self._changed:
            starting = not self._serving
            self._large += starting
        if starting:
            try:
                return self._register(address, length)
            finally:
                with self._changed:
                    self._large -= 1
                    self._changed.notify_all()
        with self._paced():
            # It may have been asked for while the engine started.
            length = min(length, max(1, self.range_bytes // step) * step)
            began = self._clock()
            pinned = self._register(address, length)
            self._adapt(self._clock() - began, step)
            return pinned

    @contextlib.contextmanager
    def _paced(self) -> Iterator[None]:
        """Make one call of the driver that holds up who launches work, then rest from it."""
        with self._turn:
            with self._changed:
                self._changed.wait_for(lambda: not self._submitting)
            began = self._clock()
            yield
            took = self._clock() - began
            busy = self._stepping or began - self._used_at < _IDLE_SECONDS
            if busy and not self._leaving.is_set():
                self._pause(_REST * took)

    def _adapt(self, took: float, step: int) -> None:
        if took > _LONG_SECONDS:
            self.range_bytes = max(step, self.range_bytes // 2)
        elif took < _LONG_SECONDS / 4:
            self.range_bytes = min(_SERVING_BYTES, 2 * self.range_bytes)

    def use_device(self) -> None:
        """Let the calling thread work for the GPU, also while the engine captures a graph."""
        try:
            self._enter()
        except CudaError as error:
            # What the thread does next says what is wrong.
            log_once(logging.DEBUG, "a thread cannot use the GPU: %s", error)

    def _enter(self) -> None:
        self._cuda.set_device(self._device)
        self._cuda.relax_capture()

    def _register(self, address: int, length: int) -> int:
        try:
            self._enter()
            self._cuda.host_register(address, length)
        except CudaError as error:
            failures["pin"] += 1
            self.failed += 1
            log_once(
                logging.WARNING,
                "memory cannot be pinned (%s): copies go through a small buffer, more slowly; the"
                " limit of locked memory (ulimit -l) may be too low",
                error,
            )
            return 0
        with self._changed:
            self._lengths[address] = length
            self.pinned_bytes += length
        return length

    def unpin(self, address: int) -> None:
        """Unpin a range of a slab that is about to be unmapped, then rest if the engine serves."""
        with self._paced() if self._serving else contextlib.nullcontext():
            try:
                self._enter()
                self._cuda.host_unregister(address)
            except CudaError as error:
                log_once(logging.WARNING, "memory cannot be unpinned: %s", error)
            with self._changed:
                self.pinned_bytes -= self._lengths.pop(address, 0)

    def hurry(self) -> None:
        """Rest no more: the engine leaves. Idempotent; wakes who rests."""
        self._leaving.set()
