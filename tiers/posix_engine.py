"""The POSIX I/O engine: a few threads, direct vectored reads and writes.

A batch is cut into runs: ranges that are adjacent in a file become one vectored call, up to a
size that keeps all threads busy. Threads take one run at a time from each batch in turn, so a
small read is not stuck behind a large flush. The loop is woken once per batch.

When a merged call fails, its ranges are done again one by one. A file system that refuses
O_DIRECT is used through the page cache, and `name` says so.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from kvstore.tiers.io_engine import SHORT, IoFile, IoRequest
from kvstore.tiers.open_files import OpenFiles, check_identity
from kvstore.tiers.threaded_engine import ThreadedEngine
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
    """An open file."""

    __slots__ = ("descriptor", "direct", "writable")

    def __init__(self, descriptor: int, direct: bool, writable: bool) -> None:
        self.descriptor = descriptor
        self.direct = direct
        self.writable = writable

    def check_writable(self) -> None:
        """Raise OSError if it was opened on a file system that was read-only then."""
        if not self.writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def close(self) -> None:
        os.close(self.descriptor)


class PosixEngine(ThreadedEngine[_Handle]):
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
        super().__init__(OpenFiles(self._open_file, _Handle.close))
        self._buffered = False

    @property
    def name(self) -> str:
        """``posix``, or ``posix-buffered`` once a file system has refused O_DIRECT."""
        return "posix-buffered" if self._buffered else "posix"

    def _open_file(self, file: IoFile) -> _Handle:
        direct = writable = True
        try:
            descriptor = os.open(file.path, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno == errno.EROFS:
                # A file system that turned read-only still serves what it holds.
                descriptor = os.open(file.path, os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW)
                writable = False
            elif error.errno == errno.EINVAL:
                descriptor = os.open(file.path, os.O_RDWR | os.O_NOFOLLOW)
                direct = False
                if not self._buffered:
                    _log.warning("%s: no direct I/O here, using the page cache", file.path)
                self._buffered = True
            else:
                raise
        try:
            check_identity(os.fstat(descriptor), file)
        except OSError:
            os.close(descriptor)
            raise
        return _Handle(descriptor, direct, writable)

    async def open(self) -> None:
        """Start the threads."""
        self._start("kvstore-disk", self._thread_count, _SYNC_THREADS)

    def _flush(self, handle: _Handle) -> None:
        self._fdatasync(handle.descriptor)

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
                if writing:
                    handle.check_writable()
                if len(run) > 1:
                    merged = [buffer for position in run for buffer in _in_host(requests[position])]
                    if _move(vector, handle, merged, first.offset, writing) == 0:
                        for position in run:
                            errors[position] = 0
                        return run
                for position in run:
                    request = requests[position]
                    errors[position] = _move(
                        vector, handle, _in_host(request), request.offset, writing
                    )
                    if errors[position] == errno.EINVAL and handle.direct:
                        errors[position] = _move_bounced(vector, handle, request, writing)
        except OSError as error:
            if error.errno == errno.EROFS:
                # The next write opens it anew: the file system may be writable again by then.
                self._handles.forget(first.file)
            for position in run:
                errors[position] = error.errno or errno.EIO
        return [position for position in run if errors[position] == 0]


def _in_host(request: IoRequest) -> Sequence[memoryview]:
    """Return a request's buffers: this engine is never given device memory."""
    return cast("Sequence[memoryview]", request.buffers)


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
            for buffer in _in_host(request):
                bounce[at : at + len(buffer)] = buffer
                at += len(buffer)
        error = _move(vector, handle, [bounce], request.offset, writing)
        if not writing and not error:
            at = 0
            for buffer in _in_host(request):
                buffer[:] = bounce[at : at + len(buffer)]
                at += len(buffer)
        return error
