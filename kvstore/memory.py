"""Shared mappings, and copies between them, that do not hold the GIL.

Everything goes through ctypes: `mmap.madvise` holds the GIL for 370 ms per GiB, and Python 3.11
does not know MADV_POPULATE_WRITE.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.units import MIB, PAGE_BYTES, round_up

__all__ = ["Hurry", "Mapping", "copy_batch", "copy_block", "words_at"]

U8Array = NDArray[np.uint8]
U64Array = NDArray[np.uint64]

_PROT_READ: Final = 1
_PROT_WRITE: Final = 2
_MAP_SHARED: Final = 1
_MADV_DONTFORK: Final = 10
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

# One call that populates much keeps the mmap lock from other threads' faults.
_POPULATE_BYTES: Final = 32 * MIB
# The same for threads that give way: who is kept from its processor keeps the lock. A piece is 2 ms of
# work, 20 ms where everything else is busy too.
_GENTLE_POPULATE_BYTES: Final = 4 * MIB
# A tenth of the share of a thread that does not give way. Not 19, which is a seventieth: between two
# pieces a thread holds the GIL, and who waits for it waits for that share.
_GENTLE_NICE: Final = 10
_MIN_POPULATE_BYTES: Final = 2 * MIB  # a huge page
# UIO_MAXIOV: more segments in one call are refused with EINVAL.
_MAX_SEGMENTS: Final = 1024
# Below this the loop in Python costs more than what `memcpy` gains.
_ONE_BY_ONE_BYTES: Final = 32 * 1024
# A copy that took longer than at this rate, plus this wait, has waited for the GIL.
_SLOW_COPY_BYTES_PER_SECOND: Final = 2e9
_GIL_WAIT_SECONDS: Final = 1e-3
_CONTENDED_SECONDS: Final = 1.0
_contended_at = -_CONTENDED_SECONDS  # a hint: races between threads only cost time

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memcpy.restype = ctypes.c_void_p
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


class Hurry:
    """Whether somebody waits for work that gives way to others until then. Any thread."""

    def __init__(self, *, now: bool = False) -> None:
        """Begin with nobody in a hurry, or with somebody."""
        self._changed = threading.Condition()
        self._now = now
        self._working = 0

    @property
    def set_already(self) -> bool:
        """Whether somebody is in a hurry."""
        return self._now

    def set(self) -> None:
        """Somebody is. Idempotent."""
        with self._changed:
            self._now = True
            self._changed.notify_all()

    def begin(self) -> None:
        """Count one thread that works gently."""
        with self._changed:
            self._working += 1

    def work_gently(self, work: Callable[[], None]) -> None:
        """Work on the calling thread, which was counted, and which gives way from now on, for good."""
        try:
            # Refused to who has given way further already.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _GENTLE_NICE)
            work()
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Wait until somebody is in a hurry, or all who work gently have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._now or not self._working)


def _unmap(address: int, length: int, pid: int) -> None:
    # In a forked child the range may be left out (MADV_DONTFORK), and be somebody else's by now.
    if os.getpid() == pid and _libc.munmap(address, length) != 0:
        raise _os_error("munmap")


class Mapping:
    """A file mapped MAP_SHARED.

    The memory stays mapped until `close` was called *and* every view of it is gone, so that a
    forgotten view reads stale bytes instead of crashing the process. Whoever works with bare
    addresses has no such protection.

    Attributes:
        address: of the first byte, page aligned.
        length: bytes.
        closed: whether `close` was called.
    """

    def __init__(self, fd: int, length: int, *, writable: bool = True) -> None:
        """Map the first `length` bytes of `fd`, which may be closed afterwards.

        Raises:
            OSError: the kernel refuses.
        """
        prot = _PROT_READ | (_PROT_WRITE if writable else 0)
        address = _libc.mmap(None, length, prot, _MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            raise _os_error(f"mmap of {length} bytes")
        self.address: int = address
        self.length = length
        self.closed = False
        buffer = (ctypes.c_uint8 * length).from_address(address)
        self._unmap = weakref.finalize(buffer, _unmap, address, length, os.getpid())
        # At exit the kernel unmaps; other threads may still be copying.
        self._unmap.atexit = False
        memory = memoryview(buffer).cast("B")
        self._memory: memoryview | None = memory if writable else memory.toreadonly()

    @property
    def array(self) -> U8Array:
        """The bytes as an array, shape (length,).

        Raises:
            ValueError: the mapping is closed.
        """
        return np.frombuffer(self._open_memory(), np.uint8)

    def view(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset`, without copying.

        Raises:
            ValueError: the range is outside the mapping, or the mapping is closed.
        """
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(f"{offset}+{length} is outside a mapping of {self.length} bytes")
        return self._open_memory()[offset : offset + length]

    def _open_memory(self) -> memoryview:
        if self._memory is None:
            raise ValueError("the mapping is closed")
        return self._memory

    def close(self) -> bool:
        """Unmap. Idempotent.

        Returns:
            True when the memory is unmapped now, False when views of it are still alive: it goes
            with the last of them.
        """
        self._memory = None
        self.closed = True
        return not self._unmap.alive

    def _advise(self, offset: int, length: int, advice: int) -> int:
        """Return 0 or the error number."""
        self._open_memory()
        if _libc.madvise(self.address + offset, length, advice) == 0:
            return 0
        return ctypes.get_errno()

    def dontfork(self) -> None:
        """Leave the mapping out of forked children.

        Raises:
            OSError: the kernel refuses.
        """
        number = self._advise(0, self.length, _MADV_DONTFORK)
        if number:
            raise OSError(number, f"madvise(MADV_DONTFORK): {os.strerror(number)}")

    def advise_huge(self) -> bool:
        """Ask for huge pages; return whether the kernel took the advice."""
        return self._advise(0, self.length, _MADV_HUGEPAGE) == 0

    def populate(
        self, threads: int = 1, *, reserved: bool = True, hurry: Hurry | None = None
    ) -> bool:
        """Fault every page in, so that later copies do not; contents stay as they are.

        Blocks for 0.5 to 1 s per GiB and thread, without the GIL; huge pages take a tenth of it.

        Args:
            threads: how many work on it, this one included.
            reserved: the file has all its pages (`posix_fallocate`). Otherwise nothing is done on
                kernels that can populate only by touching: with the file system full, that is
                SIGBUS.
            hurry: give way to whoever needs the processors, until somebody is in a hurry. Where
                nobody needs them, that is as fast as ever. None: do not give way.

        Returns:
            False when nothing was done for that reason.

        Raises:
            OSError: no memory (ENOMEM), or the file system is full (ENOSPC).
        """
        self._open_memory()
        gentle = hurry is not None and not hurry.set_already
        most = _GENTLE_POPULATE_BYTES if gentle else _POPULATE_BYTES
        step = min(round_up(-(-self.length // threads), _MIN_POPULATE_BYTES), most)
        starts = iter(range(0, self.length, step))
        guard = threading.Lock()
        errors: list[int] = []

        def work() -> None:
            while not errors:
                with guard:
                    start = next(starts, None)
                if start is None:
                    return
                number = self._populate(start, min(step, self.length - start), reserved)
                if number:
                    errors.append(number)

        helpers: list[threading.Thread] = []

        def begin(target: Callable[[], None], count: int) -> None:
            for _ in range(count):
                helpers.append(threading.Thread(target=target, name="populate"))
                helpers[-1].start()

        if gentle:
            assert hurry is not None
            # Not the caller: a thread that gives way does so for good.
            for _ in range(threads):
                hurry.begin()
                begin(lambda: hurry.work_gently(work), 1)
            hurry.wait()
        if operator.length_hint(starts) and not errors:
            begin(work, threads - 1)
            work()
        for helper in helpers:
            helper.join()
        if not errors:
            return True
        if errors[0] == errno.EINVAL:
            return False
        raise OSError(errors[0], f"populating memory: {os.strerror(errors[0])}")

    def fault_in(self, start: int, length: int) -> None:
        """Fill the page tables of a part; the file has all its pages. Without the GIL.

        Args:
            start: offset, of a page.
            length: bytes.

        Raises:
            OSError: no memory (ENOMEM).
        """
        for at in range(start, start + length, _POPULATE_BYTES):
            piece = min(_POPULATE_BYTES, start + length - at)
            number = self._populate(at, piece, reserved=True)
            if number:
                raise OSError(number, f"populating memory: {os.strerror(number)}")

    def _populate(self, start: int, length: int, reserved: bool) -> int:
        """Return 0 or the error number; EINVAL means that the kernel is too old."""
        while (number := self._advise(start, length, _MADV_POPULATE_WRITE)) in (
            errno.EAGAIN,
            errno.EINTR,
        ):
            pass
        if number == errno.EFAULT:  # where touching the page would have been SIGBUS
            return errno.ENOSPC
        if number != errno.EINVAL or not reserved:
            return number
        # Reading is enough for shared memory, and unlike writing back what was read it cannot
        # undo what somebody else writes meanwhile.
        self.array[start : start + length : PAGE_BYTES].max()
        return 0


def copy_block(destination: int, source: int, length: int) -> None:
    """Copy `length` bytes between two addresses that do not overlap, without the GIL."""
    _libc.memcpy(destination, source, length)


def _coalesce(
    destinations: U64Array, sources: U64Array, lengths: U64Array
) -> tuple[U64Array, U64Array, U64Array]:
    """Merge neighbours that are adjacent on both sides."""
    if len(lengths) < 2:
        return destinations, sources, lengths
    breaks = (destinations[:-1] + lengths[:-1] != destinations[1:]) | (
        sources[:-1] + lengths[:-1] != sources[1:]
    )
    if breaks.all():
        return destinations, sources, lengths
    first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return destinations[first], sources[first], np.add.reduceat(lengths, first)


def copy_batch(destinations: U64Array, sources: U64Array, lengths: U64Array | int) -> None:
    """Copy many segments inside this process in one native call per 1,024 of them.

    Two ways, and which is faster depends on what the other threads do. `memcpy` moves more bytes a
    second, but takes the GIL back after every segment, and waits up to 5 ms for it each time
    while another thread runs Python. `process_vm_readv` on the own pid takes the whole list at
    once. So large segments go by `memcpy` until one of them had to wait, and the rest (and what
    comes within the next second) in one call. Where the kernel forbids that call (seccomp),
    everything goes by `memcpy`.

    Measured on two cores, milliseconds, the other thread idle / running Python all the time:

    ==================  =========  ===================  ==========
    segments            `memcpy`   `process_vm_readv`   this
    ==================  =========  ===================  ==========
    64 of 2 MiB         6.9 / 338  13.5 / 18.7          7.0 / 19.3
    330 of 98,304 B     1.5 / 616   3.4 /  8.8          1.5 /  9.5
    64 of 32 KiB        0.1 /  51   0.3 /  5.7          0.1 /  5.7
    1,024 of 8 KiB      1.1 / 538   1.4 /  7.3          1.2 / 12.7
    ==================  =========  ===================  ==========

    The first call that meets a busy thread takes 5 to 8 ms longer.

    Args:
        destinations: addresses, shape (n,).
        sources: addresses, shape (n,); no source overlaps a destination.
        lengths: bytes of each segment, shape (n,), or of all of them.

    Raises:
        OSError: an address is not mapped (EFAULT); some segments may have been copied.
        ValueError: the arrays differ in length.
    """
    count = len(destinations)
    if len(sources) != count or (not isinstance(lengths, int) and len(lengths) != count):
        raise ValueError("destinations, sources and lengths differ in number")
    dst = np.ascontiguousarray(destinations, np.uint64)
    src = np.ascontiguousarray(sources, np.uint64)
    size = (
        np.full(count, lengths, np.uint64)
        if isinstance(lengths, int)
        else np.ascontiguousarray(lengths, np.uint64)
    )
    dst, src, size = _coalesce(dst, src, size)
    if len(size) and int(size.sum()) >= len(size) * _ONE_BY_ONE_BYTES:
        done = _copy_one_by_one(dst, src, size)
        dst, src, size = dst[done:], src[done:], size[done:]
    local = np.stack([dst, size], axis=1)
    remote = np.stack([src, size], axis=1)
    for at in range(0, len(size), _MAX_SEGMENTS):
        _copy_segments(local[at : at + _MAX_SEGMENTS], remote[at : at + _MAX_SEGMENTS])


def _copy_one_by_one(destinations: U64Array, sources: U64Array, lengths: U64Array) -> int:
    """Copy by `memcpy` while nobody else wants the GIL; return how many segments were copied."""
    global _contended_at
    began = time.perf_counter()
    if began - _contended_at < _CONTENDED_SECONDS:
        return 0
    done = 0
    for destination, source, length in zip(
        destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True
    ):
        copy_block(destination, source, length)
        done += 1
        now = time.perf_counter()
        if now - began > _GIL_WAIT_SECONDS + length / _SLOW_COPY_BYTES_PER_SECOND:
            _contended_at = now
            break
        began = now
    return done


def _copy_segments(local: NDArray[Any], remote: NDArray[Any]) -> None:
    """Copy at most 1,024 segments; rows are struct iovec: address, bytes."""
    while len(local):
        copied = _libc.process_vm_readv(
            os.getpid(), local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
        )
        if copied < 0:
            number = ctypes.get_errno()
            if number not in (errno.EPERM, errno.ENOSYS):
                raise OSError(number, f"copying {len(local)} segments: {os.strerror(number)}")
            for (destination, length), source in zip(
                local.tolist(), remote[:, 0].tolist(), strict=True
            ):
                copy_block(destination, source, length)
            return
        ends = np.cumsum(local[:, 1])
        if copied == ends[-1]:
            return
        # Short: the kernel stops at 2 GiB, or before a page that it cannot reach.
        if copied == 0:
            raise OSError(errno.EFAULT, "copying segments: an address is not mapped")
        done = int(np.searchsorted(ends, np.uint64(copied), side="right"))
        inside = copied - (int(ends[done - 1]) if done else 0)
        local, remote = local[done:].copy(), remote[done:].copy()
        local[0, 0] += np.uint64(inside)
        remote[0, 0] += np.uint64(inside)
        local[0, 1] -= np.uint64(inside)
        remote[0, 1] -= np.uint64(inside)


# All memory that a program can have, but for the first word: an array cannot begin at address 0.
# Nothing is touched until something is indexed.
_MEMORY: Final = np.ctypeslib.as_array((ctypes.c_uint64 * (1 << 57)).from_address(8))


def words_at(addresses: NDArray[np.int64]) -> U64Array:
    """Read 8-byte words of this process's memory.

    Args:
        addresses: multiples of 8, shape (n,); each must be mapped.
    """
    words: U64Array = _MEMORY[(addresses >> 3) - 1]
    return words
