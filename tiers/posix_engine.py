"""The POSIX I/O engine: a few threads, direct vectored reads and writes.

A batch is cut into runs: ranges that are adjacent in a file become one vectored call, up to a
size that keeps all threads busy. Threads take one run at a time from each batch in turn, so a
small read is not stuck behind a large flush. The loop is woken once per batch.

When a merged call fails, its ranges are done again one by one. A file system that refuses
O_DIRECT is used through the page cache, and `name` says so.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import resource
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from kvstore.tiers.io_engine import REPLACED, SHORT, IoEngine, IoFile, IoRequest
from kvstore.units import MIB, PAGE_BYTES

__all__ = ["PosixEngine"]

_log = logging.getLogger(__name__)

_Vector = Callable[[int, Sequence[Any], int], int]

_IOV_MAX: Final = min(1024, os.sysconf("SC_IOV_MAX"))
# Between these a call's size hardly matters on NVMe; below, the cost per call shows, above,
# checking digests no longer overlaps reading.
_MIN_RUN_BYTES: Final = 1 * MIB
_MAX_RUN_BYTES: Final = 8 * MIB
_SYNC_THREADS: Final = 4


class _Handle:
    """An open file. Guarded by the lock of `_Handles`."""

    __slots__ = ("descriptor", "direct", "doomed", "users")

    def __init__(self, descriptor: int, direct: bool) -> None:
        self.descriptor = descriptor
        self.direct = direct
        self.users = 0
        self.doomed = False


class _Handles:
    """Open files, least recently used first, at most `limit` of them while idle."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[IoFile, _Handle] = OrderedDict()
        self.buffered = False

    @contextmanager
    def use(self, file: IoFile) -> Iterator[_Handle]:
        """Yield the file's handle, opened if need be.

        Raises:
            OSError: the path is gone, or names something else by now (`REPLACED`).
        """
        # Also for a file that is open already: its bytes may live on without a name, and what
        # is written there is gone with the last descriptor.
        found = os.stat(file.path)  # noqa: PTH116 - a Path per call costs more than the stat
        if (found.st_dev, found.st_ino) != (file.device, file.inode):
            raise OSError(REPLACED, os.strerror(REPLACED), file.path)
        handle = self._take(file)
        try:
            yield handle
        finally:
            with self._lock:
                handle.users -= 1
                self._shrink(handle)

    def _take(self, file: IoFile) -> _Handle:
        with self._lock:
            handle = self._open.get(file)
            if handle is not None:
                handle.users += 1
                self._open.move_to_end(file)
                return handle
        fresh = self._open_file(file)
        with self._lock:
            handle = self._open.setdefault(file, fresh)
            handle.users += 1
            self._open.move_to_end(file)
        if handle is not fresh:
            os.close(fresh.descriptor)
        return handle

    def _open_file(self, file: IoFile) -> _Handle:
        direct = True
        try:
            descriptor = os.open(file.path, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.EROFS:
                # A file system that turned read-only still serves what it holds.
                descriptor = os.open(file.path, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW)
            elif error.errno == errno.EINVAL:
                descriptor = os.open(file.path, os.O_RDWR | os.O_NOFOLLOW)
                direct = False
                if not self.buffered:
                    _log.warning("%s: no direct I/O here, using the page cache", file.path)
                self.buffered = True
            else:
                raise
        opened = os.fstat(descriptor)
        if (opened.st_dev, opened.st_ino) != (file.device, file.inode):
            os.close(descriptor)
            raise OSError(REPLACED, os.strerror(REPLACED), file.path)
        return _Handle(descriptor, direct)

    def _shrink(self, handle: _Handle) -> None:
        """Close what is doomed or too much and idle. The lock is held."""
        if handle.doomed and not handle.users:
            os.close(handle.descriptor)
        if len(self._open) > self._limit:
            idle = next((f for f, h in self._open.items() if not h.users), None)
            if idle is not None:
                os.close(self._open.pop(idle).descriptor)

    def forget(self, file: IoFile) -> None:
        """Close the file now, or when its last user is done."""
        with self._lock:
            handle = self._open.pop(file, None)
            if handle is not None:
                handle.doomed = True
                if not handle.users:
                    os.close(handle.descriptor)

    def close(self) -> None:
        """Close every file; nobody uses one any more."""
        with self._lock:
            for handle in self._open.values():
                os.close(handle.descriptor)
            self._open.clear()

    def __len__(self) -> int:
        with self._lock:
            return len(self._open)


class _Batch:
    """Jobs that one coroutine waits for. Guarded by the condition of its `_Workers`."""

    def __init__(self, jobs: Sequence[Any], execute: Callable[[Any], None]) -> None:
        self.jobs = deque(jobs)
        self.execute = execute
        self.left = len(self.jobs)
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()

    def finish(self) -> None:
        """Wake the waiter; called once, on any thread."""
        try:
            self.loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:
            _log.warning("a transfer ended after its event loop")

    def _resolve(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _nothing(_job: Any) -> None:
    """Stands in for what is done."""


class _Workers:
    """Threads that take one job from each batch in turn."""

    def __init__(self, name: str, threads: int) -> None:
        self._condition = threading.Condition()
        self._batches: deque[_Batch] = deque()
        self._closing = False
        # Daemon threads: a process that ends without `close` must not hang on them.
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, batch: _Batch) -> None:
        """Run the batch's jobs; return when none runs any more, even when cancelled."""
        if not batch.left:
            return
        with self._condition:
            self._batches.append(batch)
            self._condition.notify(len(batch.jobs))
        try:
            await asyncio.shield(batch.done)
        except asyncio.CancelledError:
            self._drop(batch)
            while not batch.done.done():
                try:
                    await asyncio.shield(batch.done)
                except asyncio.CancelledError:
                    continue
            raise

    def _drop(self, batch: _Batch) -> None:
        with self._condition:
            batch.left -= len(batch.jobs)
            batch.jobs.clear()
            if batch in self._batches:
                self._batches.remove(batch)
            if not batch.left:
                batch.finish()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._batches:
                    if self._closing:
                        return
                    self._condition.wait()
                batch = self._batches.popleft()
                job = batch.jobs.popleft()
                if batch.jobs:
                    self._batches.append(batch)
            try:
                batch.execute(job)
            except Exception:  # noqa: BLE001 - a thread's boundary: the job's errors say EIO
                _log.exception("an I/O job failed")
            with self._condition:
                batch.left -= 1
                if not batch.left:
                    # Whoever waits may unmap the buffers as soon as it is told.
                    batch.execute = _nothing
                    batch.finish()
            # Not held while waiting for the next one: its buffers keep memory mapped.
            del batch, job

    def close(self) -> None:
        """Finish what was submitted and end the threads. Blocks."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()


class PosixEngine(IoEngine):
    """`IoEngine` over ``preadv``, ``pwritev`` and ``fdatasync``."""

    def __init__(
        self,
        threads: int = 4,
        *,
        max_run_bytes: int = _MAX_RUN_BYTES,
        preadv: _Vector = os.preadv,
        pwritev: _Vector = os.pwritev,
        fdatasync: Callable[[int], None] = os.fdatasync,
    ) -> None:
        """Configure the engine; `open` starts it.

        Args:
            threads: transfers in flight at once, at least 1.
            max_run_bytes: largest vectored call that adjacent ranges are merged into.
            preadv: the system call, or a stand-in that fails on purpose.
            pwritev: likewise.
            fdatasync: likewise.
        """
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._thread_count = threads
        self._max_run_bytes = max_run_bytes
        self._preadv = preadv
        self._pwritev = pwritev
        self._fdatasync = fdatasync
        # A quarter of what the process may open: sockets and slabs need theirs.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = 512 if soft == resource.RLIM_INFINITY else max(8, min(512, soft // 4))
        self._handles = _Handles(limit)
        self._movers: _Workers | None = None
        self._syncers: _Workers | None = None

    @property
    def name(self) -> str:
        """``posix``, or ``posix-buffered`` once a file system has refused O_DIRECT."""
        return "posix-buffered" if self._handles.buffered else "posix"

    @property
    def open_files(self) -> int:
        """Files open at this moment."""
        return len(self._handles)

    async def open(self) -> None:
        """Start the threads."""
        self._movers = _Workers("kvstore-disk", self._thread_count)
        # Threads of their own: a flush of the device's cache may take long, and reads would wait.
        self._syncers = _Workers("kvstore-sync", _SYNC_THREADS)

    async def close(self) -> None:
        """Finish what was submitted, close files, end the threads."""
        for workers in (self._movers, self._syncers):
            if workers is not None:
                await asyncio.to_thread(workers.close)
        self._movers = self._syncers = None
        self._handles.close()

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
                    self._fdatasync(handle.descriptor)
            except OSError as error:
                errors[position] = error.errno or errno.EIO
            else:
                errors[position] = 0

        if self._syncers is None:
            raise RuntimeError("the engine is not open")
        await self._syncers.run(_Batch(range(len(files)), flush))
        return errors

    def forget(self, file: IoFile) -> None:
        """Close the file when its last user is done."""
        self._handles.forget(file)

    async def _move_all(
        self,
        requests: Sequence[IoRequest],
        writing: bool,
        landed: Callable[[int], None] | None,
    ) -> list[int]:
        errors = [errno.ECANCELED] * len(requests)

        def execute(run: list[int]) -> None:
            for position in run:
                errors[position] = errno.EIO
            done = self._move_run(requests, run, writing, errors)
            if landed is not None:
                for position in done:
                    # Until it is checked it has not arrived.
                    errors[position] = errno.EIO
                    landed(position)
                    errors[position] = 0

        if self._movers is None:
            raise RuntimeError("the engine is not open")
        await self._movers.run(_Batch(self._cut(requests), execute))
        return errors

    def _cut(self, requests: Sequence[IoRequest]) -> list[list[int]]:
        """Return runs of positions; the requests of a run are adjacent in one file."""
        order = sorted(range(len(requests)), key=lambda i: (requests[i].file, requests[i].offset))
        lengths = [request.length for request in requests]
        share = sum(lengths) // self._thread_count
        limit = min(max(share, _MIN_RUN_BYTES), self._max_run_bytes)
        runs: list[list[int]] = []
        file: IoFile | None = None
        end = size = vectors = 0
        for position in order:
            request = requests[position]
            more = lengths[position]
            if (
                request.file == file
                and request.offset == end
                and size + more <= limit
                and vectors + len(request.buffers) <= _IOV_MAX
            ):
                runs[-1].append(position)
            else:
                runs.append([position])
                file, size, vectors = request.file, 0, 0
            end = request.offset + more
            size += more
            vectors += len(request.buffers)
        return runs

    def _move_run(
        self, requests: Sequence[IoRequest], run: list[int], writing: bool, errors: list[int]
    ) -> list[int]:
        """Move a run's bytes, set its errors, return the positions that are done."""
        first = requests[run[0]]
        vector = self._pwritev if writing else self._preadv
        try:
            with self._handles.use(first.file) as handle:
                if len(run) > 1:
                    merged = [buffer for position in run for buffer in requests[position].buffers]
                    if _move(vector, handle, merged, first.offset, writing) == 0:
                        for position in run:
                            errors[position] = 0
                        return run
                for position in run:
                    request = requests[position]
                    errors[position] = _move(
                        vector, handle, request.buffers, request.offset, writing
                    )
                    if errors[position] == errno.EINVAL and handle.direct:
                        errors[position] = _move_bounced(vector, handle, request, writing)
        except OSError as error:
            for position in run:
                errors[position] = error.errno or errno.EIO
        return [position for position in run if errors[position] == 0]


def _move(
    vector: _Vector, handle: _Handle, buffers: Sequence[memoryview], offset: int, writing: bool
) -> int:
    """Move all bytes, going on after short calls; return 0 or the errno."""
    views = list(buffers)
    left = sum(map(len, views))
    while left:
        try:
            moved = vector(handle.descriptor, views[:_IOV_MAX], offset)
        except OSError as error:
            return error.errno or errno.EIO
        if handle.direct and moved < left:
            moved -= moved % PAGE_BYTES  # direct I/O can only go on from an aligned offset
        if moved <= 0:
            return errno.EIO if writing else SHORT
        left -= moved
        offset += moved
        if left:
            views = _skip(views, moved)
    return 0


def _skip(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of the views after their first ``count`` bytes."""
    at = 0
    while count >= len(views[at]):
        count -= len(views[at])
        at += 1
    return [views[at][count:], *views[at + 1 :]] if count else views[at:]


def _move_bounced(vector: _Vector, handle: _Handle, request: IoRequest, writing: bool) -> int:
    """Move through aligned memory: buffers that are not aligned for O_DIRECT still work."""
    with mmap.mmap(-1, request.length) as memory, memoryview(memory) as bounce:
        if writing:
            at = 0
            for buffer in request.buffers:
                bounce[at : at + len(buffer)] = buffer
                at += len(buffer)
        error = _move(vector, handle, [bounce], request.offset, writing)
        if not writing and not error:
            at = 0
            for buffer in request.buffers:
                buffer[:] = bounce[at : at + len(buffer)]
                at += len(buffer)
        return error
