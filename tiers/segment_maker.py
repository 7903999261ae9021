"""Makes and deletes segment files in the background, one at a time, ahead of need."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from kvstore.space import BlockShape
from kvstore.tiers.disk_directory import DiskDirectory
from kvstore.tiers.health import Health
from kvstore.tiers.io_engine import IoEngine
from kvstore.tiers.segment import Segment, SegmentHeader, create_segment
from kvstore.tiers.segment_set import SegmentSet

__all__ = ["SegmentMaker"]

_T = TypeVar("_T")
_FIRST_BACKOFF_SECONDS: Final = 1.0
_LAST_BACKOFF_SECONDS: Final = 60.0


class SegmentMaker:
    """Grows and shrinks a `SegmentSet`. Loop thread only; files are touched on one own thread.

    Attributes:
        io_errors: files that could not be made or deleted.
    """

    def __init__(
        self,
        directory: DiskDirectory,
        thread: ThreadPoolExecutor,
        segments: SegmentSet,
        engine: IoEngine,
        health: Health,
        clock: Callable[[], float],
        on_room: Callable[[], None],
    ) -> None:
        """Compose the maker.

        Args:
            directory: where files are made.
            thread: an executor with one thread, shut down by the owner.
            segments: the accounts to keep.
            engine: told before a file is deleted.
            health: told what fails.
            clock: seconds, for the back-off.
            on_room: called on the loop after a file was made or deleted, well or badly.
        """
        self._directory = directory
        self._thread = thread
        self._segments = segments
        self._engine = engine
        self._health = health
        self._clock = clock
        self._on_room = on_room
        self._next_id = directory.next_id
        self._wanted: dict[BlockShape, int] = {}
        self._growing: asyncio.Task[None] | None = None
        self._removals: set[asyncio.Task[None]] = set()
        self._leaving_bytes = 0  # of files being deleted
        self._closing = False
        self._backoff_seconds = 0.0
        self._grow_again_at = 0.0
        self.io_errors = 0

    @property
    def leaving_bytes(self) -> int:
        """Bytes of files that are being deleted."""
        return self._leaving_bytes

    @property
    def busy(self) -> bool:
        """A file is being made or deleted: `on_room` will be called."""
        return self._growing is not None or bool(self._removals)

    def room_blocks(self, shape: BlockShape) -> int:
        """Return how many blocks `want` could make room for; 0 while making files fails."""
        if self._clock() < self._grow_again_at:
            return 0
        return self._segments.room_blocks(shape)

    def want(self, shape: BlockShape, blocks: int) -> None:
        """Make segments until ``blocks`` of a shape are free, as far as there is room."""
        if self._closing or blocks <= self._segments.free_blocks(shape):
            return
        if not self.room_blocks(shape):
            return
        self._wanted[shape] = max(blocks, self._wanted.get(shape, 0))
        if self._growing is None:
            self._growing = asyncio.create_task(self._grow())

    def let_go(self, segment: Segment) -> None:
        """Forget an empty segment now, delete its file in the background."""
        self._segments.discard(segment)
        self._leaving_bytes += segment.data_bytes
        task = asyncio.create_task(self._delete(segment))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    def drop_excess(self) -> None:
        """Let empty segments go while more is allocated than the capacity."""
        excess_bytes = self._segments.excess_bytes - self._leaving_bytes
        for segment in self._segments:
            if excess_bytes <= 0:
                return
            if not segment.used_blocks and not segment.retired:
                excess_bytes -= segment.data_bytes
                self.let_go(segment)

    def retry(self) -> None:
        """End the back-off: a probe went well."""
        self._backoff_seconds = self._grow_again_at = 0.0
        self._on_room()

    async def removed(self) -> None:
        """Wait until no file is being deleted."""
        while self._removals:
            await asyncio.wait(self._removals)

    async def close(self) -> None:
        """Make nothing more; wait for what is under way."""
        self._closing = True
        if self._growing is not None:
            await asyncio.wait([self._growing])
        await self.removed()

    async def on_thread(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Run a function on the maker's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)

    async def _grow(self) -> None:
        """Make segments until nobody wants more or there is no room."""
        # Two shapes that want more than there is do not take each other's new segments: they
        # would for ever, before anything is written to one.
        made: set[int] = set()
        try:
            while self._wanted and not self._closing:
                # Shapes take turns.
                shape, blocks = next(iter(self._wanted.items()))
                del self._wanted[shape]
                if self._segments.free_blocks(shape) >= blocks:
                    continue
                await self._make_room(shape, made)
                count = self._segments.next_segment_blocks(shape)
                if not count or self._clock() < self._grow_again_at:
                    continue
                self._wanted.setdefault(shape, blocks)
                made.add(self._next_id)
                await self._make(shape, count)
                self._on_room()
        finally:
            self._wanted.clear()
            self._growing = None
            self._on_room()

    async def _make_room(self, shape: BlockShape, kept: set[int]) -> None:
        """Delete empty segments of other shapes, not those in `kept`, until one of this fits."""
        while not self._segments.next_segment_blocks(shape):
            spare = next((s for s in self._segments.spare(shape) if s.id not in kept), None)
            if spare is not None:
                self.let_go(spare)
            elif not self._removals:
                return
            await self.removed()

    async def _make(self, shape: BlockShape, count: int) -> None:
        header = SegmentHeader(self._directory.store_id, self._next_id, shape, count)
        self._next_id += 1
        self._segments.allocated_bytes += header.data_bytes
        try:
            segment = await self.on_thread(create_segment, self._directory.path, header)
        except OSError as error:
            self._segments.allocated_bytes -= header.data_bytes
            self.io_errors += 1
            self._wanted.clear()
            doubled = max(2 * self._backoff_seconds, _FIRST_BACKOFF_SECONDS)
            self._backoff_seconds = min(doubled, _LAST_BACKOFF_SECONDS)
            self._grow_again_at = self._clock() + self._backoff_seconds
            reason = os.strerror(error.errno or errno.EIO)
            self._health.fails("grow", f"cannot make a segment: {reason}")
            return
        self._backoff_seconds = self._grow_again_at = 0.0
        self._health.works("grow")
        self._segments.add(segment)

    async def _delete(self, segment: Segment) -> None:
        self._engine.forget(segment.file)
        try:
            await self.on_thread(self._directory.delete, segment)
        except OSError as error:
            # Its bytes stay counted: they are still on the disk. The next start finds the file.
            self.io_errors += 1
            reason = os.strerror(error.errno or errno.EIO)
            self._health.fails("delete", f"cannot delete a segment: {reason}")
        else:
            self._segments.allocated_bytes -= segment.data_bytes
            self._health.works("delete")
        finally:
            self._leaving_bytes -= segment.data_bytes
        self._on_room()
