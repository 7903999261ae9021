"""The runtime's calls, against a library that only takes notes."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.cudart import CudaError, Cudart

NOT_SUPPORTED = 801
UUID = uuid.UUID("12345678-9abc-def0-1122-334455667788")


class Function:
    """Takes the arguments that the real one would; ctypes' own checks are not at work here."""

    def __init__(self, library: Library, name: str) -> None:
        self.library, self.name = library, name
        self.argtypes: list[Any] = []
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        assert len(arguments) == len(self.argtypes)
        for argument, kind in zip(arguments, self.argtypes, strict=True):
            if isinstance(argument, int):
                kind(argument)
            else:
                kind.from_param(argument)
        self.library.calls.append((self.name, arguments))
        if self.name == "cudaGetErrorString":
            return b"what went wrong"
        answer = self.library.answers.get(self.name, 0)
        return answer(*arguments) if callable(answer) else answer


class Library:
    def __init__(self, version: int = 13000, without: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, int | Callable[..., int]] = {
            "cudaRuntimeGetVersion": lambda out: self._put(out, version)
        }
        self.without = without
        self.functions: dict[str, Function] = {}

    @staticmethod
    def _put(out: Any, value: int) -> int:
        out._obj.value = value
        return 0

    def __getattr__(self, name: str) -> Function:
        if name == self.without or not name.startswith("cuda"):
            raise AttributeError(name)
        return self.functions.setdefault(name, Function(self, name))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]


def u64(*values: int) -> Any:
    return np.array(values, np.uint64)


def read(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


@pytest.mark.parametrize(("version", "arguments"), [(12090, 9), (13000, 8)])
def test_a_batch_is_one_call(version: int, arguments: int) -> None:
    library = Library(version)
    seen: list[list[int]] = []

    def batch(to: int, of: int, size: int, count: int, *rest: Any) -> int:
        seen.extend(read(array, count) for array in (to, of, size))
        return 0

    library.answers["cudaMemcpyBatchAsync"] = batch
    Cudart(library).memcpy_batch_async(u64(1, 2), u64(3, 4), u64(5, 6), stream=7)
    assert seen == [[1, 2], [3, 4], [5, 6]]
    (call,) = library.named("cudaMemcpyBatchAsync")
    assert len(call) == arguments
    assert call[6] == 1
    assert call[-1] == 7


@pytest.mark.parametrize("cause", ["driver", "runtime", "default stream"])
def test_copies_go_one_by_one_where_they_cannot_be_batched(cause: str) -> None:
    library = Library(without="cudaMemcpyBatchAsync" if cause == "runtime" else "")
    library.answers["cudaMemcpyBatchAsync"] = NOT_SUPPORTED
    stream = 0 if cause == "default stream" else 7
    runtime = Cudart(library)
    for _ in range(2):
        runtime.memcpy_batch_async(u64(1, 2), u64(3, 4), u64(5, 6), stream)
    once = [(1, 3, 5, 4, stream), (2, 4, 6, 4, stream)]
    assert library.named("cudaMemcpyAsync") == once * 2
    # A driver that cannot is not asked again.
    assert len(library.named("cudaMemcpyBatchAsync")) == (cause == "driver")


def test_a_batch_that_fails_is_not_repeated() -> None:
    library = Library()
    library.answers["cudaMemcpyBatchAsync"] = 1
    with pytest.raises(CudaError, match=r"cudaMemcpyBatchAsync: what went wrong \(1\)"):
        Cudart(library).memcpy_batch_async(u64(1, 2), u64(3, 4), u64(5, 6), 7)
    assert not library.named("cudaMemcpyAsync")


def test_an_error_says_what_failed_and_leaves_nothing_behind_for_others() -> None:
    library = Library()
    library.answers["cudaHostRegister"] = 712
    runtime = Cudart(library)
    with pytest.raises(CudaError, match=r"^cudaHostRegister: what went wrong \(712\)$") as caught:
        runtime.host_register(1 << 40, 4096)
    assert runtime.already_registered(caught.value)
    assert library.named("cudaGetLastError")
    # Addresses are longer than an int.
    assert library.named("cudaHostRegister") == [(1 << 40, 4096, 3)]


def test_a_device_is_found_by_its_uuid() -> None:
    library = Library()
    library.answers["cudaGetDeviceCount"] = lambda out: library._put(out, 2)

    def properties(buffer: Any, device: int) -> int:
        ctypes.memmove(ctypes.byref(buffer, 256), UUID.bytes if device else bytes(16), 16)
        return 0

    library.answers["cudaGetDeviceProperties"] = properties
    runtime = Cudart(library)
    assert runtime.device_uuid(1) == f"GPU-{UUID}"
    assert runtime.device_of(f"GPU-{UUID}") == 1
    with pytest.raises(CudaError, match="does not see device GPU-ffff"):
        runtime.device_of("GPU-ffff")


def test_a_handle_travels_whole() -> None:
    library = Library()
    handle = bytes(range(64))

    def get(out: Any, address: int) -> int:
        ctypes.memmove(ctypes.byref(out._obj), handle, 64)
        return 0

    def opened(out: Any, given: Any, flags: int) -> int:
        assert bytes(memoryview(given).cast("B")) == handle
        return library._put(out, 1 << 45)

    library.answers |= {"cudaIpcGetMemHandle": get, "cudaIpcOpenMemHandle": opened}
    runtime = Cudart(library)
    assert runtime.ipc_get(5) == handle
    assert runtime.ipc_open(handle) == 1 << 45
    with pytest.raises(CudaError, match="64 bytes, not 3"):
        runtime.ipc_open(b"abc")


def test_an_event_is_asked_without_waiting() -> None:
    library = Library()
    runtime = Cudart(library)
    library.answers["cudaEventQuery"] = 600
    assert not runtime.event_query(3)
    library.answers["cudaEventQuery"] = 0
    assert runtime.event_query(3)
    library.answers["cudaEventQuery"] = 700
    with pytest.raises(CudaError, match="cudaEventQuery"):
        runtime.event_query(3)


def test_a_thread_gets_its_own_device_back() -> None:
    library = Library()
    library.answers["cudaGetDevice"] = lambda out: library._put(out, 3)
    runtime = Cudart(library)
    with pytest.raises(ZeroDivisionError), runtime.on_device(1):
        raise ZeroDivisionError
    assert library.named("cudaSetDevice") == [(1,), (3,)]


def test_a_runtime_without_a_function_is_refused() -> None:
    with pytest.raises(CudaError, match="cudaIpcGetMemHandle"):
        Cudart(Library(without="cudaIpcGetMemHandle"))
