"""The CUDA runtime through ctypes: what pools, copiers and benchmarks need, and no more.

Loaded on first use, never at import, from wherever this process already has a libcudart (PyTorch
brings one), else from the `nvidia` packages, else from the system. Every call drops the GIL.
Streams and events are plain integers, the same handles that PyTorch and CuPy use.

The current device is the calling thread's: a thread that has set none works on device 0, and its
first call makes a context there. So every thread calls `set_device` before anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVStoreError

__all__ = ["IPC_HANDLE_BYTES", "CudaError", "Cudart", "cudart"]

U64 = NDArray[np.uint64]

IPC_HANDLE_BYTES: Final = 64

_HOST_REGISTER_PORTABLE: Final = 1
_HOST_REGISTER_MAPPED: Final = 2
_STREAM_NON_BLOCKING: Final = 1
_EVENT_BLOCKING_SYNC: Final = 1
_EVENT_DISABLE_TIMING: Final = 2
_IPC_LAZY_PEER_ACCESS: Final = 1
_CAPTURE_RELAXED: Final = 2
_MEMCPY_DEFAULT: Final = 4  # the direction follows from the addresses
_ORDER_STREAM: Final = 1
_OVERLAP_WITH_COMPUTE: Final = 1
_ATTRIBUTE_REGISTERED_ADDRESS_IS_DEVICE_ADDRESS: Final = 91
_UUID_OFFSET: Final = 256  # behind `char name[256]`, in every version of cudaDeviceProp
_PROPERTIES_BYTES: Final = 8192  # more than any version's

_SUCCESS: Final = 0
_NOT_READY: Final = 600
_ALREADY_REGISTERED: Final = 712
# cudaErrorCallRequiresNewerDriver, cudaErrorNotSupported
_CANNOT_BATCH: Final = frozenset((36, 801))

_P: Final = ctypes.c_void_p
_Z: Final = ctypes.c_size_t
_I: Final = ctypes.c_int
_U: Final = ctypes.c_uint
# Declared, or ctypes would pass addresses as 32-bit integers.
_SIGNATURES: Final[dict[str, list[Any]]] = {
    "cudaRuntimeGetVersion": [_P],
    "cudaDriverGetVersion": [_P],
    "cudaGetDeviceCount": [_P],
    "cudaGetDevice": [_P],
    "cudaSetDevice": [_I],
    "cudaGetDeviceProperties": [_P, _I],
    "cudaDeviceGetAttribute": [_P, _I, _I],
    "cudaDeviceSynchronize": [],
    "cudaThreadExchangeStreamCaptureMode": [_P],
    "cudaMemGetInfo": [_P, _P],
    "cudaMalloc": [_P, _Z],
    "cudaFree": [_P],
    "cudaHostAlloc": [_P, _Z, _U],
    "cudaFreeHost": [_P],
    "cudaHostRegister": [_P, _Z, _U],
    "cudaHostUnregister": [_P],
    "cudaMemcpyAsync": [_P, _P, _Z, _I, _P],
    "cudaMemsetAsync": [_P, _I, _Z, _P],
    "cudaStreamCreateWithPriority": [_P, _U, _I],
    "cudaStreamDestroy": [_P],
    "cudaStreamSynchronize": [_P],
    "cudaStreamWaitEvent": [_P, _P, _U],
    "cudaEventCreateWithFlags": [_P, _U],
    "cudaEventDestroy": [_P],
    "cudaEventRecord": [_P, _P],
    "cudaEventQuery": [_P],
    "cudaEventSynchronize": [_P],
    "cudaEventElapsedTime": [_P, _P, _P],
    "cudaIpcGetMemHandle": [_P, _P],
    "cudaIpcCloseMemHandle": [_P],
}


class CudaError(KVStoreError):
    """A call into the CUDA runtime failed, or there is no runtime (code -1).

    Attributes:
        code: cudaError_t.
    """

    def __init__(self, code: int, message: str) -> None:
        """Keep the code."""
        super().__init__(message)
        self.code = code


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    _fields_ = [
        ("order", ctypes.c_int),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    ]


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]


class Cudart:
    """One loaded runtime. Every method may be called from any thread.

    Attributes:
        library: what it calls.
        version: of the runtime, such as 13000.
    """

    def __init__(self, library: Any) -> None:
        """Declare the functions.

        Args:
            library: a `ctypes.CDLL`, or what looks like one.

        Raises:
            CudaError: it lacks a function.
        """
        self.library = library
        try:
            for name, arguments in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes = arguments
                function.restype = ctypes.c_int
            library.cudaIpcOpenMemHandle.argtypes = [_P, _IpcHandle, _U]
            library.cudaIpcOpenMemHandle.restype = ctypes.c_int
            library.cudaGetErrorString.argtypes = [ctypes.c_int]
            library.cudaGetErrorString.restype = ctypes.c_char_p
            library.cudaGetLastError.argtypes = []
            library.cudaGetLastError.restype = ctypes.c_int
        except AttributeError as error:
            raise CudaError(-1, f"this libcudart lacks a function: {error}") from error
        self.version = self._int("cudaRuntimeGetVersion")
        self._batch = getattr(library, "cudaMemcpyBatchAsync", None)
        # CUDA 12.8 wants to say which copy failed; 13 does not.
        self._batch_tells = self.version < 13000
        if self._batch is not None:
            tell = [_P] if self._batch_tells else []
            self._batch.argtypes = [_P, _P, _P, _Z, _P, _P, _Z, *tell, _P]
            self._batch.restype = ctypes.c_int
        self._order = _CopyAttributes(order=_ORDER_STREAM, flags=_OVERLAP_WITH_COMPUTE)
        self._first = ctypes.c_size_t(0)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != _SUCCESS:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> CudaError:
        # Or the next check of somebody else's call (PyTorch's) would find this error.
        self.library.cudaGetLastError()
        text = self.library.cudaGetErrorString(code)
        said = text.decode(errors="replace") if isinstance(text, bytes) else "unknown error"
        return CudaError(code, f"{name}: {said} ({code})")

    def _int(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self._call(name, ctypes.byref(value), *arguments)
        return value.value

    def _handle(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_void_p()
        self._call(name, ctypes.byref(value), *arguments)
        return value.value or 0

    # Devices.

    def driver_version(self) -> int:
        """Return the newest CUDA that the driver knows, such as 13000; 0 without a driver."""
        return self._int("cudaDriverGetVersion")

    def device_count(self) -> int:
        """Return how many devices this process sees."""
        return self._int("cudaGetDeviceCount")

    def device(self) -> int:
        """Return the calling thread's device."""
        return self._int("cudaGetDevice")

    def set_device(self, device: int) -> None:
        """Set the calling thread's device."""
        self._call("cudaSetDevice", device)

    def relax_capture(self) -> None:
        """Let the calling thread take and pin memory while another one captures a CUDA graph.

        Otherwise such a call fails, and with it the other thread's capture.
        """
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    @contextlib.contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Work on a device, then go back to the calling thread's own."""
        before = self.device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def device_uuid(self, device: int) -> str:
        """Return a device's UUID as `nvidia-smi -L` writes it: ``GPU-8-4-4-4-12``."""
        properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
        self._call("cudaGetDeviceProperties", properties, device)
        raw = properties.raw[_UUID_OFFSET : _UUID_OFFSET + 16]
        return f"GPU-{uuid.UUID(bytes=raw)}"

    def device_of(self, device_uuid: str) -> int:
        """Return the device with that UUID.

        Raises:
            CudaError: this process does not see it.
        """
        for device in range(self.device_count()):
            if self.device_uuid(device) == device_uuid:
                return device
        raise CudaError(-1, f"this process does not see device {device_uuid}")

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of the calling thread's device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        """Wait for everything on the calling thread's device."""
        self._call("cudaDeviceSynchronize")

    # Memory.

    def malloc(self, length: int) -> int:
        """Take device memory; return its address."""
        return self._handle("cudaMalloc", length)

    def free(self, address: int) -> None:
        """Give device memory back. Waits for the device."""
        self._call("cudaFree", address)

    def host_alloc(self, length: int) -> int:
        """Take pinned host memory, usable by every device; return its address."""
        return self._handle(
            "cudaHostAlloc", length, _HOST_REGISTER_PORTABLE | _HOST_REGISTER_MAPPED
        )

    def host_free(self, address: int) -> None:
        """Give pinned host memory back."""
        self._call("cudaFreeHost", address)

    def host_register(self, address: int, length: int) -> None:
        """Pin memory that is there already, for every device (50 ms a GiB).

        Raises:
            CudaError: it cannot be pinned, also when it is pinned already.
        """
        self._call(
            "cudaHostRegister", address, length, _HOST_REGISTER_PORTABLE | _HOST_REGISTER_MAPPED
        )

    def host_unregister(self, address: int) -> None:
        """Undo `host_register`; before the memory is unmapped."""
        self._call("cudaHostUnregister", address)

    def already_registered(self, error: CudaError) -> bool:
        """Return whether `host_register` failed because somebody had pinned the memory."""
        return error.code == _ALREADY_REGISTERED

    def kernels_reach_registered(self, device: int) -> bool:
        """Return whether kernels may use pinned memory at its own address."""
        attribute = _ATTRIBUTE_REGISTERED_ADDRESS_IS_DEVICE_ADDRESS
        return bool(self._int("cudaDeviceGetAttribute", attribute, device))

    # Copies. Addresses say what is host and what is device.

    def memcpy_async(self, destination: int, source: int, length: int, stream: int) -> None:
        """Copy in the stream's order. From or to memory that is not pinned, this blocks."""
        self._call("cudaMemcpyAsync", destination, source, length, _MEMCPY_DEFAULT, stream)

    def memset_async(self, address: int, value: int, length: int, stream: int) -> None:
        """Fill device memory with a byte, in the stream's order."""
        self._call("cudaMemsetAsync", address, value, length, stream)

    def memcpy_batch_async(
        self, destinations: U64, sources: U64, lengths: U64, stream: int
    ) -> None:
        """Copy many pieces in the stream's order, in one call where driver and stream allow it.

        Args:
            destinations: addresses, shape (n,); all memory pinned or the device's.
            sources: addresses, shape (n,); no piece overlaps another's destination.
            lengths: bytes, shape (n,), none of them 0.
            stream: not the default one, or copies are submitted one by one.

        Raises:
            CudaError: some pieces may be under way; synchronize the stream before reusing memory.
            ValueError: the arrays differ in length.
        """
        count = len(lengths)
        if len(destinations) != count or len(sources) != count:
            raise ValueError("destinations, sources and lengths differ in number")
        if not count:
            return
        to = np.ascontiguousarray(destinations, np.uint64)
        of = np.ascontiguousarray(sources, np.uint64)
        size = np.ascontiguousarray(lengths, np.uint64)
        batch = self._batch
        if batch is not None and stream and count > 1:
            failed = ctypes.c_size_t()
            tell = [ctypes.byref(failed)] if self._batch_tells else []
            code = batch(
                to.ctypes.data,
                of.ctypes.data,
                size.ctypes.data,
                count,
                ctypes.byref(self._order),
                ctypes.byref(self._first),
                1,
                *tell,
                stream,
            )
            if code == _SUCCESS:
                return
            error = self._error("cudaMemcpyBatchAsync", code)
            if code not in _CANNOT_BATCH:
                raise error
            self._batch = None  # this driver never will
        for destination, source, length in zip(
            to.tolist(), of.tolist(), size.tolist(), strict=True
        ):
            self.memcpy_async(destination, source, length, stream)

    # Streams and events.

    def stream_create(self, priority: int = 0) -> int:
        """Make a stream that does not wait for the default one. Lower numbers go first."""
        return self._handle("cudaStreamCreateWithPriority", _STREAM_NON_BLOCKING, priority)

    def stream_destroy(self, stream: int) -> None:
        """Give a stream up; what is under way on it still ends."""
        self._call("cudaStreamDestroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        """Wait for everything submitted to a stream."""
        self._call("cudaStreamSynchronize", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Let what is submitted to a stream from now on wait for an event, on the device."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def event_create(self, *, timing: bool = False, spin: bool = False) -> int:
        """Make an event.

        Args:
            timing: it has a time.
            spin: waiting for it spins: that hears of it 30 µs sooner, and takes a processor.
        """
        flags = 0 if spin else _EVENT_BLOCKING_SYNC
        flags |= 0 if timing else _EVENT_DISABLE_TIMING
        return self._handle("cudaEventCreateWithFlags", flags)

    def event_destroy(self, event: int) -> None:
        """Give an event up."""
        self._call("cudaEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        """Let an event stand for everything submitted to a stream so far."""
        self._call("cudaEventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        """Return whether what an event stands for is done.

        Raises:
            CudaError: something on the device has failed.
        """
        code = self.library.cudaEventQuery(event)
        if code == _NOT_READY:
            self.library.cudaGetLastError()
            return False
        if code != _SUCCESS:
            raise self._error("cudaEventQuery", code)
        return True

    def event_synchronize(self, event: int) -> None:
        """Wait for what an event stands for."""
        self._call("cudaEventSynchronize", event)

    def event_elapsed_ms(self, begin: int, end: int) -> float:
        """Return the milliseconds between two events that were made with `timing`."""
        value = ctypes.c_float()
        self._call("cudaEventElapsedTime", ctypes.byref(value), begin, end)
        return value.value

    # Memory of other processes.

    def ipc_get(self, address: int) -> bytes:
        """Return the handle of the *allocation* that an address is in.

        An importer gets the allocation's start: what lies inside needs its offset along with it.
        """
        handle = _IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(memoryview(handle).cast("B"))

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation; return the address of its start.

        The calling thread's device must be the one that the memory is on.

        Raises:
            CudaError: the exporter is gone, or is this process.
        """
        if len(handle) != IPC_HANDLE_BYTES:
            raise CudaError(-1, f"an IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_void_p()
        code = self.library.cudaIpcOpenMemHandle(
            ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), _IPC_LAZY_PEER_ACCESS
        )
        if code != _SUCCESS:
            raise self._error("cudaIpcOpenMemHandle", code)
        return address.value or 0

    def ipc_close(self, address: int) -> None:
        """Unmap what `ipc_open` returned; nothing may be copying there any more."""
        self._call("cudaIpcCloseMemHandle", address)


def _loaded() -> Iterator[str]:
    """Yield the libcudart that this process has mapped already."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            _, slash, path = line.partition("/")
            if slash and path.rpartition("/")[2].startswith("libcudart.so"):
                yield "/" + path


def _candidates() -> Iterator[str]:
    yield from _loaded()
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for pattern in ("cu13/lib/libcudart.so.*", "cuda_runtime/lib/libcudart.so.*"):
            yield from map(str, sorted(Path(root).glob(pattern)))
    yield from ("libcudart.so.13", "libcudart.so.12", "libcudart.so")


_guard: Final = threading.Lock()
_found: Cudart | None = None


def cudart() -> Cudart:
    """Return the CUDA runtime of this process, loading it the first time.

    Raises:
        CudaError: there is none, with what was tried.
    """
    global _found
    with _guard:
        if _found is None:
            problems: list[str] = []
            for path in _candidates():
                try:
                    _found = Cudart(ctypes.CDLL(path))
                    break
                except (OSError, CudaError) as error:
                    problems.append(str(error))
            else:
                raise CudaError(-1, f"no usable libcudart: {'; '.join(problems)}")
        return _found
