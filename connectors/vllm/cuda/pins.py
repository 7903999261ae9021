"""Pins slabs for one GPU, range by range."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from kvstore.connectors.vllm.guard import failures, log_once
from kvstore.cudart import CudaError

__all__ = ["SlabPins"]


class _Runtime(Protocol):
    def set_device(self, device: int) -> None: ...

    def host_register(self, address: int, length: int) -> None: ...

    def host_unregister(self, address: int) -> None: ...


class SlabPins:
    """See `kvstore.attach.mapped.Pins`. Failures are counted as ``pin`` among the hooks' failures.

    Attributes:
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
        self.pinned_bytes = 0
        self.failed = 0

    def pin(self, address: int, length: int) -> bool:
        """Pin a range of a slab; return whether it is pinned."""
        try:
            self._cuda.set_device(self._device)
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
