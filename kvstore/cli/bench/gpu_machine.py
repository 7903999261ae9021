"""The device that `bench gpu` measures on: a CUDA device, or host memory in its place for tests.

Memory is PyTorch tensors of bytes, as an engine's KV cache is. Everything below is what the
machine does without kvstore: plain copies of one large piece, which nothing that copies the same
bytes in blocks can beat.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from kvstore.cli.child import ChildError

__all__ = ["CudaMachine", "HostMachine", "Machine"]

_WARM_UP_BYTES: Final = 1 << 20


class Machine(Protocol):
    """Where the KV cache lies."""

    @property
    def name(self) -> str:
        """What to call it."""

    @property
    def uuid(self) -> str:
        """The device's name for the daemon; empty when it is none."""

    def cache(self, *shape: int) -> Any:
        """Return a tensor of bytes in the device's memory."""

    def host(self, size: int) -> Any:
        """Return a tensor of bytes in host memory that the device copies from at full speed."""

    def random(self, tensor: Any) -> None:
        """Fill with random bytes."""

    def synchronize(self) -> None:
        """Wait for everything begun so far."""

    def copy_seconds(self, *pairs: tuple[Any, Any]) -> float:
        """Copy each (target, source), all at once, and return how long it took."""


class CudaMachine:
    """A CUDA device, through PyTorch."""

    def __init__(self, device: int) -> None:
        """Take a device into use.

        Raises:
            ChildError: there is none, or PyTorch cannot use it.
        """
        try:
            import torch
        except ImportError as error:
            raise ChildError(f"no GPU can be measured: PyTorch is not there ({error})") from error
        if not torch.cuda.is_available():
            raise ChildError("no GPU can be measured: PyTorch finds no CUDA device")
        if not 0 <= device < torch.cuda.device_count():
            raise ChildError(
                f"no GPU can be measured: there is no device {device}, "
                f"only {torch.cuda.device_count()}"
            )
        self._torch = torch
        self._device = torch.device("cuda", device)
        torch.cuda.set_device(self._device)
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)]

    @property
    def name(self) -> str:
        """See `Machine.name`."""
        return str(self._torch.cuda.get_device_name(self._device))

    @property
    def uuid(self) -> str:
        """See `Machine.uuid`."""
        return f"GPU-{self._torch.cuda.get_device_properties(self._device).uuid}"

    def cache(self, *shape: int) -> Any:
        """See `Machine.cache`."""
        return self._torch.zeros(shape, dtype=self._torch.uint8, device=self._device)

    def host(self, size: int) -> Any:
        """See `Machine.host`."""
        return self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)

    def random(self, tensor: Any) -> None:
        """See `Machine.random`."""
        tensor.random_(0, 256)

    def synchronize(self) -> None:
        """See `Machine.synchronize`."""
        self._torch.cuda.synchronize(self._device)

    def copy_seconds(self, *pairs: tuple[Any, Any]) -> float:
        """See `Machine.copy_seconds`; each pair goes on a stream of its own."""
        self.synchronize()
        begin = time.perf_counter()
        for stream, (target, source) in zip(self._streams, pairs, strict=False):
            with self._torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in self._streams:
            stream.synchronize()
        return time.perf_counter() - begin


class HostMachine:
    """Host memory in place of a device: no figure of it means anything, every path is the same."""

    name: Final = "host memory in place of a GPU"
    uuid: Final = ""

    def __init__(self) -> None:
        """Load PyTorch."""
        import torch

        self._torch = torch

    def cache(self, *shape: int) -> Any:
        """See `Machine.cache`."""
        return self._torch.zeros(shape, dtype=self._torch.uint8)

    def host(self, size: int) -> Any:
        """See `Machine.host`."""
        return self._torch.empty(size, dtype=self._torch.uint8)

    def random(self, tensor: Any) -> None:
        """See `Machine.random`."""
        tensor.random_(0, 256)

    def synchronize(self) -> None:
        """See `Machine.synchronize`."""

    def copy_seconds(self, *pairs: tuple[Any, Any]) -> float:
        """See `Machine.copy_seconds`."""
        begin = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        return time.perf_counter() - begin


def timed(call: Callable[[], object]) -> float:
    """Return how long a call took, in seconds."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
