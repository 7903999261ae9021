"""Pins slabs for one GPU, range by range."""

from __future__ import annotations

import logging
import threading
from typing import Final, Protocol

from kvstore.connectors.vllm.guard import failures, log_once
from kvstore.cudart import CudaError

__all__ = ["SlabPins"]

# While the engine starts, and once it serves.
_STARTING_DUTY: Final = 0.7
_SERVING_DUTY: Final = 0.5


class _Runtime(Protocol):
    def set_device(self, device: int) -> None: ...

    def relax_capture(self) -> None: ...

    def host_register(self, address: int, length: int) -> None: ...

    def host_unregister(self, address: int) -> None: ...


class SlabPins:
    """See `kvstore.attach.mapped.Pins`. Failures are counted as ``pin`` among the hooks' failures.

    Attributes:
        duty: share of the time that pinning may take; less once the engine serves.
        pinned_bytes: now.
        failed: ranges that could not be pinned; copies from and to them, and what follows them in
            their slab, go through a buffer.
    """

    def __init__(self, cuda: _Runtime, device: int) -> None:
        """Pin nothing yet."""
        self._cuda = cuda
        self._device = device
        self._guard = threading.Lock()
        self._lengths: dict[int, int] = {}
        self.duty = _STARTING_DUTY
        self.pinned_bytes = 0
        self.failed = 0

    def serving(self) -> None:
        """From now on somebody waits for the GPU."""
        self.duty = _SERVING_DUTY

    def pin(self, address: int, length: int) -> bool:
        """Pin a range of a slab; return whether it is pinned."""
        try:
            self._cuda.set_device(self._device)
            self._cuda.relax_capture()
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
            self._cuda.set_device(self._device)
            self._cuda.host_unregister(address)
        except CudaError as error:
            log_once(logging.WARNING, "memory cannot be unpinned: %s", error)
