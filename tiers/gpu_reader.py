"""Blocks from disk straight into the GPU pool, past host memory, and checked.

An I/O engine for device memory reads each shard into its slot. Digests are XXH3 on the CPU, so the
bytes come back over the bus into a small locked buffer to be hashed, on the engine's threads while
other reads go on: the bus has ten times the disk's bandwidth, host slots stay free. A block that
does not pass is never told to anybody.

The engine is a convenience: when it cannot be opened, or stops to work, `usable` is false for a
while, a line says why, and blocks come by way of host memory.
"""

from __future__ import annotations

import errno
import logging
import mmap
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.errors import TierUnavailable
from kvstore.tiers.base import Outcome, Slot
from kvstore.tiers.digests import digest_shard
from kvstore.tiers.gpu_device import DeviceError
from kvstore.tiers.io_engine import DeviceBuffer, IoRequest, error_text
from kvstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.tiers.disk import DiskTier
    from kvstore.tiers.gpu import GpuTier
    from kvstore.tiers.io_engine import IoEngine

__all__ = ["DirectRead", "GpuReader"]

_log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 60.0
_SCRATCH_BYTES: Final = 4 * MIB


@dataclass(frozen=True, slots=True)
class DirectRead:
    """One block to bring.

    Attributes:
        source: slot on disk; held by the caller.
        destination: slot in the GPU pool; the caller's.
        slot_bytes: bytes of a shard's slot.
        lengths: bytes of each shard that count.
        digests: of each shard.
    """

    source: Slot
    destination: Slot
    slot_bytes: int
    lengths: tuple[int, ...]
    digests: tuple[int, ...]


class _Scratch:
    """A thread's buffer of locked host memory."""

    def __init__(self, gpu: GpuTier) -> None:
        memory = mmap.mmap(-1, _SCRATCH_BYTES)
        self.view = memoryview(memory)
        self.address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        self.pinned = gpu.pin(self.address, _SCRATCH_BYTES)


class GpuReader:
    """Reads with an engine of its own.

    Attributes:
        read_bytes: bytes that came this way, padding included.
        failures: blocks that did not, for reasons other than their bytes.
    """

    def __init__(
        self,
        disk: DiskTier,
        gpu: GpuTier,
        engine: IoEngine,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compose; `open` starts the engine, which must take device memory."""
        self._disk = disk
        self._gpu = gpu
        self._engine = engine
        self._clock = clock
        self._open = False
        self._retry_at = 0.0
        self._mine = threading.local()
        self._scratches: list[_Scratch] = []
        self.read_bytes = 0
        self.failures = 0

    @property
    def usable(self) -> bool:
        """Whether blocks should be read this way now."""
        return self._open and self._gpu.state == "ok" and self._clock() >= self._retry_at

    @property
    def name(self) -> str:
        """How blocks come from disk now: the engine's name, or ``host``."""
        return self._engine.name if self.usable else "host"

    async def open(self) -> None:
        """Start the engine; failing that, blocks come through host memory."""
        try:
            await self._engine.open()
        except TierUnavailable as error:
            self.failures += 1
            _log.warning("blocks go from disk to gpu through host memory: %s", error)
            return
        _log.info("blocks go from disk to gpu by %s", self._engine.name)
        self._open = True

    async def close(self) -> None:
        """Wait for reads; stop the engine. Idempotent."""
        if self._open:
            self._open = False
            await self._engine.close()
        while self._scratches:
            scratch = self._scratches.pop()
            if scratch.pinned:
                self._gpu.unpin(scratch.address)

    async def read(self, reads: Sequence[DirectRead]) -> list[Outcome]:
        """Bring blocks, one outcome each; returns when the engine is done with all of them."""
        requests = []
        for read in reads:
            file, offset = self._disk.place(read.source)
            buffers = tuple(
                DeviceBuffer(address, read.slot_bytes)
                for address in self._gpu.addresses(read.destination)
            )
            requests.append(IoRequest(file, offset, buffers))
        outcomes = [Outcome.IO_ERROR] * len(reads)

        def landed(position: int) -> None:
            outcomes[position] = self._check(reads[position])

        errors = await self._engine.read(requests, landed)
        for position, error in enumerate(errors):
            if error:
                outcomes[position] = Outcome.IO_ERROR
            else:
                self.read_bytes += requests[position].length
        failed = outcomes.count(Outcome.IO_ERROR)
        if failed:
            self.failures += failed
            first = next((error for error in errors if error), errno.EIO)
            self._retry_at = self._clock() + _RETRY_SECONDS
            _log.warning(
                "%s failed (%s): for %.0f s blocks go from disk to gpu through host memory",
                self._engine.name,
                error_text(first),
                _RETRY_SECONDS,
            )
        return outcomes

    def _check(self, read: DirectRead) -> Outcome:
        """Bring a block's bytes back and compare; on an engine thread."""
        scratch = getattr(self._mine, "scratch", None)
        if scratch is None:
            scratch = self._mine.scratch = _Scratch(self._gpu)
            self._scratches.append(scratch)
        addresses = self._gpu.addresses(read.destination)
        for shard, address in enumerate(addresses):
            try:
                digest = self._digest(scratch, shard, address, read.lengths[shard])
            except DeviceError as error:
                _log.warning("checking a block on the gpu failed: %s", error)
                return Outcome.IO_ERROR
            if digest != read.digests[shard]:
                return Outcome.CORRUPT
        return Outcome.OK

    def _digest(self, scratch: _Scratch, shard: int, address: int, length: int) -> int:
        """Return the digest of device memory."""
        device = self._gpu.devices[shard % len(self._gpu.devices)]
        if length <= _SCRATCH_BYTES:
            self._fetch(device.copy, scratch, address, length)
            return digest_shard(scratch.view, length)
        whole = bytearray(length)
        for at in range(0, length, _SCRATCH_BYTES):
            part = min(_SCRATCH_BYTES, length - at)
            self._fetch(device.copy, scratch, address + at, part)
            whole[at : at + part] = scratch.view[:part]
        return digest_shard(memoryview(whole), length)

    @staticmethod
    def _fetch(copy: Callable[..., None], scratch: _Scratch, address: int, length: int) -> None:
        if length:
            to, of, size = (np.array([n], np.uint64) for n in (scratch.address, address, length))
            copy(to, of, size)
