"""Blocks to and from segment files, and what a fault of the device means for a segment."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import TierUnavailable
from kvstore.tiers.base import Outcome, Transfer
from kvstore.tiers.digests import digest_shards
from kvstore.tiers.health import Health
from kvstore.tiers.io_engine import FILE_GONE, IoEngine, IoRequest, error_text
from kvstore.tiers.segment import Segment
from kvstore.tiers.segment_set import SegmentSet

__all__ = ["SegmentIo"]

_log = logging.getLogger(__name__)


class SegmentIo:
    """Moves the bytes of a `SegmentSet`. Loop thread only; system calls run on the engine's.

    Attributes:
        corrupt: blocks whose bytes did not match their digest.
        read_bytes: bytes read, padding included.
        written_bytes: bytes written, padding included.
        io_errors: blocks and syncs that failed.
    """

    def __init__(self, segments: SegmentSet, engine: IoEngine, health: Health) -> None:
        """Compose.

        Args:
            segments: whose slots are read and written.
            engine: opened and closed by the owner.
            health: told what fails and what works.
        """
        self._segments = segments
        self._engine = engine
        self._health = health
        self._inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._sync_lock = asyncio.Lock()
        self.corrupt = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self.io_errors = 0

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._idle.wait()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Keep the files open for the length of a block."""
        self._inflight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inflight -= 1
            if not self._inflight:
                self._idle.set()

    async def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read blocks and check their digests on the I/O threads; see `Tier.read`.

        Raises:
            ValueError: a slot is not allocated, or buffers do not fit it; nothing was read.
        """
        requests, holders = self._requests(transfers)
        corrupt = [False] * len(transfers)

        def landed(position: int) -> None:
            transfer = transfers[position]
            corrupt[position] = transfer.digests is not None and (
                digest_shards(transfer.buffers, transfer.lengths) != tuple(transfer.digests)
            )

        with self.under_way():
            errors = await self._engine.read(requests, landed)
        damaged = sum(corrupt)
        self.corrupt += damaged
        self.read_bytes += self._settle("read", holders, errors)
        if damaged:
            _log.warning("disk tier: %d blocks do not match their digests", damaged)
        return [
            Outcome.IO_ERROR if error else Outcome.CORRUPT if bad else Outcome.OK
            for error, bad in zip(errors, corrupt, strict=True)
        ]

    async def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Write blocks; see `Tier.write`. Not durable before `sync`.

        Raises:
            ValueError: a slot is not allocated, or buffers do not fit it; nothing was written.
        """
        requests, holders = self._requests(transfers)
        with self.under_way():
            errors = await self._engine.write(requests)
        for transfer, segment, error in zip(transfers, holders, errors, strict=True):
            if error:
                segment.write_failed(transfer.slot.index)
            else:
                segment.written(transfer.slot.index)
        self.written_bytes += self._settle("write", holders, errors)
        return [Outcome.IO_ERROR if error else Outcome.OK for error in errors]

    async def sync(self) -> None:
        """Make every block written before the call durable.

        Raises:
            TierUnavailable: some may be lost. Every sync fails until the blocks written since
                the last good one are written again or freed: a kernel that could not write a
                page back forgets that it was dirty, so trying again proves nothing.
        """
        with self.under_way():
            async with self._sync_lock:
                await self._sync()

    async def _sync(self) -> None:
        dirty = [segment for segment in self._segments if segment.unsynced]
        pending = [segment.unsynced for segment in dirty]
        for segment in dirty:
            segment.unsynced = set()
        try:
            errors = await self._engine.sync([segment.file for segment in dirty])
        except BaseException:
            for segment, places in zip(dirty, pending, strict=True):
                segment.unsynced |= places
            raise
        for segment, places, error in zip(dirty, pending, errors, strict=True):
            if error:
                # What was freed meanwhile is nobody's loss.
                segment.lost |= {index for index in places if segment.used[index]}
                self._fault("sync", error, segment)
        if any(errors):
            self.io_errors += sum(1 for error in errors if error)
        elif dirty:
            self._health.works("sync")
        if any(errors) or any(segment.lost for segment in self._segments):
            first = next((error for error in errors if error), errno.EIO)
            raise TierUnavailable("disk", f"sync failed: {error_text(first)}", first)

    def _requests(self, transfers: Sequence[Transfer]) -> tuple[list[IoRequest], list[Segment]]:
        """Return the transfers as file ranges, all checked before the first one is begun."""
        requests = []
        holders = []
        for transfer in transfers:
            segment = self._segments.holder(transfer.slot)
            shape, buffers = segment.shape, transfer.buffers
            if len(buffers) != shape.shards or len(transfer.lengths) != shape.shards:
                raise ValueError(f"{len(buffers)} buffers for a block of {shape.shards} shards")
            for buffer, length in zip(buffers, transfer.lengths, strict=True):
                if len(buffer) != shape.slot_bytes or not 0 <= length <= shape.slot_bytes:
                    raise ValueError(
                        f"{length} bytes in a buffer of {len(buffer)} for a slot of "
                        f"{shape.slot_bytes}"
                    )
            offset = segment.offset(transfer.slot.index)
            requests.append(IoRequest(segment.file, offset, buffers))
            holders.append(segment)
        return requests, holders

    def _settle(self, kind: str, holders: Sequence[Segment], errors: Sequence[int]) -> int:
        """Book a batch's errors; return the bytes that were moved."""
        moved = failed = 0
        for segment, error in zip(holders, errors, strict=True):
            if error:
                failed += 1
                self._fault(kind, error, segment)
            else:
                moved += segment.shape.block_bytes
        self.io_errors += failed
        if moved and not failed:
            self._health.works(kind)
        return moved

    def _fault(self, kind: str, error: int, segment: Segment) -> None:
        self._health.fails(
            kind, f"{kind} failed: {Path(segment.file.path).name}: {error_text(error)}"
        )
        if error in FILE_GONE and not segment.broken:
            self._segments.withdraw(segment)
            segment.broken = error_text(error)
