"""The kvikio engine: with a stub that needs no CUDA, and, where there is a GPU, the real one."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvikio_stub import KvikioStub, kvikio_stub

from kvstore.errors import TierUnavailable
from kvstore.tiers.base import Slot, Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.io_engine import REPLACED, SHORT, DeviceBuffer, IoFile, IoRequest
from kvstore.tiers.kvikio_engine import KvikioEngine
from kvstore.tiers.simulated_device import SimulatedDevice
from kvstore.tiers.testing import PersistentTierConformance


@pytest.fixture
def stub() -> Iterator[KvikioStub]:
    with kvikio_stub(KvikioStub()) as stub:
        yield stub


class TestDiskTierOverKvikio(PersistentTierConformance):
    """An engine for device memory takes host memory, too, so the disk tier's contract tries it."""

    @pytest.fixture(autouse=True)
    def kvikio(self, stub: KvikioStub) -> None:
        self.stub = stub

    def make(self, directory: Path, capacity_bytes: int) -> Tier:
        self.directory = directory
        return DiskTier(directory, capacity_bytes, engine=KvikioEngine(2))

    def corrupt(self, tier: Any, slot: Slot, shard: int, offset: int) -> None:
        block = self.shape.slot_bytes * self.shape.shards
        position = 4096 + slot.index * block + shard * self.shape.slot_bytes + offset
        with (self.directory / f"seg-{slot.group:06d}.kvs").open("r+b") as file:
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 0x01]))


@pytest.mark.gpu
class TestDiskTierOverRealKvikio(TestDiskTierOverKvikio):
    @pytest.fixture(autouse=True)
    def kvikio(self) -> None:
        try:
            __import__("kvikio")
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"kvikio does not work here: {error}")


def on_file(path: Path, size: int) -> IoFile:
    path.write_bytes(os.urandom(size))
    status = path.stat()
    return IoFile(str(path), status.st_dev, status.st_ino)


def test_bytes_land_in_device_memory(stub: KvikioStub, tmp_path: Path) -> None:
    file = on_file(tmp_path / "file", 16384)
    device = SimulatedDevice()
    device.open(1 << 20)
    landed: list[int] = []

    async def story() -> list[int]:
        engine = KvikioEngine(3, task_bytes=1 << 20)
        await engine.open()
        assert stub.settings == {
            "num_threads": 3,
            "task_size": 1 << 20,
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
        }
        assert engine.name == "cufile-gds"
        pieces = [DeviceBuffer(device.address + at, 4096) for at in (65536, 0)]
        request = IoRequest(file, 4096, tuple(pieces))
        errors = await engine.read([request], landed.append)
        assert stub.open_files == 1
        await engine.close()
        return errors

    assert asyncio.run(story()) == [0]
    assert landed == [0]
    got = np.empty(8192, np.uint8)
    to = np.array([got.ctypes.data, got.ctypes.data + 4096], np.uint64)
    of = np.array([device.address + 65536, device.address], np.uint64)
    device.copy(to, of, np.array([4096, 4096], np.uint64))
    assert got.tobytes() == (tmp_path / "file").read_bytes()[4096:12288]
    assert stub.open_files == 0
    device.close()


def test_the_mode_is_what_the_library_says(stub: KvikioStub) -> None:
    async def name() -> str:
        engine = KvikioEngine()
        await engine.open()
        await engine.close()
        return engine.name

    assert asyncio.run(name()) == "cufile-gds"
    with kvikio_stub(KvikioStub(gds=False)):
        assert asyncio.run(name()) == "cufile-compat"


@pytest.mark.parametrize(
    ("fault", "short", "number"),
    [
        (RuntimeError("cuFile error at: cannot read"), 0, errno.EIO),
        (RuntimeError("POSIX error on pread at: file.cpp (errno 28)"), 0, errno.ENOSPC),
        (None, 1, SHORT),
    ],
)
def test_faults_are_numbers_and_stay_with_their_requests(
    stub: KvikioStub, tmp_path: Path, fault: BaseException | None, short: int, number: int
) -> None:
    file = on_file(tmp_path / "file", 8192)
    buffers = tuple(memoryview(bytearray(4096)) for _ in range(2))

    async def story() -> list[list[int]]:
        engine = KvikioEngine()
        await engine.open()
        stub.fault, stub.short = fault, short
        first = await engine.read([IoRequest(file, 0, buffers)])
        stub.fault, stub.short = None, 0
        second = await engine.read(
            [
                IoRequest(file, 0, buffers),
                IoRequest(file._replace(inode=file.inode + 1), 0, buffers),
                IoRequest(file._replace(path=str(tmp_path / "gone")), 0, buffers),
            ]
        )
        await engine.close()
        return [first, second]

    assert asyncio.run(story()) == [[number], [0, REPLACED, errno.ENOENT]]


@pytest.mark.parametrize(
    "fault",
    [
        RuntimeError("cuFile error"),
        OSError(errno.EIO, "a device"),
        MemoryError(),
        IndexError("out of range"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_what_has_begun_is_waited_for_whatever_the_library_raises(
    stub: KvikioStub, tmp_path: Path, fault: Exception, begun: bool
) -> None:
    """Its memory is somebody else's afterwards."""
    file = on_file(tmp_path / "file", 16384)
    device = SimulatedDevice()
    device.open(1 << 20)

    async def story() -> list[int]:
        engine = KvikioEngine(1)
        await engine.open()
        if begun:
            stub.fault = fault
        else:
            stub.refuses = fault
        pair = (DeviceBuffer(device.address, 4096), DeviceBuffer(device.address + 8192, 4096))
        try:
            return await engine.read([IoRequest(file, 0, pair)] * 2)
        finally:
            await engine.close()

    assert asyncio.run(story()) == [errno.EIO] * 2
    assert stub.transfers == 4
    assert not stub.under_way
    device.close()


def test_without_the_library_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)

    async def story() -> None:
        engine = KvikioEngine()
        with pytest.raises(TierUnavailable, match=r"^gpu tier: kvikio does not work: .+") as raised:
            await engine.open()
        assert "\n" not in str(raised.value)
        await engine.close()

    asyncio.run(story())
