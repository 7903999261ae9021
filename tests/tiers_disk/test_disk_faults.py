"""What users of a disk that fails must see: their other blocks, a miss, a state, a recovery."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import TierUnavailable
from kvstore.space import BlockShape
from kvstore.tiers import segment_maker
from kvstore.tiers.base import Outcome, Slot, Transfer
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.posix_engine import PosixEngine
from kvstore.tiers.testing import contents, transfers_for

SHAPE = BlockShape(4096, 2)
LENGTHS = (4000, 4096)
OK, BAD, CORRUPT = Outcome.OK, Outcome.IO_ERROR, Outcome.CORRUPT


class Device:
    """System calls that can be told to fail, to stop, or to move little."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.bad_offsets: dict[int, int] = {}
        self.most_bytes = 1 << 40
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.calls: list[tuple[str, int]] = []

    def engine(self, threads: int = 2, **options: Any) -> PosixEngine:
        return PosixEngine(
            threads,
            preadv=lambda fd, views, at: self.move("read", os.preadv, fd, views, at),
            pwritev=lambda fd, views, at: self.move("write", os.pwritev, fd, views, at),
            fdatasync=self.sync,
            **options,
        )

    def enter(self, kind: str, offset: int) -> None:
        self.calls.append((kind, offset))
        self.entered.set()
        self.gate.wait(10)
        if kind in self.failing:
            raise OSError(self.failing[kind], os.strerror(self.failing[kind]))

    def move(
        self,
        kind: str,
        call: Callable[[int, Sequence[Any], int], int],
        fd: int,
        views: Sequence[memoryview],
        offset: int,
    ) -> int:
        self.enter(kind, offset)
        size = sum(map(len, views))
        for bad, number in self.bad_offsets.items():
            if offset <= bad < offset + size:
                raise OSError(number, os.strerror(number))
        if size <= self.most_bytes:
            return call(fd, views, offset)
        # Direct I/O moves whole pages; the odd rest of what it reports is not there.
        few: list[memoryview] = []
        left = self.most_bytes // 4096 * 4096
        for view in views:
            if left:
                few.append(view[:left])
                left -= len(few[-1])
        if few:
            call(fd, few, offset)
        return self.most_bytes

    def sync(self, fd: int) -> None:
        self.enter("sync", 0)
        os.fdatasync(fd)


def play(
    directory: Path,
    story: Callable[[DiskTier], Awaitable[None]],
    device: Device | None = None,
    blocks: int = 32,
    **options: Any,
) -> None:
    async def run() -> None:
        engine = (device or Device()).engine(**options)
        tier = DiskTier(directory, blocks * SHAPE.block_bytes, engine=engine, clock=lambda: now[0])
        await tier.open()
        await tier.finish_recovery()
        try:
            await story(tier)
        finally:
            await tier.close()

    now[0] = 0.0
    asyncio.run(run())


now = [0.0]


async def room(tier: DiskTier, blocks: int) -> None:
    tier.want(SHAPE, blocks)
    while tier.allocating:
        await asyncio.sleep(0.001)


async def stored(tier: DiskTier, count: int) -> list[Transfer]:
    await room(tier, count)
    written = transfers_for(tier.allocate(SHAPE, count), SHAPE, LENGTHS, 5)
    assert await tier.write(written) == [OK] * count
    return written


def blank(written: Sequence[Transfer]) -> list[Transfer]:
    return [
        Transfer(t.slot, fresh.buffers, t.lengths, t.digests)
        for t, fresh in zip(
            written, transfers_for([t.slot for t in written], SHAPE, LENGTHS, None), strict=True
        )
    ]


def segment_file(directory: Path, slot: Slot) -> Path:
    return directory / f"seg-{slot.group:06d}.kvs"


def test_one_bad_block_does_not_fail_its_neighbours(tmp_path: Path) -> None:
    device = Device()

    async def story(tier: DiskTier) -> None:
        written = await stored(tier, 6)
        assert {t.slot.group for t in written} == {0}
        device.bad_offsets = {4096 + 2 * SHAPE.block_bytes + 4096: errno.EIO}
        device.calls.clear()
        got = blank(written)
        assert await tier.read(got) == [OK, OK, BAD, OK, OK, OK]
        assert device.calls[0] == ("read", 4096)  # merged, then one by one
        assert len(device.calls) == 7
        for position in (0, 1, 3, 4, 5):
            assert contents(got[position]) == contents(written[position])
        assert tier.io_errors == 1
        assert tier.state == "degraded: read failed: seg-000000.kvs: Input/output error"
        assert await tier.write(written) == [OK, OK, BAD, OK, OK, OK]
        device.bad_offsets.clear()
        assert await tier.read(got[:1]) == [OK]
        assert tier.state.startswith("degraded: write failed")  # a good read says nothing of writes
        assert await tier.write(written) == [OK] * 6
        assert tier.state == "ok"

    play(tmp_path, story, device)


