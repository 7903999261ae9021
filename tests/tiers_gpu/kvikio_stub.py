"""A module in the place of kvikio, which needs a CUDA driver: plain reads, and faults on demand."""

from __future__ import annotations

import ctypes
import enum
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.tiers.io_engine import DeviceBuffer

__all__ = ["KvikioStub", "kvikio_stub"]


class CompatMode(enum.IntEnum):
    OFF = 0
    ON = 1
    AUTO = 2


class _Future:
    def __init__(self, stub: KvikioStub, result: int | BaseException) -> None:
        self.stub = stub
        self.result = result
        stub.under_way += 1

    def get(self) -> int:
        self.stub.under_way -= 1
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class KvikioStub:
    """What tests look at and change.

    Attributes:
        gds: whether transfers would bypass host memory.
        fault: raised by every transfer from now on.
        refuses: raised by those of a file's every second page, which do not begin.
        short: bytes that every transfer lacks.
        settings: what was set.
        transfers: how many there were.
        under_way: those that nobody has waited for.
        open_files: handles that are open.
    """

    def __init__(self, *, gds: bool = True) -> None:
        self.gds = gds
        self.fault: BaseException | None = None
        self.refuses: BaseException | None = None
        self.short = 0
        self.settings: dict[str, Any] = {}
        self.transfers = self.under_way = 0
        self.open_files = 0

    def modules(self) -> dict[str, types.ModuleType]:
        stub = self

        class CuFile:
            def __init__(self, path: str, flags: str) -> None:
                assert flags == "r+"
                try:
                    self.fd = os.open(path, os.O_RDWR)
                except OSError as error:
                    raise RuntimeError(f"cannot open: {os.strerror(error.errno or 0)}") from error
                stub.open_files += 1

            def fileno(self) -> int:
                return self.fd

            def close(self) -> None:
                os.close(self.fd)
                stub.open_files -= 1

            def pread(self, buffer: Any, size: int, offset: int) -> _Future:
                return self._move(buffer, size, offset, os.preadv)

            def pwrite(self, buffer: Any, size: int, offset: int) -> _Future:
                return self._move(buffer, size, offset, os.pwritev)

            def _move(self, buffer: Any, size: int, offset: int, call: Any) -> _Future:
                stub.transfers += 1
                if stub.refuses and offset // 4096 % 2:
                    raise stub.refuses
                if stub.fault is not None:
                    return _Future(stub, stub.fault)
                memory = buffer
                if isinstance(buffer, DeviceBuffer):
                    assert buffer.__cuda_array_interface__["shape"] == (size,)
                    memory = (ctypes.c_uint8 * size).from_address(buffer.address)
                return _Future(stub, call(self.fd, [memory], offset) - stub.short)

        package = types.ModuleType("kvikio")
        package.__path__ = []
        defaults = types.ModuleType("kvikio.defaults")
        driver = types.ModuleType("kvikio.cufile_driver")
        for name, value in {
            "CuFile": CuFile,
            "CompatMode": CompatMode,
            "defaults": defaults,
            "cufile_driver": driver,
        }.items():
            setattr(package, name, value)
        for name, value in {
            "set": self.settings.update,
            "get": lambda _: CompatMode.AUTO,
            "is_compat_mode_preferred": lambda: not self.gds,
        }.items():
            setattr(defaults, name, value)
        driver.get = {"is_gds_available": self.gds}.get  # type: ignore[attr-defined]
        return {m.__name__: m for m in (package, defaults, driver)}


@contextmanager
def kvikio_stub(stub: KvikioStub) -> Iterator[KvikioStub]:
    """Let `import kvikio` find the stub."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("kvikio")}
    sys.modules.update(stub.modules())
    try:
        yield stub
    finally:
        for name in stub.modules():
            del sys.modules[name]
        sys.modules.update(before)
