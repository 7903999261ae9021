"""Pins slabs for one GPU, range by range.

While the engine starts nobody waits for the GPU, and the first requests need pinned slabs: ranges are
large (each call costs two turns of Python's lock, which a busy engine gives away every 5 ms) and several
threads pin at once. Once it serves, everybody who launches work waits while a range is being
pinned (11 ms for 256 MiB): one thread pins, and rests as long. That must still be faster than an
engine fills a new pool (5 GB/s), or its blocks go through a small buffer, or are not stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from kvstore.connectors.vllm.guard import failures, log_once
from kvstore.cudart import CudaError

__all__ = ["SlabPins"]

# While the engine starts, and once it serves.
_STARTING_BYTES: Final = 1 << 30
_SERVING_BYTES: Final = 256 << 20
# Of waiting for Python's lock nobody else has anything to rest from.
_BYTES_PER_SECOND: Final = 20e9


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
        self, cuda: _Runtime, device: int, pause: Callable[[float], None] = time.sleep
    ) -> None:
        """Pin nothing yet.

        Args:
            cuda: the runtime.
            device: to pin for.
            pause: waits some seconds.
        """
        self._cuda = cuda
        self._device = device
        self._pause = pause
        self._guard = threading.Lock()
        self._serving = False
        self._turn = threading.Lock()
        self._lengths: dict[int, int] = {}
        self.range_bytes = _STARTING_BYTES
        self.pinned_bytes = 0
        self.failed = 0

    def serving(self) -> None:
        """From now on somebody waits for the GPU."""
        self._serving, self.range_bytes = True, _SERVING_BYTES

    def pin(self, address: int, length: int) -> bool:
        """Pin a range of a slab, then rest if the engine serves; return whether it is pinned."""
        if not self._serving:
            return self._register(address, length)
        with self._turn:
            began = time.monotonic()
            pinned = self._register(address, length)
            self._pause(min(time.monotonic() - began, length / _BYTES_PER_SECOND))
            return pinned

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

    def _register(self, address: int, length: int) -> bool:
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
            return False
        with self._guard:
            self._lengths[address] = length
            self.pinned_bytes += length
        return True

    def unpin(self, address: int) -> None:
        """Unpin a range of a slab that is about to be unmapped."""
        with self._guard:
            self.pinned_bytes -= self._lengths.pop(address, 0)
        try:
            self._enter()
            self._cuda.host_unregister(address)
        except CudaError as error:
            log_once(logging.WARNING, "memory cannot be unpinned: %s", error)
