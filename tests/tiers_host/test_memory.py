"""Mappings and batched copies: right bytes for every way in which they can be made."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import memory
from kvstore.memory import Hurry, Mapping, copy_batch, copy_block, words_at
from kvstore.units import MIB


def _mapping(length: int) -> Mapping:
    fd = os.memfd_create("test")
    os.posix_fallocate(fd, 0, length)
    try:
        return Mapping(fd, length)
    finally:
        os.close(fd)


@pytest.fixture
def pair() -> Iterator[tuple[Mapping, Mapping]]:
    """Return a source of random bytes and a destination of zeros, 8 MiB each."""
    source, destination = _mapping(8 * MIB), _mapping(8 * MIB)
    source.array[:] = np.random.default_rng(7).integers(0, 256, 8 * MIB, np.uint8)
    yield source, destination
    source.close()
    destination.close()


def _mapped_addresses() -> set[int]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split("-")[0], 16) for line in lines}


def _refuse(number: int) -> Any:
    def call(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    return call


_LIBC = memory._libc


class _Libc:
    """The C library with one function replaced."""

    def __init__(self, **replaced: Any) -> None:
        self._replaced = replaced
        self._real = _LIBC

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._real, name)


def _segments(seed: int, count: int, longest: int) -> tuple[Any, Any, Any]:
    """Return offsets and lengths, odd ones, empty ones and adjacent ones among them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, count).astype(np.uint64)
    gaps = rng.integers(0, 3, count).astype(np.uint64)
    starts = np.concatenate(([0], np.cumsum(lengths + gaps)[:-1])).astype(np.uint64)
    shift = np.uint64(rng.integers(0, 4096))
    # Runs that are adjacent on both sides, in an order that is not that of the addresses.
    order = np.concatenate([p for p in np.array_split(np.arange(count), 7)][::-1])
    return starts[order], (starts + shift)[order], lengths[order]


@pytest.mark.parametrize("how", ["chosen", "contended", "forbidden", "missing", "short"])
@pytest.mark.parametrize(("count", "longest"), [(1, 9000), (12, 200_000), (3000, 2000)])
def test_copies_exactly_the_segments_asked_for(
    pair: tuple[Mapping, Mapping],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    count: int,
    longest: int,
) -> None:
    source, destination = pair
    if how == "contended":
        monkeypatch.setattr(memory, "_contended_at", float("inf"))
    elif how in ("forbidden", "missing"):
        number = errno.EPERM if how == "forbidden" else errno.ENOSYS
        monkeypatch.setattr(memory, "_libc", _Libc(process_vm_readv=_refuse(number)))
    elif how == "short":
        monkeypatch.setattr(memory, "_contended_at", float("inf"))
        real = memory._libc.process_vm_readv

        def stingy(pid: int, local: int, n: int, remote: int, m: int, flags: int) -> int:
            """Copy the first three segments and half of the fourth."""
            kept = min(n, 4)
            iovecs = (ctypes.c_uint64 * (2 * kept)).from_address(remote)
            saved = iovecs[2 * kept - 1]
            if kept == 4:
                iovecs[7] = saved // 2
            copied: int = real(pid, local, kept, remote, kept, flags)
            iovecs[2 * kept - 1] = saved
            return copied

        monkeypatch.setattr(memory, "_libc", _Libc(process_vm_readv=stingy))
    to, frm, lengths = _segments(count, count, longest)
    expected = np.zeros(8 * MIB, np.uint8)
    original = source.array.copy()
    for a, b, n in zip(to.tolist(), frm.tolist(), lengths.tolist(), strict=True):
        expected[a : a + n] = original[b : b + n]
    copy_batch(to + np.uint64(destination.address), frm + np.uint64(source.address), lengths)
    assert np.array_equal(destination.array, expected)
    assert np.array_equal(source.array, original)


