"""One slab in this process: shared memory, or device memory of the daemon.

Shared memory may be *pinned* for a GPU, by whoever has one (`Pins`): then the GPU copies from and to
it at the bus's speed, without anybody waiting. Pinning holds up everybody else who launches work on
the GPU, so slots are pinned range by range, as large as whoever pins wants them. No copy may then
cross from one such range to the next. Device memory is opened through CUDA IPC, one allocation once, however many slabs lie in it.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.cudart import CudaError, Cudart, cudart
from kvstore.memory import Mapping
from kvstore.proto import kvstore_pb2 as pb
from kvstore.units import MIB, PAGE_BYTES
from kvstore.wire import tier_name

__all__ = ["DEVICE", "PAGEABLE", "PINNED", "DeviceMemory", "MappedSlab", "Pins", "map_slab"]

# How a GPU gets at a slot.
PAGEABLE: Final = 0
PINNED: Final = 1
DEVICE: Final = 2

# Ranges that are pinned at once are whole multiples of about this.
_PIN_BYTES: Final = 16 * MIB


class Pins(Protocol):
    """Whoever pins memory for a GPU. Called from any thread, for one slab by one at a time."""

    @property
    def range_bytes(self) -> int:
        """How much to pin in one call, about."""

    def threads(self) -> int:
        """Return how many threads may pin now. Must not wait."""

    def use_device(self) -> None:
        """Make the GPU the calling thread's device. Must not raise.

        A thread that has used none goes back to the first one when it has opened or closed device
        memory, and takes memory there for a context that nobody needs.
        """

    def pin(self, address: int, length: int, step: int) -> int:
        """Pin a range, and rest if somebody needs the GPU. Must not raise.

        Args:
            address: of the range.
            length: bytes, about `range_bytes` when the caller asked.
            step: should that be too much by now, a multiple of this many bytes is pinned.

        Returns:
            Bytes that are pinned, from `address` on; 0: they cannot be.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`: the memory is about to be unmapped. Rests like `pin`. Must not raise."""

    def hurry(self) -> None:
        """Rest no more: the process is about to leave. Idempotent; wakes who rests."""


@dataclass(slots=True, eq=False)
class MappedSlab:
    """One slab in this process.

    Attributes:
        group: slab group.
        shard: whose bytes it holds.
        tier: ``host`` or ``gpu``.
        slot_bytes: bytes of a slot.
        slots: number of slots.
        data_address: address of slot 0; of device memory, an address on the device.
        mapping: of the shared memory: the whole slab, or a GPU slab's generations.
        generations: the slots' current generations, shape (slots,), written by the daemon.
        device_uuid: of the device that the memory is on; "" for host memory.
        pinned_slots: so many are pinned, from the first on.
    """

    group: int
    shard: int
    tier: str
    slot_bytes: int
    slots: int
    data_address: int
    mapping: Mapping
    generations: NDArray[np.uint64]
    device_uuid: str = ""
    pinned_slots: int = 0
    _pinned: list[tuple[Pins, int]] = field(default_factory=list)
    _pinning: threading.Lock = field(default_factory=threading.Lock)

    @property
    def pin_slots(self) -> int:
        """Ranges that are pinned hold a multiple of so many slots: they begin between pages."""
        whole = PAGE_BYTES // math.gcd(PAGE_BYTES, self.slot_bytes)
        return max(1, _PIN_BYTES // (whole * self.slot_bytes)) * whole

    def pin(
        self, pins: Pins, filling: Callable[[Callable[[], object]], object] = lambda fill: fill()
    ) -> bool:
        """Pin its next slots; return whether there are more to pin.

        Args:
            pins: pins them.
            filling: calls what fills their page tables, which raises OSError without memory for them.
        """
        step = self.pin_slots * self.slot_bytes
        with self._pinning:
            left = (self.slots - self.pinned_slots) * self.slot_bytes
            if self.device_uuid or not left:
                return False
            length = min(max(1, pins.range_bytes // step) * step, left)
            address = self.data_address + self.pinned_slots * self.slot_bytes
            # First: who pins holds up the GPU, who fills page tables does not.
            start = address - self.mapping.address
            filling(lambda: self.mapping.fault_in(start, length))
            done = pins.pin(address, length, step)
            if done:
                self._pinned.append((pins, address))
                self.pinned_slots += done // self.slot_bytes
            return 0 < done < left

    def close(self) -> bool:
        """Unpin and unmap; return False when views keep it mapped."""
        self.pinned_slots = 0
        for pins, address in self._pinned:
            pins.unpin(address)
        self._pinned.clear()
        # The field itself is a view.
        self.generations = np.empty(0, np.uint64)
        return self.mapping.close()


class DeviceMemory:
    """Allocations of the daemon that this process has opened. Any thread may call."""

    def __init__(self, runtime: Callable[[], Cudart] = cudart) -> None:
        """Open nothing yet, and load no CUDA."""
        self._runtime = runtime
        self._guard = threading.Lock()
        self._opened: dict[bytes, tuple[int, int]] = {}  # handle -> device, address

    def address(self, memory: pb.CudaIpc) -> int:
        """Return where an allocation begins, opened when it is asked for the first time.

        Raises:
            CudaError: this process does not see the device, or the exporter is gone.
        """
        with self._guard:
            known = self._opened.get(memory.handle)
            if known is None:
                runtime = self._runtime()
                device = runtime.device_of(memory.device_uuid)
                with runtime.on_device(device):
                    known = device, runtime.ipc_open(memory.handle)
                    # Before going back to another device may fail.
                    self._opened[memory.handle] = known
            return known[1]

    def close(self) -> None:
        """Close all; nothing may be copying there any more. Idempotent.

        Raises:
            CudaError: one could not be closed; the others were.
        """
        problem: CudaError | None = None
        with self._guard:
            for device, address in self._opened.values():
                try:
                    with self._runtime().on_device(device):
                        self._runtime().ipc_close(address)
                except CudaError as error:
                    problem = error
            self._opened.clear()
        if problem is not None:
            raise problem


def map_slab(slab: pb.Slab, device: DeviceMemory) -> MappedSlab:
    """Map one announced slab.

    Raises:
        CudaError, OSError, ValueError: it cannot be.
    """
    kind = slab.WhichOneof("memory")
    if slab.length < slab.data_offset + slab.slots * slab.slot_bytes:
        raise ValueError("its geometry contradicts itself")
    if kind == "cuda":
        cuda = slab.cuda
        if cuda.allocation_bytes and cuda.offset + slab.length > cuda.allocation_bytes:
            raise ValueError("it does not lie inside its allocation")
        mapping = _map_file(cuda.generations_path, 8 * slab.slots, writable=False)
        begin = device.address(cuda) + cuda.offset
    elif kind == "path":
        if slab.data_offset < 8 * slab.slots:
            raise ValueError("its geometry contradicts itself")
        mapping = _map_file(slab.path, slab.length, writable=True)
        begin = mapping.address
    else:
        raise ValueError(f"{tier_name(slab.tier)} memory of a kind that is not known here")
    return MappedSlab(
        group=slab.group,
        shard=slab.shard,
        tier=tier_name(slab.tier),
        slot_bytes=slab.slot_bytes,
        slots=slab.slots,
        data_address=begin + slab.data_offset,
        mapping=mapping,
        generations=mapping.array[: 8 * slab.slots].view(np.uint64),
        device_uuid=slab.cuda.device_uuid if kind == "cuda" else "",
    )


def _map_file(path: str, length: int, *, writable: bool) -> Mapping:
    flags = os.O_RDWR if writable else os.O_RDONLY
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        # Beyond a file's end a mapping raises SIGBUS.
        if os.fstat(fd).st_size < length:
            raise ValueError(f"{path} is shorter than {length} bytes")
        mapping = Mapping(fd, length, writable=writable)
    finally:
        os.close(fd)
    mapping.dontfork()
    return mapping
