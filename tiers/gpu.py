"""The GPU tier: blocks in device memory that engines on this machine open.

A pool per device, each one allocation taken at `open` and given back at `close`, so that what is
left for engines is known before they start. Slabs are parts of it; shard r of a block lies on
device r modulo the number of devices. The daemon alone writes here, by DMA from and to host memory;
clients read. What a client has opened cannot be taken from it, so memory that changes from one
shape to another is not waited for: generations of the old group say `GONE` before a byte of it is
overwritten, and whoever reads too late finds out, as with any expired lease.

A device that fails once a copy is begun is not trusted again: `state` says ``degraded: …``, every
later copy fails at once, and the owner drops what is here. Each block is in host or on disk, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ConfigError, TierClosed
from kvstore.tiers.base import Capabilities, Outcome, Slot, Tier, TierName, TierUsage, Transfer
from kvstore.tiers.extents import Extents
from kvstore.tiers.gpu_copy import DevicePieces, move, verify
from kvstore.tiers.gpu_device import DeviceError
from kvstore.tiers.gpu_slab import FIRST_GPU_GROUP, GenerationsFile, GpuSlabGroup, GpuSlabInfo
from kvstore.tiers.pool_copy import check_fits, undisturbed
from kvstore.tiers.pool_directory import gpu_generations_path, remove_gpu_files
from kvstore.tiers.slab import MIN_GROUP_BYTES, group_slots
from kvstore.tiers.slots import GroupSlots
from kvstore.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.space import BlockShape
    from kvstore.tiers.gpu_device import GpuDevice

__all__ = ["GpuTier"]

_log = logging.getLogger(__name__)

_Group = GroupSlots[GpuSlabGroup, GenerationsFile]

# One batch at a time per direction and device keeps the bus busy; two of each hide the submitting.
_THREADS_PER_DEVICE: Final = 4
# What drivers hand out memory in.
_DEVICE_PAGE_BYTES: Final = 2 << 20


def _ignore(_: GpuSlabGroup) -> None:
    """Nobody listens."""


class GpuTier(Tier):
    """Pools of device memory.

    Attributes:
        on_group: called with each new group, before anybody can allocate from it.
        devices: in the order in which shards are laid on them.
        copied_in_bytes, copied_out_bytes: moved into the pool and out of it.
        pin_failures: pieces of host memory that could not be locked for DMA.
    """

    name = TierName.GPU
    capabilities = Capabilities(mappable=True)

    def __init__(
        self,
        directory: Path,
        devices: Sequence[GpuDevice],
        device_bytes: float,
        *,
        min_slab_bytes: int = MIN_GROUP_BYTES,
    ) -> None:
        """Describe the pools; nothing is taken before `open`.

        Args:
            directory: of the host pool, for the files of generations; not needed before `want`.
            devices: at least one.
            device_bytes: of each device's pool; below 1: that part of its memory.
            min_slab_bytes: least size of a slab group.
        """
        self.on_group: Callable[[GpuSlabGroup], None] = _ignore
        self.devices = devices
        self._directory = directory
        self._wanted = device_bytes
        self._min_group_bytes = min_slab_bytes
        self._lengths: list[int] = []
        self._free: list[Extents] = []
        self._groups: dict[int, _Group] = {}
        self._ready: dict[BlockShape, dict[int, _Group]] = {}
        self._next_group = FIRST_GPU_GROUP
        self._used_bytes = 0
        self._failed = ""
        self._open = False
        self._closing = asyncio.Lock()
        self._copier: ThreadPoolExecutor | None = None
        self._inflight: set[asyncio.Future[None]] = set()
        self.copied_in_bytes = 0
        self.copied_out_bytes = 0
        self.pin_failures = 0

    @property
    def state(self) -> str:
        """``ok``, or ``degraded: `` and why: a device has failed."""
        return f"degraded: {self._failed}" if self._failed else "ok"

    async def open(self) -> None:
        """Take the memory.

        Raises:
            ConfigError: a device has too little, or does not answer; nothing was taken.
        """
        remove_gpu_files(self._directory)
        await asyncio.to_thread(self._take)
        self._free = [Extents(length) for length in self._lengths]
        self._copier = ThreadPoolExecutor(_THREADS_PER_DEVICE * len(self.devices), "gpu-copy")
        self._open = True

    def _take(self) -> None:
        try:
            self._lengths = [self._take_on(device) for device in self.devices]
        except DeviceError as error:
            self._give_back()
            raise ConfigError(f"gpu_pool: {error}") from error
        except BaseException:
            self._give_back()
            raise

    def _take_on(self, device: GpuDevice) -> int:
        free, total = device.memory()
        length = int(self._wanted * total if self._wanted < 1 else self._wanted)
        if length >= _DEVICE_PAGE_BYTES:
            length -= length % _DEVICE_PAGE_BYTES
        if length > free:
            raise ConfigError(
                f"gpu_pool: {format_bytes(length)} on {device.name}: only "
                f"{format_bytes(free)} of {format_bytes(total)} are free"
            )
        device.open(length)
        return length

    def _give_back(self) -> None:
        for device in self.devices:
            device.close()

    async def close(self) -> None:
        """Wait for copies; give the memory back. Idempotent."""
        self._open = False
        async with self._closing:
            await self._close()

    async def _close(self) -> None:
        if self._inflight:
            await asyncio.wait(self._inflight)
        copier, self._copier = self._copier, None
        if copier is not None:
            await asyncio.to_thread(copier.shutdown)
        for group in self._groups.values():
            for header in group.headers:
                header.close()
        self._groups.clear()
        self._ready.clear()
        self._free.clear()
        self._lengths.clear()
        self._used_bytes = 0
        await asyncio.to_thread(self._give_back)

    def pin(self, address: int, length: int) -> bool:
        """Lock host memory for DMA, for all devices; see `kvstore.tiers.slab.Pinner`."""
        try:
            self.devices[0].pin(address, length)
        except DeviceError as error:
            if not self.pin_failures:
                _log.warning("host memory is not pinned, copies will be slower: %s", error)
            self.pin_failures += 1
            return False
        return True

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        try:
            self.devices[0].unpin(address)
        except DeviceError as error:
            _log.warning("host memory stays pinned: %s", error)

    def usage(self) -> TierUsage:
        """Return the bytes of all pools together."""
        capacity = sum(self._lengths)
        free = sum(extents.free_bytes for extents in self._free)
        return TierUsage(capacity, capacity - free, self._used_bytes)

    def device_usage(self) -> list[TierUsage]:
        """Return the bytes of each pool; slots are not counted by device."""
        return [
            TierUsage(length, length - extents.free_bytes, 0)
            for length, extents in zip(self._lengths, self._free, strict=True)
        ]

    def groups(self) -> list[GpuSlabGroup]:
        """Return the groups in service."""
        return [group.info for group in self._groups.values()]

    def device_uuids(self, shape: BlockShape, shards: frozenset[int]) -> frozenset[str]:
        """Return the devices on which some shards (none: all) of a shape's blocks lie."""
        wanted = shards or range(shape.shards)
        return frozenset(self.devices[shard % len(self.devices)].uuid for shard in wanted)

    def free_blocks(self, shape: BlockShape) -> int:
        """Return how many slots of a shape are free in its groups."""
        if self._failed:
            return 0
        return sum(group.free_count for group in self._ready.get(shape, {}).values())

    @property
    def allocating(self) -> bool:
        """Never: `want` makes groups at once."""
        return False

    def want(self, shape: BlockShape, blocks: int) -> None:
        """Make groups until `blocks` slots are free or nothing is left to make them of."""
        while self._open and not self._failed and self.free_blocks(shape) < blocks:
            if not self._make_group(shape):
                break

    def _make_group(self, shape: BlockShape) -> bool:
        """Make one group of what is free; False when no block fits."""
        count = len(self.devices)
        shares = [len(range(d, shape.shards, count)) for d in range(count)]
        fitting = [
            extents.largest // (share * shape.slot_bytes)
            for extents, share in zip(self._free, shares, strict=True)
            if share
        ]
        room = min(fitting) * shape.block_bytes
        slots = group_slots(shape, sum(self._lengths), room, self._min_group_bytes)
        if not slots:
            return False
        number = self._next_group
        path = gpu_generations_path(self._directory, number)
        try:
            header = GenerationsFile(path, slots)
        except OSError as error:
            _log.warning("gpu pool cannot grow: %s", error)
            return False
        self._next_group += 1
        length = slots * shape.slot_bytes
        begins = [
            extents.take(share * length) if share else 0
            for extents, share in zip(self._free, shares, strict=True)
        ]
        slabs = []
        for shard in range(shape.shards):
            device = self.devices[shard % count]
            slabs.append(
                GpuSlabInfo(
                    shard=shard,
                    device=shard % count,
                    device_uuid=device.uuid,
                    handle=device.handle,
                    offset=begins[shard % count] + shard // count * length,
                    length=length,
                    slot_bytes=shape.slot_bytes,
                    slots=slots,
                    allocation_bytes=self._lengths[shard % count],
                )
            )
        info = GpuSlabGroup(number, shape, slots, tuple(slabs), path)
        group = GroupSlots(info, [header])
        self._groups[number] = group
        self._ready.setdefault(shape, {})[number] = group
        self.on_group(info)
        return True

    def allocate(self, shape: BlockShape, count: int) -> list[Slot]:
        """Take up to `count` slots and raise the generation of each."""
        if self._failed:
            return []
        ready = self._ready.get(shape, {})
        slots: list[Slot] = []
        while len(slots) < count and ready:
            number, group = next(iter(ready.items()))
            slots += [Slot(number, index) for index in group.take(count - len(slots))]
            if group.free_count == 0:
                del ready[number]
        self._used_bytes += len(slots) * shape.block_bytes
        return slots

    def free(self, slots: Sequence[Slot]) -> None:
        """Give slots back.

        Raises:
            ValueError: a slot is not allocated, or named twice; no slot was freed.
        """
        by_group: dict[int, list[int]] = {}
        for group, index in slots:
            by_group.setdefault(group, []).append(index)
        for number, indices in by_group.items():
            self._group(number).check_taken(indices)
        for number, indices in by_group.items():
            owner = self._groups[number]
            owner.give_back(indices)
            self._used_bytes -= len(indices) * owner.info.shape.block_bytes
            self._ready.setdefault(owner.info.shape, {}).setdefault(number, owner)

    def remove(self, group: int) -> None:
        """Take an empty group's memory for other shapes.

        Raises:
            ValueError: there is no such group, or slots of it are in use.
        """
        leaving = self._group(group)
        if leaving.used_count:
            raise ValueError(f"slab group {group}: {leaving.used_count} slots are in use")
        for header in leaving.headers:
            header.close()
        del self._groups[group]
        self._ready.get(leaving.info.shape, {}).pop(group, None)
        for device in range(len(self.devices)):
            slabs = [slab for slab in leaving.info.slabs if slab.device == device]
            if slabs:
                self._free[device].give_back(slabs[0].offset, sum(slab.length for slab in slabs))

    def slots_in_use(self, group: int) -> int:
        """Return how many slots of a group are allocated.

        Raises:
            ValueError: there is no such group.
        """
        return self._group(group).used_count

    def generations(self, slots: Sequence[Slot]) -> NDArray[np.uint64]:
        """Return the current generation of each slot, shape (n,), from the daemon's own copy."""
        groups = self._groups
        return np.fromiter(
            (groups[group].generation(index) for group, index in slots), np.uint64, len(slots)
        )

    def _group(self, number: int) -> _Group:
        group = self._groups.get(number)
        if group is None:
            raise ValueError(f"there is no slab group {number}")
        return group

    def addresses(self, slot: Slot) -> list[int]:
        """Return the device address of a slot, one per shard.

        Raises:
            ValueError: there is no such slot.
        """
        group = self._group(slot.group)
        group.check_index(slot.index)
        return [
            self.devices[slab.device].address + slab.offset + slot.index * slab.slot_bytes
            for slab in group.info.slabs
        ]

    async def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Copy blocks to host buffers and check their digests; see `Tier.read`.

        Raises:
            TierClosed: the tier is closed.
            ValueError: a slot is not allocated, or a buffer does not fit; nothing was copied.
        """
        with self._under_way() as copier:
            outcomes = await self._move(copier, transfers, to_pool=False)
            if outcomes and outcomes[0] is Outcome.OK:
                loop = asyncio.get_running_loop()
                return await undisturbed(loop.run_in_executor(copier, verify, transfers))
            return outcomes

    async def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Copy blocks from host buffers; see `Tier.write`.

        Raises:
            TierClosed: the tier is closed.
            ValueError: a slot is not allocated, or a buffer does not fit; nothing was copied.
        """
        with self._under_way() as copier:
            return await self._move(copier, transfers, to_pool=True)

    async def sync(self) -> None:
        """Return at once: device memory is as durable as it can be.

        Raises:
            TierClosed: the tier is closed.
        """
        if not self._open:
            raise TierClosed("gpu", "the pool is closed")

    @contextmanager
    def _under_way(self) -> Iterator[ThreadPoolExecutor]:
        """Keep `close` waiting for a transfer; yield the threads."""
        if not self._open or self._copier is None:
            raise TierClosed("gpu", "the pool is closed")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inflight.add(done)
        try:
            yield self._copier
        finally:
            self._inflight.discard(done)
            done.set_result(None)

    async def _move(
        self, copier: ThreadPoolExecutor, transfers: Sequence[Transfer], *, to_pool: bool
    ) -> list[Outcome]:
        """Copy on every device at once; all blocks of a batch share its outcome."""
        pieces = self._pieces(transfers)
        if self._failed:
            return [Outcome.IO_ERROR] * len(transfers)
        loop = asyncio.get_running_loop()
        copies = [
            loop.run_in_executor(copier, move, device, part, to_pool)
            for device, part in zip(self.devices, pieces, strict=True)
            if part.lengths
        ]
        results = await undisturbed(asyncio.gather(*copies, return_exceptions=True))
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, DeviceError):
                raise error
        if errors:
            self._fail(errors[0])
            return [Outcome.IO_ERROR] * len(transfers)
        moved = sum(sum(part.lengths) for part in pieces)
        if to_pool:
            self.copied_in_bytes += moved
        else:
            self.copied_out_bytes += moved
        return [Outcome.OK] * len(transfers)

    def _pieces(self, transfers: Sequence[Transfer]) -> list[DevicePieces]:
        """Check a batch and return it by device. On the loop: a few microseconds a block."""
        by_group: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            by_group.setdefault(transfer.slot.group, []).append(transfer)
        for number, members in by_group.items():
            group = self._group(number)
            group.check_taken(list({transfer.slot.index for transfer in members}))
            for transfer in members:
                check_fits(transfer, group.info.shape)
        pieces = [DevicePieces() for _ in self.devices]
        for number, members in by_group.items():
            for slab in self._groups[number].info.slabs:
                base = self.devices[slab.device].address + slab.offset
                pieces[slab.device].add(base, slab.slot_bytes, slab.shard, members)
        return pieces

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            _log.error("gpu pool is out of service until the next start: %s", error)
            self._failed = str(error)