def test_a_place_that_failed_is_tried_again_last(tmp_path: Path) -> None:
    device = Device()

    async def story(tier: DiskTier) -> None:
        await room(tier, 4)
        device.failing["write"] = errno.EIO
        slots = tier.allocate(SHAPE, 1)
        assert await tier.write(transfers_for(slots, SHAPE, LENGTHS, 1)) == [BAD]
        tier.free(slots)
        del device.failing["write"]
        assert tier.allocate(SHAPE, 1) != slots
        assert slots[0] in tier.allocate(SHAPE, tier.free_blocks(SHAPE))

    play(tmp_path, story, device)


def test_short_calls_are_continued(tmp_path: Path) -> None:
    device = Device()
    device.most_bytes = 5000  # not even a multiple of what direct I/O can continue from

    async def story(tier: DiskTier) -> None:
        written = await stored(tier, 5)
        got = blank(written)
        assert await tier.read(got) == [OK] * 5
        assert [contents(t) for t in got] == [contents(t) for t in written]
        device.most_bytes = 100
        assert await tier.read(got) == [BAD] * 5

    play(tmp_path, story, device)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_refuses_writes_still_serves_and_recovers(tmp_path: Path, number: int) -> None:
    device = Device()

    async def story(tier: DiskTier) -> None:
        written = await stored(tier, 3)
        device.failing["write"] = number
        more = transfers_for(tier.allocate(SHAPE, 1), SHAPE, LENGTHS, 6)
        assert await tier.write(more) == [BAD]
        assert tier.state.startswith("degraded: write failed")
        assert "\n" not in tier.state
        assert await tier.read(blank(written)) == [OK] * 3
        device.failing.clear()
        assert await tier.write(more) == [OK]
        assert tier.state == "ok"

    play(tmp_path, story, device)


def test_a_file_system_that_was_read_only_for_a_while_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, really, read_only = PosixEngine(2), os.open, True

    def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if read_only and flags & os.O_RDWR and str(path).endswith(".kvs"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return really(path, flags, *rest, **more)

    async def run() -> None:
        nonlocal read_only
        tier = DiskTier(tmp_path, 32 * SHAPE.block_bytes, engine=engine)
        await tier.open()
        await tier.finish_recovery()
        read_only = False
        written = await stored(tier, 3)
        await tier.sync()
        more = transfers_for(tier.allocate(SHAPE, 1), SHAPE, LENGTHS, 6)
        engine._handles.close()
        read_only = True
        monkeypatch.setattr(os, "open", opened)
        assert await tier.read(blank(written)) == [OK] * 3
        assert await tier.write(more) == [BAD]
        assert tier.state.endswith("Read-only file system")
        read_only = False
        assert await tier.write(more) == [OK]
        assert await tier.read(blank(more)) == [OK]
        await tier.close()

    asyncio.run(run())


def test_a_truncated_segment_fails_what_was_cut_and_is_let_go(tmp_path: Path) -> None:
    async def story(tier: DiskTier) -> None:
        written = await stored(tier, 4)
        path = segment_file(tmp_path, written[0].slot)
        os.truncate(path, 4096 + 2 * SHAPE.block_bytes + 100)
        got = blank(written)
        assert await tier.read(got) == [OK, OK, BAD, BAD]
        assert "cut short" in tier.state
        assert tier.free_blocks(SHAPE) == 0
        room_before = tier.room_blocks(SHAPE)
        tier.free([t.slot for t in written])
        while tier.allocating:
            await asyncio.sleep(0.001)
        assert not path.exists()
        assert tier.room_blocks(SHAPE) > room_before
        assert tier.usage().allocated_bytes == 0

    play(tmp_path, story)


@pytest.mark.parametrize("opened", [True, False], ids=["open", "not open yet"])
@pytest.mark.parametrize("by", ["directory", "nothing", "other file"])
def test_a_segment_that_was_replaced_is_an_error_not_a_lie(
    tmp_path: Path, by: str, opened: bool
) -> None:
    async def story(tier: DiskTier) -> None:
        await room(tier, 4)
        written = transfers_for(tier.allocate(SHAPE, 4), SHAPE, LENGTHS, 5)
        path = segment_file(tmp_path, written[0].slot)
        if opened:
            assert await tier.write(written) == [OK] * 4
        path.rename(tmp_path / "moved")
        if by == "directory":
            path.mkdir()
        elif by == "other file":
            path.write_bytes((tmp_path / "moved").read_bytes())
        # An open descriptor would still take the bytes, and they would be gone at the next start.
        assert await tier.write(written) == [BAD] * 4
        assert await tier.read(blank(written)) == [BAD] * 4
        if opened:
            with pytest.raises(TierUnavailable):
                await tier.sync()
        assert tier.state.startswith("degraded")
        tier.free([t.slot for t in written])
        await room(tier, 4)
        again = await stored(tier, 2)
        assert {t.slot.group for t in again}.isdisjoint({t.slot.group for t in written})
        await tier.sync()
        assert await tier.read(blank(again)) == [OK] * 2
        assert tier.state == "ok"
        assert path.exists() == (by != "nothing")  # not ours: left alone

    play(tmp_path, story)


def test_a_failed_sync_stays_failed_until_its_blocks_are_given_up(tmp_path: Path) -> None:
    device = Device()

    async def story(tier: DiskTier) -> None:
        first = await stored(tier, 2)
        await tier.sync()
        second = await stored(tier, 2)
        device.failing["sync"] = errno.EIO
        with pytest.raises(TierUnavailable) as caught:
            await tier.sync()
        assert caught.value.errno == errno.EIO
        device.failing.clear()
        # The kernel reports a lost page once: a second sync that succeeds proves nothing.
        third = await stored(tier, 1)
        with pytest.raises(TierUnavailable):
            await tier.sync()
        tier.free([second[0].slot])
        with pytest.raises(TierUnavailable):
            await tier.sync()
        assert await tier.write(second[1:]) == [OK]
        await tier.sync()
        assert await tier.read(blank(first + second[1:] + third)) == [OK] * 4

    play(tmp_path, story, device)


def test_a_sync_that_joins_a_failing_one_fails_too(tmp_path: Path) -> None:
    device = Device()

    async def story(tier: DiskTier) -> None:
        await stored(tier, 1)
        device.entered.clear()
        device.gate.clear()
        device.failing["sync"] = errno.EIO
        first = asyncio.ensure_future(tier.sync())
        await asyncio.to_thread(device.entered.wait, 10)
        second = asyncio.ensure_future(tier.sync())
        await asyncio.sleep(0)
        assert not second.done()
        device.gate.set()
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(r) for r in results] == [TierUnavailable] * 2

    play(tmp_path, story, device)


