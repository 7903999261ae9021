"""The kvikio I/O engine: files straight to and from device memory, through cuFile.

With NVIDIA's storage driver (`nvidia-fs`) and a file system that supports it, cuFile moves bytes
between the disk and the GPU without host memory (GPUDirect Storage). Without, kvikio reads into
pinned buffers of its own and copies from there: the *compat* mode. `name` says which one it is,
as the library itself decided, never as it was wished for.

kvikio splits each transfer into tasks and has threads of its own for them; this engine's threads
only submit and wait. It is loaded at `open`: without a CUDA driver it cannot even be imported.
This is the one module that does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import TierUnavailable
from kvstore.tiers.io_engine import SHORT, IoFile, IoRequest
from kvstore.tiers.open_files import OpenFiles, check_identity
from kvstore.tiers.threaded_engine import ThreadedEngine
from kvstore.units import MIB

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["KvikioEngine"]

_log = logging.getLogger(__name__)

# Transfers whose tasks kvikio's threads share; each waits for its own, and has what has arrived
# checked by the caller.
_WAITERS: Final = 8
# The library's defaults are one thread and 4 MiB. Measured in compat mode, reading 2 MiB pieces: on
# a file system in memory 4 threads reach 0.9 and 16 threads 0.9 of what 8 do, larger tasks nothing
# more; one disk was saturated by 4 threads, with 512 KiB a little better than with 2 MiB.
_THREADS: Final = 8
_TASK_BYTES: Final = MIB // 2


class KvikioEngine(ThreadedEngine[Any]):
    """`IoEngine` over kvikio; buffers may be in host or device memory."""

    def __init__(self, threads: int = _THREADS, *, task_bytes: int = _TASK_BYTES) -> None:
        """Configure the engine; `open` loads kvikio and starts it.

        Args:
            threads: of kvikio, that is tasks in flight at once.
            task_bytes: largest piece of a transfer that one thread moves.
        """
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._thread_count = threads
        self._task_bytes = task_bytes
        super().__init__(OpenFiles(self._open_file, _close_file))
        self._kvikio: Any = None
        self._name = "cufile"

    @property
    def name(self) -> str:
        """``cufile-gds`` or ``cufile-compat``; ``cufile`` before `open`."""
        return self._name

    async def open(self) -> None:
        """Load kvikio, start the threads.

        Raises:
            TierUnavailable: it is not there, or finds no driver; one line says what.
        """
        try:
            kvikio = await asyncio.to_thread(_load)
            _configure(kvikio, self._thread_count, self._task_bytes)
            self._name = "cufile-gds" if _direct(kvikio) else "cufile-compat"
        except Exception as error:
            # The boundary to a library that raises what it likes, and fails in many ways.
            text = " ".join(str(error).split()) or type(error).__name__
            raise TierUnavailable("gpu", f"kvikio does not work: {text}") from error
        self._kvikio = kvikio
        self._start("kvstore-cufile", _WAITERS, 1)

    def _open_file(self, file: IoFile) -> Any:
        try:
            handle = self._kvikio.CuFile(file.path, "r+")
        except RuntimeError as error:
            raise OSError(_number(error), str(error), file.path) from error
        try:
            check_identity(os.fstat(handle.fileno()), file)
        except OSError:
            handle.close()
            raise
        return handle

    def _flush(self, handle: Any) -> None:
        os.fdatasync(handle.fileno())

    def _cut(self, requests: Sequence[IoRequest]) -> list[list[int]]:
        return [[position] for position in range(len(requests))]

    def _move_run(
        self, requests: Sequence[IoRequest], run: list[int], writing: bool, errors: list[int]
    ) -> list[int]:
        for position in run:
            errors[position] = self._move(requests[position], writing)
        return [position for position in run if not errors[position]]

    def _move(self, request: IoRequest, writing: bool) -> int:
        """Move one range, its buffers at once; return 0 or the errno when none is under way."""
        try:
            with self._handles.use(request.file) as handle:
                begin = handle.pwrite if writing else handle.pread
                offset = request.offset
                futures = []
                error = 0
                try:
                    for buffer in request.buffers:
                        futures.append((begin(buffer, len(buffer), offset), len(buffer)))
                        offset += len(buffer)
                except Exception as failed:  # noqa: BLE001
                    # Whatever the library raises: those that it has begun are waited for.
                    error = _number(failed)
                for future, length in futures:
                    error = _wait(future, length, writing) or error
                return error
        except OSError as failed:
            return failed.errno or errno.EIO


def _wait(future: Any, length: int, writing: bool) -> int:
    try:
        moved = future.get()
    except Exception as error:  # noqa: BLE001
        # Likewise: there are others to be waited for.
        return _number(error)
    if moved < length:
        return errno.EIO if writing else SHORT
    return 0


def _number(error: BaseException) -> int:
    """Return the errno that an exception of kvikio names in its text, else EIO."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = re.search(r"errno[^\d]{0,4}(\d+)|\[Errno (\d+)\]", str(error), re.IGNORECASE)
    if found:
        return int(found[1] or found[2])
    text = str(error)
    return next(
        (n for n in (errno.ENOENT, errno.EACCES, errno.ENOSPC) if os.strerror(n) in text),
        errno.EIO,
    )


def _load() -> ModuleType:
    import kvikio
    import kvikio.cufile_driver
    import kvikio.defaults

    module: ModuleType = kvikio
    return module


def _configure(kvikio: Any, threads: int, task_bytes: int) -> None:
    """Set the library up; it has one set of settings for the whole process."""
    kvikio.defaults.set({"num_threads": threads, "task_size": task_bytes})
    for setting in ("auto_direct_io_read", "auto_direct_io_write"):
        # In compat mode: not through the page cache, which would keep what passes, outside of any
        # limit. Early releases do not know these.
        with contextlib.suppress(KeyError, ValueError):
            kvikio.defaults.set({setting: True})


def _direct(kvikio: Any) -> bool:
    """Return whether transfers bypass host memory."""
    if kvikio.defaults.get("compat_mode") == kvikio.CompatMode.ON:
        return False
    if kvikio.defaults.is_compat_mode_preferred():
        return False
    return bool(kvikio.cufile_driver.get("is_gds_available"))


def _close_file(handle: Any) -> None:
    handle.close()
