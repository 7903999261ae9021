"""A slab table over files, and device memory that is host memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.attach.held import Held
from kvstore.attach.mapped import DeviceMemory
from kvstore.attach.slabs import SlabTable
from kvstore.connectors.vllm.cuda.pins import SlabPins
from kvstore.connectors.vllm.guard import failures
from kvstore.cudart import CudaError
from kvstore.proto import kvstore_pb2 as pb

SLOT = 4096
SLOTS = 8
KIND = [("group", "<u4"), ("index", "<u4"), ("generation", "<u8")]


class Runtime:
    """Pins what it is asked to, or fails; opens one allocation."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.failing = 0
        # Threads that have taken the device, and may work beside a capture.
        self.used: set[int] = set()
        self.relaxed: set[int] = set()
        self.opened: list[bytes] = []
        self.closed: list[int] = []
        self.allocation = np.arange(16 * SLOT, dtype=np.uint8)

    def set_device(self, device: int) -> None:
        assert device == 3
        self.used.add(threading.get_ident())

    def relax_capture(self) -> None:
        self.relaxed.add(threading.get_ident())

    def check_thread(self) -> None:
        # The engine may be capturing a graph.
        assert threading.get_ident() in self.used & self.relaxed

    def host_register(self, address: int, length: int) -> None:
        if self.failing:
            self.failing -= 1
            raise CudaError(2, "cudaHostRegister: out of memory (2)")
        self.check_thread()
        # It must be there, to the last byte.
        (ctypes.c_uint8 * length).from_address(address)[length - 1]
        self.registered[address] = length

    def host_unregister(self, address: int) -> None:
        self.check_thread()
        length = self.registered.pop(address)
        (ctypes.c_uint8 * length).from_address(address)[length - 1]

    def device_of(self, uuid: str) -> int:
        if uuid != "GPU-a":
            raise CudaError(-1, f"this process does not see device {uuid}")
        return 3

    @contextlib.contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        assert device == 3
        yield
        self.go_back()

    def go_back(self) -> None:
        """To the device that the thread had before."""

    def ipc_open(self, handle: bytes) -> int:
        self.opened.append(handle)
        return int(self.allocation.ctypes.data)

    def ipc_close(self, address: int) -> None:
        self.closed.append(address)


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runtime = Runtime()
        self.acknowledged: list[int] = []
        self.table = SlabTable(
            self.acknowledged.extend,
            DeviceMemory(lambda: self.runtime),  # type: ignore[arg-type, return-value]
        )
        self.pins = SlabPins(self.runtime, 3)

    def host(self, group: int) -> None:
        path = self.directory / f"slab{group}"
        path.write_bytes(bytes(SLOT * (SLOTS + 1)))
        self.table.announce(
            pb.Slab(
                group=group,
                tier=pb.TIER_HOST,
                slot_bytes=SLOT,
                slots=SLOTS,
                data_offset=SLOT,
                length=SLOT * (SLOTS + 1),
                path=str(path),
            )
        )

    def gpu(self, group: int, offset: int, **changes: Any) -> None:
        path = self.directory / f"generations{group}"
        (np.arange(SLOTS, dtype="<u8") + 10).tofile(path)
        cuda: dict[str, Any] = {
            "handle": b"h" * 64,
            "device_uuid": "GPU-a",
            "offset": offset,
            "generations_path": str(path),
            "allocation_bytes": 16 * SLOT,
        }
        self.table.announce(
            pb.Slab(
                group=group,
                tier=pb.TIER_GPU,
                slot_bytes=SLOT,
                slots=4,
                length=4 * SLOT,
                cuda=pb.CudaIpc(**(cuda | changes)),
            )
        )

    def held(self, *slots: tuple[int, int, int]) -> Held:
        return Held(self.table, np.array(list(slots), KIND))

    def reach(self, group: int) -> int:
        with self.held((group, 0, 0)) as held:
            return int(held.places(0)[1][0])


@pytest.fixture(name="world")
def slab_world(tmp_path: Path, until: Callable[..., None]) -> Iterator[World]:
    failures.pop("pin", None)
    world = World(tmp_path)
    yield world
    world.table.end("over", lambda: None)
    # The thread that pins may be at work on one of them.
    until(lambda: not world.runtime.registered)
    failures.pop("pin", None)