def test_sync_covers_every_segment_written_and_no_other(tmp_path: Path) -> None:
    device = Device()

    async def story(tier: DiskTier) -> None:
        written = await stored(tier, 12)
        groups = {t.slot.group for t in written}
        assert len(groups) > 1
        device.calls.clear()
        await tier.sync()
        assert len(device.calls) == len(groups)
        await tier.sync()
        assert len(device.calls) == len(groups)
        assert await tier.write(written[:1]) == [OK]
        await tier.sync()
        assert [kind for kind, _ in device.calls].count("sync") == len(groups) + 1

    play(tmp_path, story, device)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_cancelling_waits_for_the_system_call_and_drops_the_rest(tmp_path: Path, kind: str) -> None:
    device = Device()

    async def story(tier: DiskTier) -> None:
        written = await stored(tier, 4)
        call = tier.read if kind == "read" else tier.write
        device.calls.clear()
        device.entered.clear()
        device.gate.clear()
        moving = asyncio.ensure_future(call(written))
        await asyncio.to_thread(device.entered.wait, 10)
        for _ in range(3):
            moving.cancel()
            await asyncio.sleep(0)
            assert not moving.done()
        device.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert len(device.calls) == 1
        assert await tier.read(blank(written)) == [OK] * 4

    play(tmp_path, story, device, threads=1, max_run_bytes=SHAPE.block_bytes)


def test_closing_waits_for_transfers(tmp_path: Path) -> None:
    device = Device()

    async def story(tier: DiskTier) -> None:
        written = await stored(tier, 1)
        device.entered.clear()
        device.gate.clear()
        reading = asyncio.ensure_future(tier.read(blank(written)))
        await asyncio.to_thread(device.entered.wait, 10)
        closing = asyncio.ensure_future(tier.close())
        await asyncio.sleep(0)
        assert not closing.done()
        device.gate.set()
        await closing
        assert await reading == [OK]

    play(tmp_path, story, device)


