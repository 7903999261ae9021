"""The disk tier: blocks in preallocated segment files.

The directory's layout and opening are in `kvstore.tiers.disk_directory`, a segment's layout and
creation in `kvstore.tiers.segment`. Which slot holds which block is known to the caller's index
alone; this module's share of the protocol:

    1. `allocate` takes slots, `write` fills them, `sync` makes them durable. Only then may the
       caller record them;
    2. `free` makes a slot reusable at once: the caller has made the delete of its record durable
       before;
    3. after a start `adopt` marks the slots that the caller's records name, then
       `finish_recovery` offers the others. Until then nothing is allocated. A record whose slot
       is refused, and every record whose bytes fail their digest, is void.

A segment is written to disk before its slots are offered, and deleted only when none is in use,
so a record never leads to a file that was not its own: numbers are not used again while a file
of that number exists, and a stale record meets the digest.

Faults stay with the blocks they hit: `Outcome.IO_ERROR`, a counter, and a `state` that says
``degraded: …`` until the same kind of operation works again. A file that is gone, replaced or cut
short is not allocated from any more, and is let go when its last slot is freed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.errors import ConfigError, TierClosed
from kvstore.space import BlockShape
from kvstore.tiers.base import Capabilities, Outcome, Slot, Tier, TierName, TierUsage, Transfer
from kvstore.tiers.disk_directory import DiskDirectory
from kvstore.tiers.health import Health
from kvstore.tiers.io_engine import IoEngine, IoFile, error_text
from kvstore.tiers.posix_engine import PosixEngine
from kvstore.tiers.segment import Segment
from kvstore.tiers.segment_io import SegmentIo
from kvstore.tiers.segment_maker import SegmentMaker
from kvstore.tiers.segment_set import SegmentSet
from kvstore.units import PAGE_BYTES, format_bytes

__all__ = ["DiskTier"]

_log = logging.getLogger(__name__)


def _check_capacity(capacity_bytes: int) -> None:
    if capacity_bytes < PAGE_BYTES:
        raise ConfigError(f"disk capacity {capacity_bytes} B: at least {PAGE_BYTES} B")


class DiskTier(Tier):
    """`Tier` on a directory.

    Attributes:
        on_room: called on the loop whenever making or removing a segment ended, well or badly.
    """

    name = TierName.DISK
    capabilities = Capabilities(persistent=True, direct_io=True)

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        *,
        engine: IoEngine | None = None,
        threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Configure the tier; `open` takes the directory.

        Args:
            directory: created if missing; owned by one daemon at a time.
            capacity_bytes: limit of all segments together, headers not counted.
            engine: opened and closed by the tier; `PosixEngine` when None.
            threads: of that `PosixEngine`.
            clock: seconds, for the back-off after a segment could not be made.
        """
        self._path = directory
        self._segments = SegmentSet(capacity_bytes)
        self._engine = engine if engine is not None else PosixEngine(threads)
        self._clock = clock
        self._health = Health("disk")
        self._io = SegmentIo(self._segments, self._engine, self._health)
        self._directory: DiskDirectory | None = None
        self._maker: SegmentMaker | None = None
        self._maker_thread = ThreadPoolExecutor(1, "kvstore-segments")
        self._found: dict[int, Segment] = {}
        self._recovering = False
        self._closing: asyncio.Future[None] | None = None
        self.on_room: Callable[[], None] = lambda: None

    async def open(self) -> None:
        """Lock the directory and list its segments.

        Raises:
            ConfigError: directory or capacity is unusable.
            FormatVersionError: a later release wrote the directory.
        """
        _check_capacity(self._segments.capacity_bytes)
        loop = asyncio.get_running_loop()
        try:
            directory = await loop.run_in_executor(
                self._maker_thread, DiskDirectory.open, self._path, self.capacity_bytes
            )
        except BaseException:
            self._maker_thread.shutdown(wait=False)
            raise
        await self._engine.open()
        self._directory = directory
        if not directory.takes_direct_io():
            self.capabilities = Capabilities(persistent=True)
        self._maker = SegmentMaker(
            directory,
            self._maker_thread,
            self._segments,
            self._engine,
            self._health,
            self._clock,
            lambda: self.on_room(),
        )
        self._found = dict(directory.segments)
        self._segments.allocated_bytes = sum(s.data_bytes for s in self._found.values())
        self._recovering = True

    async def close(self) -> None:
        """Wait for transfers, then give everything back. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._maker is not None:
            await self._maker.close()
        await self._io.idle()
        await self._engine.close()
        await asyncio.to_thread(self._maker_thread.shutdown)
        if self._directory is not None:
            self._directory.close()

    @property
    def store_id(self) -> bytes:
        """16 bytes that the caller's records are bound to; known once open."""
        return self._opened()[0].store_id

    @property
    def io_engine(self) -> str:
        """Name of the I/O engine as it really runs."""
        return self._engine.name

    @property
    def state(self) -> str:
        """``ok``, or ``degraded: `` and one line."""
        return self._health.state

    @property
    def io_errors(self) -> int:
        """Blocks, syncs and segment files that failed."""
        return self._io.io_errors + (self._maker.io_errors if self._maker is not None else 0)

    @property
    def corrupt(self) -> int:
        """Blocks whose bytes did not match their digest."""
        return self._io.corrupt

    @property
    def read_bytes(self) -> int:
        """Bytes read, padding included."""
        return self._io.read_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes written, padding included."""
        return self._io.written_bytes

    @property
    def allocating(self) -> bool:
        """A segment is being made or deleted; `on_room` will be called."""
        return self._maker is not None and self._maker.busy

    @property
    def capacity_bytes(self) -> int:
        """The limit, as configured or last resized."""
        return self._segments.capacity_bytes

    @property
    def excess_bytes(self) -> int:
        """Bytes that segments take beyond the capacity, after it was lowered."""
        return self._segments.excess_bytes

    def usage(self) -> TierUsage:
        """Return the tier's bytes, headers not counted."""
        segments = self._segments
        return TierUsage(segments.capacity_bytes, segments.allocated_bytes, segments.used_bytes)

    def adopt(self, slots: Sequence[tuple[Slot, BlockShape]]) -> list[bool]:
        """Mark slots that the caller's records name as allocated; before `finish_recovery`.

        Returns:
            False for a slot whose segment is missing, of another shape or cut short before the
            slot's end, and for every claim of a slot but the first.
        """
        if not self._recovering:
            raise RuntimeError("adopt: recovery is over, or has not begun")
        segments = self._found
        adopted = []
        for (group, index), shape in slots:
            segment = segments.get(group)
            good = (
                segment is not None
                and (segment.shape is shape or segment.shape == shape)
                and 0 <= index < segment.blocks
                and not segment.used[index]
            )
            if good and segment is not None:
                segment.adopt(index)
            adopted.append(good)
        return adopted

    async def finish_recovery(self) -> None:
        """Offer what was not adopted; segments that nobody needs and that exceed the capacity go.

        The used bytes may exceed a capacity that was lowered: nothing is allocated until the
        caller has freed enough.
        """
        _, maker = self._opened()
        if not self._recovering:
            return
        self._recovering = False
        for segment in self._found.values():
            segment.ready()
            self._segments.add(segment)
            if not segment.blocks:
                maker.let_go(segment)
        self._found.clear()
        maker.drop_excess()
        await maker.removed()

    def set_capacity(self, capacity_bytes: int) -> None:
        """Change the capacity; empty segments beyond it are deleted in the background.

        While `excess_bytes` is not 0 the caller empties segments (`retire`, `remove`).
        """
        _, maker = self._opened()
        _check_capacity(capacity_bytes)
        self._segments.capacity_bytes = capacity_bytes
        maker.drop_excess()

    def check_room(self, capacity_bytes: int) -> None:
        """Check that the file system could hold so much. Blocks; any thread.

        Raises:
            ConfigError: it could not, or the directory does not answer.
        """
        _check_capacity(capacity_bytes)
        try:
            stat = os.statvfs(self._path)
        except OSError as error:
            raise ConfigError(f"disk directory {self._path}: {error.strerror}") from error
        free = stat.f_bavail * stat.f_frsize
        taken = self._segments.allocated_bytes
        if capacity_bytes > taken + free:
            raise ConfigError(
                f"disk capacity {format_bytes(capacity_bytes)} is not possible: "
                f"{format_bytes(taken)} taken, {format_bytes(free)} free in {self._path}"
            )

    def free_blocks(self, shape: BlockShape) -> int:
        """Return how many blocks `allocate` could give now, from segments that are ready."""
        return self._segments.free_blocks(shape)

    def room_blocks(self, shape: BlockShape) -> int:
        """Return how many more blocks `want` could make room for, beyond `free_blocks`.

        Counts capacity not yet taken and segments of other shapes that are empty. 0 while making
        segments fails.
        """
        if self._recovering or self._maker is None:
            return 0
        return self._maker.room_blocks(shape)

    def want(self, shape: BlockShape, blocks: int) -> None:
        """Make segments in the background until `free_blocks(shape)` is at least ``blocks``.

        Ends early when there is no room, and does nothing when closed. `on_room` is called after
        every step.
        """
        if self._maker is not None and not self._recovering:
            self._maker.want(shape, blocks)

    def allocate(self, shape: BlockShape, count: int) -> list[Slot]:
        """Take up to ``count`` slots, adjacent ones where possible."""
        self._opened()
        return self._segments.allocate(shape, count)

    def relocate(self, shape: BlockShape, count: int) -> list[Slot]:
        """Take up to ``count`` slots for blocks that leave a retired segment.

        Beyond the capacity for as long as they have two: it may have been lowered to what is used.
        """
        self._opened()
        return self._segments.allocate(shape, count, beyond=True)

    def spare_slots(self, shape: BlockShape) -> int:
        """Return how many slots `relocate` could give."""
        return self._segments.spare_slots(shape)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of segments that are retired or being deleted."""
        deleted = 0 if self._maker is None else self._maker.leaving_bytes
        return deleted + sum(s.data_bytes for s in self._segments if s.retired)

    def free(self, slots: Sequence[Slot]) -> None:
        """Give slots back; they may be allocated again at once.

        Raises:
            ValueError: a slot is not allocated; no slot was freed.
        """
        _, maker = self._opened()
        for segment in self._segments.free(slots):
            maker.let_go(segment)
        if self.excess_bytes:
            maker.drop_excess()

    def place(self, slot: Slot) -> tuple[IoFile, int]:
        """Return where a slot lies, for somebody else's engine: file, and offset in it.

        Raises:
            ValueError: it is not allocated.
        """
        segment = self._segments.holder(slot)
        return segment.file, segment.offset(slot.index)

    async def read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read blocks and check their digests on the I/O threads; see `Tier.read`.

        Raises:
            ValueError: a slot is not allocated, or buffers do not fit it; nothing was read.
        """
        self._opened()
        return await self._io.read(transfers)

    async def write(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Write blocks; see `Tier.write`. Not durable before `sync`.

        Raises:
            ValueError: a slot is not allocated, or buffers do not fit it; nothing was written.
        """
        self._opened()
        return await self._io.write(transfers)

    async def sync(self) -> None:
        """Make every block written before the call durable; see `SegmentIo.sync`.

        Raises:
            TierUnavailable: some may be lost.
        """
        self._opened()
        await self._io.sync()

    def segments(self) -> list[tuple[int, BlockShape, int, int]]:
        """Return (number, shape, blocks, used blocks) of every segment."""
        return [(s.id, s.shape, s.blocks, s.used_blocks) for s in self._segments]

    def slots_in_use(self, group: int) -> int:
        """Return how many slots of a segment are allocated.

        Raises:
            ValueError: there is no such segment.
        """
        return self._group(group).used_blocks

    def allocated_slots(self, group: int) -> list[Slot]:
        """Return the allocated slots of a segment.

        Raises:
            ValueError: there is no such segment.
        """
        used = self._group(group).used
        return [Slot(group, index) for index, taken in enumerate(used) if taken]

    def misfits(self) -> list[str]:
        """Return one line for each account, or file in the directory, that does not fit the others.

        For an audit, when nothing is being made, deleted, allocated or freed. Blocks; any thread.
        """
        return [*self._segments.misfits(), *self._opened()[0].misfits(list(self._segments))]

    def broken(self, group: int) -> str:
        """Return why a segment's file cannot be used any more; empty while it can, or is gone."""
        segment = self._segments.get(group)
        return "" if segment is None else segment.broken

    def retire(self, group: int) -> None:
        """Allocate no more from a segment, so that it can be emptied and removed. Idempotent.

        Raises:
            ValueError: there is no such segment.
        """
        segment = self._group(group)
        self._segments.withdraw(segment)
        segment.retired = True

    def readmit(self, group: int) -> None:
        """Allocate from a retired segment again.

        Raises:
            ValueError: there is no such segment.
        """
        self._segments.readmit(self._group(group))

    def remove(self, group: int) -> None:
        """Delete a retired, empty segment; `on_room` is called when its bytes are free.

        Raises:
            ValueError: there is no such segment, it is not retired, or slots of it are in use.
        """
        _, maker = self._opened()
        segment = self._group(group)
        if not segment.retired:
            raise ValueError(f"disk segment {group} is not retired")
        if segment.used_blocks:
            raise ValueError(f"disk segment {group}: {segment.used_blocks} slots are in use")
        maker.let_go(segment)

    async def probe(self) -> bool:
        """Try the directory and, if it works, take back `state` and back-off. For idle times."""
        directory, maker = self._opened()
        try:
            with self._io.under_way():
                await maker.on_thread(directory.probe)
        except OSError as error:
            reason = error_text(error.errno or errno.EIO)
            self._health.fails("probe", f"{self._path}: {reason}")
            return False
        self._health.reset()
        maker.retry()
        return True

    def _opened(self) -> tuple[DiskDirectory, SegmentMaker]:
        if self._closing is not None:
            raise TierClosed("disk", "is closed")
        if self._directory is None or self._maker is None:
            raise TierClosed("disk", "is not open")
        return self._directory, self._maker

    def _group(self, number: int) -> Segment:
        segment = self._segments.get(number)
        if segment is None:
            raise ValueError(f"there is no disk segment {number}")
        return segment
