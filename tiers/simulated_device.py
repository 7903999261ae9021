"""A device without a GPU: shared memory in the place of device memory, memcpy in that of DMA.

For tests, and for trying the GPU tier's logic on any machine. Its handle is the text
``simulated:/proc/PID/fd/N``, padded with zeros: another process of the same user opens the memory
by that path, for as long as this process lives; what it has mapped stays valid afterwards, as with
CUDA.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kvstore.memory import Mapping, copy_batch
from kvstore.tiers.gpu_device import HANDLE_BYTES, DeviceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["SimulatedDevice"]

_PREFIX: Final = "simulated:"


class SimulatedDevice:
    """See `GpuDevice`.

    Attributes:
        pinned: address → length of the memory that is pinned.
    """

    def __init__(self, ordinal: int = 0, total_bytes: int = 1 << 30) -> None:
        """Describe the device.

        Args:
            ordinal: makes the UUID.
            total_bytes: what it seems to have; nothing is taken before `open`.
        """
        self.uuid = f"GPU-00000000-0000-0000-0000-{ordinal:012x}"
        self.name = f"simulated {ordinal}"
        self.address = 0
        self.handle = b""
        self.pinned: dict[int, int] = {}
        self._total_bytes = total_bytes
        self._taken_bytes = 0
        self._mapping: Mapping | None = None
        self._fd = -1

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes."""
        return self._total_bytes - self._taken_bytes, self._total_bytes

    def open(self, length: int) -> None:
        """Take memory.

        Raises:
            DeviceError: it seems to be short.
        """
        if length > self._total_bytes:
            raise DeviceError(f"out of memory ({length} bytes)")
        self._fd = os.memfd_create(f"kvstore-{self.name}", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, length)
        self._mapping = Mapping(self._fd, length)
        self._taken_bytes = length
        self.address = self._mapping.address
        path = f"{_PREFIX}/proc/{os.getpid()}/fd/{self._fd}"
        self.handle = path.encode().ljust(HANDLE_BYTES, b"\0")

    def close(self) -> None:
        """Give the memory back."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()
            os.close(self._fd)
            self._taken_bytes = self.address = 0

    def copy(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
    ) -> None:
        """Copy pieces."""
        if self._mapping is None:
            raise DeviceError("the device is closed")
        copy_batch(destinations, sources, lengths)

    def pin(self, address: int, length: int) -> None:
        """Note that memory is pinned."""
        if address in self.pinned:
            raise DeviceError("is pinned already")
        self.pinned[address] = length

    def unpin(self, address: int) -> None:
        """Note that memory is not pinned any more."""
        if self.pinned.pop(address, None) is None:
            raise DeviceError("is not pinned")