def test_a_small_read_is_not_stuck_behind_a_large_flush(tmp_path: Path) -> None:
    device = Device()

    async def story(tier: DiskTier) -> None:
        written = await stored(tier, 6)
        device.calls.clear()
        device.entered.clear()
        device.gate.clear()
        flush = asyncio.ensure_future(tier.write(written))
        await asyncio.to_thread(device.entered.wait, 10)
        read = asyncio.ensure_future(tier.read(blank(written[:1])))
        await asyncio.sleep(0)
        device.gate.set()
        assert await read == [OK]
        assert await flush == [OK] * 6
        assert [kind for kind, _ in device.calls[:3]].count("read") == 1

    play(tmp_path, story, device, threads=1, max_run_bytes=SHAPE.block_bytes)


def test_a_file_system_without_direct_io_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **more)

    async def story(tier: DiskTier) -> None:
        assert not tier.capabilities.direct_io
        written = await stored(tier, 3)
        await tier.sync()
        assert await tier.read(blank(written)) == [OK] * 3
        assert tier.io_engine == "posix-buffered"
        assert tier.state == "ok"

    monkeypatch.setattr(os, "open", refuse)
    play(tmp_path, story)


@pytest.mark.parametrize("lengths", [LENGTHS, (1, 4095), (511, 513), (4096, 4096)])
@pytest.mark.parametrize("offset", [1, 33, 64, 512, 4095])
def test_odd_offsets_and_lengths_go_through_direct_io(
    tmp_path: Path, offset: int, lengths: tuple[int, int]
) -> None:
    """A pool promised 4096-byte alignment and gave 64."""

    async def story(tier: DiskTier) -> None:
        await room(tier, 2)
        slots = tier.allocate(SHAPE, 2)
        aligned = transfers_for(slots, SHAPE, lengths, 7)

        def odd(transfer: Transfer, filled: bool) -> Transfer:
            buffers = []
            for buffer in transfer.buffers:
                moved = memoryview(mmap.mmap(-1, len(buffer) + 4096))[offset : offset + len(buffer)]
                if filled:
                    moved[:] = buffer
                buffers.append(moved)
            return Transfer(transfer.slot, tuple(buffers), transfer.lengths, transfer.digests)

        assert await tier.write([odd(t, True) for t in aligned]) == [OK] * 2
        got = [odd(t, False) for t in aligned]
        assert await tier.read(got) == [OK] * 2
        assert [contents(t) for t in got] == [contents(t) for t in aligned]

    play(tmp_path, story)


def test_descriptors_are_bounded(tmp_path: Path) -> None:
    engine = PosixEngine(2)
    engine._handles._limit = 3

    async def run() -> None:
        tier = DiskTier(tmp_path, 32 * SHAPE.block_bytes, engine=engine)
        await tier.open()
        await tier.finish_recovery()
        # Capacity falls, segments get small, many of them.
        written: list[Transfer] = []
        for blocks in range(4, 24, 2):
            tier.set_capacity(blocks * SHAPE.block_bytes)
            written += await stored(tier, 2)
        assert len({t.slot.group for t in written}) > 6
        await tier.sync()
        for _ in range(2):
            assert await tier.read(blank(written)) == [OK] * len(written)
            assert engine.open_files <= 3
        await tier.close()
        assert engine.open_files == 0

    asyncio.run(run())


def test_a_full_file_system_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(tier: DiskTier) -> None:
        rooms = 0

        def on_room() -> None:
            nonlocal rooms
            rooms += 1

        tier.on_room = on_room
        with monkeypatch.context() as patch:

            def full(*_: object) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patch.setattr(segment_maker, "create_segment", full)
            await room(tier, 8)
            assert rooms > 0  # nobody is left waiting
            assert tier.free_blocks(SHAPE) == tier.room_blocks(SHAPE) == 0
            assert tier.state == "degraded: cannot make a segment: No space left on device"
            assert tier.usage().allocated_bytes == 0
            tier.want(SHAPE, 8)
            assert not tier.allocating
        now[0] = 1.5
        assert tier.room_blocks(SHAPE) == 32
        await room(tier, 8)
        assert tier.free_blocks(SHAPE) >= 8
        assert tier.state == "ok"

    play(tmp_path, story)


def test_a_probe_ends_the_back_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(tier: DiskTier) -> None:
        real = os.posix_fallocate

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        await room(tier, 8)
        assert tier.state != "ok"
        assert not list(tmp_path.glob("seg-*"))  # nothing is left behind
        monkeypatch.setattr(os, "posix_fallocate", real)
        (tmp_path / "probe.tmp").mkdir()
        assert not await tier.probe()
        assert tier.state != "ok"
        (tmp_path / "probe.tmp").rmdir()
        assert await tier.probe()
        assert tier.state == "ok"
        await room(tier, 8)
        assert tier.free_blocks(SHAPE) >= 8

    play(tmp_path, story)
