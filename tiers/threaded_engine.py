"""What I/O engines with threads of their own have in common: batches, syncs, and their end."""

from __future__ import annotations

import asyncio
import errno
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvstore.syncpoint import reach
from kvstore.tiers.io_engine import IoEngine, IoFile, IoRequest
from kvstore.tiers.io_workers import Batch, Workers
from kvstore.tiers.open_files import OpenFiles

__all__ = ["ThreadedEngine"]

H = TypeVar("H")


class ThreadedEngine(IoEngine, Generic[H]):
    """`IoEngine` whose threads work on open files of some kind."""

    def __init__(self, handles: OpenFiles[H]) -> None:
        """Take the files over; `_start` starts the threads."""
        self._handles = handles
        self._movers: Workers | None = None
        self._syncers: Workers | None = None

    @abstractmethod
    def _flush(self, handle: H) -> None:
        """Make what was written to a file durable.

        Raises:
            OSError: it is not.
        """

    @abstractmethod
    def _cut(self, requests: Sequence[IoRequest]) -> list[list[int]]:
        """Return runs: positions that one thread moves in one go."""

    @abstractmethod
    def _move_run(
        self, requests: Sequence[IoRequest], run: list[int], writing: bool, errors: list[int]
    ) -> list[int]:
        """Move a run's bytes, set its errors, return the positions that are done."""

    def _start(self, name: str, movers: int, syncers: int) -> None:
        self._movers = Workers(name, movers)
        # Threads of their own: a flush of the device's cache may take long, and reads would wait.
        self._syncers = Workers(f"{name}-sync", syncers)

    @property
    def open_files(self) -> int:
        """Files open at this moment."""
        return len(self._handles)

    async def close(self) -> None:
        """Finish what was submitted, close files, end the threads."""
        for workers in (self._movers, self._syncers):
            if workers is not None:
                await asyncio.to_thread(workers.close)
        self._movers = self._syncers = None
        self._handles.close()

    def forget(self, file: IoFile) -> None:
        """Close the file when its last user is done."""
        self._handles.forget(file)

    async def read(
        self, requests: Sequence[IoRequest], landed: Callable[[int], None] | None = None
    ) -> list[int]:
        """Fill buffers from files; see `IoEngine.read`."""
        return await self._move_all(requests, False, landed)

    async def write(self, requests: Sequence[IoRequest]) -> list[int]:
        """Write buffers to files; see `IoEngine.write`."""
        return await self._move_all(requests, True, None)

    async def sync(self, files: Sequence[IoFile]) -> list[int]:
        """Flush files in parallel; see `IoEngine.sync`."""
        errors = [errno.ECANCELED] * len(files)

        def flush(position: int) -> None:
            errors[position] = errno.EIO
            try:
                with self._handles.use(files[position]) as handle:
                    self._flush(handle)
            except OSError as error:
                errors[position] = error.errno or errno.EIO
            else:
                errors[position] = 0

        await _open(self._syncers).run(Batch(range(len(files)), flush))
        return errors

    async def _move_all(
        self,
        requests: Sequence[IoRequest],
        writing: bool,
        landed: Callable[[int], None] | None,
    ) -> list[int]:
        errors = [errno.ECANCELED] * len(requests)

        def execute(run: list[int]) -> None:
            if not writing:
                reach("disk.reading")
            for position in run:
                errors[position] = errno.EIO
            done = self._move_run(requests, run, writing, errors)
            if landed is not None:
                for position in done:
                    # Until it is checked it has not arrived.
                    errors[position] = errno.EIO
                    landed(position)
                    errors[position] = 0

        await _open(self._movers).run(Batch(self._cut(requests), execute))
        return errors


def _open(workers: Workers | None) -> Workers:
    if workers is None:
        raise RuntimeError("the engine is not open")
    return workers
