"""CUDA devices: the one module that imports CuPy.

CuPy gives memory, streams and events; batches of copies, pinning and inter-process handles come
from the CUDA runtime itself (`kvstore.cudart`). Both are loaded when a device is asked for, never
at import. Memory is plain `cudaMalloc` memory, not from CuPy's pool: it is exported, and must go
back to the driver at once.

Every thread that copies has a stream of its own and waits on an event that lets it sleep.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvstore.cudart import CudaError, Cudart, cudart
from kvstore.errors import ConfigError
from kvstore.tiers.gpu_device import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["CudaDevice", "cuda_devices"]


def _load() -> tuple[Any, Cudart]:
    """Return CuPy and the CUDA runtime.

    Raises:
        ConfigError: one of them is missing, or there is no driver.
    """
    try:
        import cupy
    except ImportError as error:
        what = str(error).strip().splitlines() or [""]
        raise ConfigError(
            f"gpu_pool: needs CuPy (pip install cupy-cuda13x, or the one for your CUDA): {what[0]}"
        ) from error
    try:
        runtime = cudart()
        if not runtime.driver_version():
            raise ConfigError("gpu_pool: there is no CUDA driver")
        if not runtime.device_count():
            raise ConfigError("gpu_pool: the CUDA driver shows no device")
    except CudaError as error:
        raise ConfigError(f"gpu_pool: CUDA does not work: {error}") from error
    return cupy, runtime


def cuda_devices(chosen: Sequence[str]) -> list[CudaDevice]:
    """Return devices in the order in which they are named.

    Args:
        chosen: numbers as CUDA counts, or UUIDs (with or without ``GPU-``); empty: all.

    Raises:
        ConfigError: CUDA does not work, or there is no such device, or one is named twice.
    """
    cupy, runtime = _load()
    try:
        uuids = [runtime.device_uuid(n) for n in range(runtime.device_count())]
    except CudaError as error:
        raise ConfigError(f"gpu_devices: {error}") from error
    numbers = []
    for name in chosen or map(str, range(len(uuids))):
        by_uuid = [n for n, uuid in enumerate(uuids) if name in (uuid, uuid.removeprefix("GPU-"))]
        number = by_uuid[0] if by_uuid else int(name) if name.isdecimal() else -1
        if not 0 <= number < len(uuids):
            raise ConfigError(
                f"gpu_devices: there is no device {name}; there are "
                + ", ".join(f"{n} ({uuid})" for n, uuid in enumerate(uuids))
            )
        if number in numbers:
            raise ConfigError(f"gpu_devices: names device {number} twice")
        numbers.append(number)
    return [CudaDevice(cupy, runtime, number, uuids[number]) for number in numbers]


class CudaDevice:
    """See `GpuDevice`."""

    def __init__(self, cupy: Any, runtime: Cudart, number: int, uuid: str) -> None:
        """Describe the device; nothing is taken before `open`."""
        self._cupy = cupy
        self._cudart = runtime
        self._number = number
        self.uuid = uuid
        self.address = 0
        self.handle = b""
        self._memory: Any = None
        self._streams = threading.local()
        properties = cupy.cuda.runtime.getDeviceProperties(number)
        self.name = f"GPU {number} ({properties['name'].decode(errors='replace')})"

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device the calling thread's; both libraries' errors become `DeviceError`."""
        try:
            with self._cupy.cuda.Device(self._number):
                yield
        except CudaError as error:
            raise DeviceError(f"{self.name}: {error}") from error
        except (
            self._cupy.cuda.runtime.CUDARuntimeError,
            self._cupy.cuda.memory.OutOfMemoryError,
        ) as error:
            raise DeviceError(f"{self.name}: {' '.join(str(error).split())}") from error

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes."""
        with self._current():
            free, total = self._cupy.cuda.runtime.memGetInfo()
        return int(free), int(total)

    def open(self, length: int) -> None:
        """Take memory; see `GpuDevice.open`."""
        with self._current():
            memory = self._cupy.cuda.Memory(length)
            self.handle = self._cudart.ipc_get(int(memory.ptr))
        self._memory = memory
        self.address = int(memory.ptr)

    def close(self) -> None:
        """Give the memory back; see `GpuDevice.close`."""
        # `cudaFree` in the destructor of CuPy's object: nobody else has a reference.
        self._memory = None
        self.address = 0
        self._streams = threading.local()

    def copy(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
    ) -> None:
        """Copy pieces; see `GpuDevice.copy`."""
        with self._current():
            stream, event = self._stream()
            try:
                self._cudart.memcpy_batch_async(destinations, sources, lengths, stream.ptr)
                event.record(stream)
                event.synchronize()
            except BaseException:
                # Some of the pieces may be under way, and the caller's memory is its own again.
                stream.synchronize()
                raise

    def _stream(self) -> tuple[Any, Any]:
        """Return the calling thread's stream and event."""
        found = getattr(self._streams, "pair", None)
        if found is None:
            cuda = self._cupy.cuda
            found = cuda.Stream(non_blocking=True), cuda.Event(block=True, disable_timing=True)
            self._streams.pair = found
        pair: tuple[Any, Any] = found
        return pair

    def pin(self, address: int, length: int) -> None:
        """Lock host memory; see `GpuDevice.pin`."""
        with self._current():
            self._cudart.host_register(address, length)

    def unpin(self, address: int) -> None:
        """Undo `pin`; see `GpuDevice.unpin`."""
        with self._current():
            self._cudart.host_unregister(address)
