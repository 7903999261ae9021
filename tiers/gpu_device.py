"""What the GPU tier needs of a device: memory that other processes can open, and copies.

There are two: `cuda_device` (CuPy and the CUDA runtime) and `simulated_device`, shared memory that
stands in for a device's, so that everything but the DMA runs on any machine.

Threads: `open` and `close` are called once, by whoever owns the device. `copy`, `pin` and `unpin`
may be called from any thread, block it, and do not hold the GIL meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["HANDLE_BYTES", "DeviceError", "GpuDevice"]

# Of an inter-process handle (cudaIpcMemHandle_t).
HANDLE_BYTES: Final = 64


class DeviceError(OSError):
    """The device, or its driver, refused or failed; one line says what."""


class GpuDevice(Protocol):
    """One device, with at most one allocation on it.

    Attributes:
        uuid: ``GPU-8-4-4-4-12``.
        name: for people.
        address: of the allocation; 0 before `open`.
        handle: by which other processes open the allocation; empty before `open`.
    """

    uuid: str
    name: str
    address: int
    handle: bytes

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes.

        Raises:
            DeviceError: it does not answer.
        """

    def open(self, length: int) -> None:
        """Take `length` bytes.

        Raises:
            DeviceError: they are not there; nothing was taken.
        """

    def close(self) -> None:
        """Give the memory back; nothing is under way any more. Idempotent."""

    def copy(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
    ) -> None:
        """Copy pieces between this device and the host, or within the device.

        Returns, or raises, when nothing of it is under way any more.

        Args:
            destinations: addresses, shape (n,).
            sources: addresses, shape (n,).
            lengths: bytes, none of them 0, shape (n,).

        Raises:
            DeviceError: some of the bytes are not there.
        """

    def pin(self, address: int, length: int) -> None:
        """Lock host memory, for the speed of copies, until `unpin`.

        Raises:
            DeviceError: it cannot be; copies from and to it work all the same.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory is unmapped.

        Raises:
            DeviceError: it is not pinned.
        """