def test_equal_lengths_may_be_one_number(pair: tuple[Mapping, Mapping]) -> None:
    source, destination = pair
    at = np.arange(0, 5000, 5, dtype=np.uint64)
    copy_batch(at + np.uint64(destination.address), at + np.uint64(source.address), 3)
    expected = np.zeros(5000, np.uint8)
    for i in range(0, 5000, 5):
        expected[i : i + 3] = source.array[i : i + 3]
    assert np.array_equal(destination.array[:5000], expected)
    assert not destination.array[5000:].any()
    copy_batch(at[:0], at[:0], 3)
    copy_batch(at[:2] + np.uint64(1), at[:2] + np.uint64(1), 0)  # nothing to touch there


def test_more_than_the_kernels_limit_of_two_gib_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel cuts a call at 2 GiB - 4 KiB; the rest must follow. Memory is mapped once."""
    length = 4 * MIB
    source, destination = _mapping(length), _mapping(length)
    source.array[:] = 5
    source.array[-1] = 77
    count = 600  # 2.3 GiB, all into the same place
    monkeypatch.setattr(memory, "_contended_at", float("inf"))
    copy_batch(
        np.full(count, destination.address, np.uint64),
        np.full(count, source.address, np.uint64),
        length,
    )
    assert np.array_equal(source.array, destination.array)


def test_an_unmapped_address_is_an_error_in_one_call(
    pair: tuple[Mapping, Mapping], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = pair
    monkeypatch.setattr(memory, "_contended_at", float("inf"))
    to = np.array([0, 8192], np.uint64) + np.uint64(destination.address)
    frm = np.array([source.address, 4096], np.uint64)
    with pytest.raises(OSError, match=r"copying") as caught:
        copy_batch(to, frm, 100)
    assert caught.value.errno == errno.EFAULT
    with pytest.raises(ValueError, match="differ in number"):
        copy_batch(to, frm[:1], 100)


def test_threads_copy_at_the_same_time(pair: tuple[Mapping, Mapping]) -> None:
    source, destination = pair
    quarter = 2 * MIB

    def work(part: int) -> None:
        at = np.arange(part * quarter, (part + 1) * quarter, 1024, dtype=np.uint64)
        at = np.random.default_rng(part).permutation(at)
        for _ in range(5):
            copy_batch(at + np.uint64(destination.address), at + np.uint64(source.address), 1024)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(source.array, destination.array)


def test_a_mapping_goes_with_its_last_view() -> None:
    mapping = _mapping(1 * MIB)
    view = mapping.view(4096, 4096)
    view[:3] = b"abc"
    copy_block(mapping.address, mapping.address + 4096, 3)
    assert bytes(mapping.array[:3]) == b"abc"
    address = mapping.address

    def mapped() -> bool:
        return address in _mapped_addresses()

    assert mapped()
    assert mapping.close() is False
    assert bytes(view[:3]) == b"abc"
    with pytest.raises(ValueError, match="closed"):
        mapping.view(0, 1)
    with pytest.raises(ValueError, match="closed"):
        mapping.populate()
    del view
    assert mapping.close() is True
    assert not mapped()


def test_a_view_outside_the_mapping_is_refused() -> None:
    mapping = _mapping(8192)
    for offset, length in ((-1, 2), (0, 8193), (8192, 1), (0, -1)):
        with pytest.raises(ValueError, match="outside"):
            mapping.view(offset, length)
    assert len(mapping.view(8192, 0)) == 0
    mapping.close()


@pytest.mark.parametrize("kernel", ["this", "old"])
def test_populate_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    mapping = _mapping(70 * MIB)
    mapping.array[::12_345] = 9
    if kernel == "old":
        monkeypatch.setattr(memory, "_libc", _Libc(madvise=_refuse(errno.EINVAL)))
        assert mapping.advise_huge() is False
    mapping.populate(threads=3)
    assert int((mapping.array != 0).sum()) == len(range(0, 70 * MIB, 12_345))
    resident = (ctypes.c_uint8 * (70 * MIB // 4096))()
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert libc.mincore(mapping.address, mapping.length, resident) == 0
    assert all(resident)
    mapping.close()


def test_populating_gently_gives_way_and_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = _mapping(70 * MIB)
    populate, nice = Mapping._populate, dict[int, int]()
    lengths = list[int]()

    def watched(self: Mapping, start: int, length: int, reserved: bool) -> int:
        me = threading.get_native_id()
        nice[me] = os.getpriority(os.PRIO_PROCESS, me)
        lengths.append(length)
        return populate(self, start, length, reserved)

    monkeypatch.setattr(Mapping, "_populate", watched)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert mapping.populate(3, hurry=Hurry())
    assert sum(lengths) == mapping.length
    assert all(value >= max(before, 10) for value in nice.values())
    # Whoever called has other things to do.
    assert threading.get_native_id() not in nice
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    mapping.close()
    with pytest.raises(ValueError, match="closed"):
        mapping.populate(2, hurry=Hurry())


def test_who_is_in_a_hurry_has_the_rest_populated_without_giving_way(
    monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    mapping, hurry = _mapping(70 * MIB), Hurry()
    populate, work_gently = Mapping._populate, Hurry.work_gently
    gentle, pieces = set[int](), list[int]()
    begun, done = threading.Event(), list[bool]()

    def gives_way(self: Hurry, work: Callable[[], None]) -> None:
        # By its name, not by how nice it is: so may be who runs this.
        gentle.add(threading.get_native_id())
        work_gently(self, work)

    def watched(self: Mapping, start: int, length: int, reserved: bool) -> int:
        if threading.get_native_id() in gentle:
            # As if there were no processor left for it.
            begun.set()
            assert hurry_was_set.wait(60.0)
        pieces.append(threading.get_native_id())
        return populate(self, start, length, reserved)

    hurry_was_set = threading.Event()
    monkeypatch.setattr(Hurry, "work_gently", gives_way)
    monkeypatch.setattr(Mapping, "_populate", watched)
    caller = threading.Thread(target=lambda: done.append(mapping.populate(2, hurry=hurry)))
    caller.start()
    assert begun.wait(60.0)
    hurry.set()
    # All of the 18 pieces but one for each of those that gave way.
    until(lambda: len(pieces) >= 16)
    hurry_was_set.set()
    caller.join(60.0)
    assert done == [True]
    assert len(pieces) == 18
    assert sum(piece in gentle for piece in pieces) <= 2
    mapping.close()


def test_populate_reports_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = _mapping(1 * MIB)
    # EFAULT is where touching the page would be SIGBUS: the file system is full.
    for number, reported in ((errno.ENOMEM, errno.ENOMEM), (errno.EFAULT, errno.ENOSPC)):
        monkeypatch.setattr(memory, "_libc", _Libc(madvise=_refuse(number)))
        with pytest.raises(OSError, match="populating") as caught:
            mapping.populate(2)
        assert caught.value.errno == reported
    mapping.close()


def test_an_old_kernel_touches_nothing_that_is_not_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, 4 * MIB)
    mapping = Mapping(fd, 4 * MIB)
    monkeypatch.setattr(memory, "_libc", _Libc(madvise=_refuse(errno.EINVAL)))
    assert mapping.populate(2, reserved=False) is False
    assert os.fstat(fd).st_blocks == 0
    assert mapping.populate(2) is True
    os.close(fd)
    mapping.close()


def test_a_forked_child_does_not_inherit_the_mapping() -> None:
    inherited, left_out = _mapping(1 * MIB), _mapping(1 * MIB)
    left_out.dontfork()
    pid = os.fork()
    if pid == 0:
        # No test machinery here: the exit status is the answer.
        starts = _mapped_addresses()
        right = inherited.address in starts and left_out.address not in starts
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    inherited.close()
    left_out.close()


def test_words_are_read_where_they_are() -> None:
    one, other = np.arange(5, dtype=np.uint64), np.arange(100, 105, dtype=np.uint64)
    addresses = [other.ctypes.data, one.ctypes.data + 32, other.ctypes.data + 8]
    assert words_at(np.array(addresses, np.int64)).tolist() == [100, 4, 101]
    one[4] = 2**64 - 1
    assert words_at(np.array(addresses[1:2], np.int64)).tolist() == [2**64 - 1]
    assert not len(words_at(np.empty(0, np.int64)))
