"""The disk tier's directory: who may open it, what is found again, what never is."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvstore.errors import ConfigError, FormatVersionError
from kvstore.space import BlockShape
from kvstore.tiers import segment
from kvstore.tiers.base import Outcome, Slot, Transfer
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.io_engine import IoFile
from kvstore.tiers.segment import Segment, SegmentHeader, create_segment
from kvstore.tiers.testing import contents, transfers_for

SHAPE = BlockShape(4096, 2)
OTHER = BlockShape(8192, 1)
LENGTHS = (4000, 4096)
CAPACITY = 32 * SHAPE.block_bytes

# Format version 1, frozen: a page that differs is another version.
GOLDEN_STORE_ID = bytes(range(16))
GOLDEN_FIELDS = bytes.fromhex(
    "4b565345474d0d0a"  # magic
    "01000000"  # version
    "07000000"  # segment id
    "000102030405060708090a0b0c0d0e0f"
    "0020000000000000"  # slot_bytes 8192
    "04000000"  # shards
    "40000000"  # blocks
)


async def opened(directory: Path, capacity_bytes: int = CAPACITY) -> DiskTier:
    tier = DiskTier(directory, capacity_bytes)
    await tier.open()
    return tier


async def settled(tier: DiskTier) -> None:
    while tier.allocating:
        await asyncio.sleep(0.001)


async def filled(directory: Path, count: int, shape: BlockShape = SHAPE) -> list[Transfer]:
    """Store blocks, sync, close; return them."""
    tier = await opened(directory)
    await tier.finish_recovery()
    tier.want(shape, count)
    await settled(tier)
    lengths = (4000,) * shape.shards
    written = transfers_for(tier.allocate(shape, count), shape, lengths, 4)
    assert await tier.write(written) == [Outcome.OK] * count
    await tier.sync()
    await tier.close()
    return written


def refused(directory: Path, error: type[Exception], capacity_bytes: int = CAPACITY) -> str:
    async def run() -> None:
        tier = DiskTier(directory, capacity_bytes)
        try:
            await tier.open()
        finally:
            await tier.close()

    with pytest.raises(error) as caught:
        asyncio.run(run())
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_format_is_frozen() -> None:
    header = SegmentHeader(GOLDEN_STORE_ID, 7, BlockShape(8192, 4), 64)
    page = header.encode()
    checked = GOLDEN_FIELDS.ljust(4088, b"\0")
    assert page == checked + struct.pack("<Q", xxhash.xxh3_64_intdigest(checked))
    assert page[4088:].hex() == "9ceacc428841b567"
    assert SegmentHeader.decode(page, "x") == header


def test_two_daemons_do_not_share_a_directory(tmp_path: Path) -> None:
    async def run() -> None:
        first = await opened(tmp_path)
        second = DiskTier(tmp_path, CAPACITY)
        with pytest.raises(ConfigError, match="another daemon"):
            await second.open()
        await second.close()
        await first.close()
        third = await opened(tmp_path)
        await third.close()

    asyncio.run(run())


def test_unusable_directories_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "not a directory" in refused(tmp_path / "file", ConfigError)
    assert "not a directory" in refused(tmp_path / "file" / "below", ConfigError)
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "lock").mkdir()
    assert "not usable" in refused(tmp_path / "probe", ConfigError)
    assert "has only" in refused(tmp_path, ConfigError, 1 << 60)
    assert "at least" in refused(tmp_path, ConfigError, 4095)


def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def read_only(*_: object) -> int:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(os, "pwrite", read_only)
    assert "Read-only" in refused(tmp_path, ConfigError)
    monkeypatch.setattr(os, "pwrite", real)
    asyncio.run(filled(tmp_path, 1))


def test_a_full_disk_still_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = asyncio.run(filled(tmp_path, 2))

    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    async def run() -> None:
        tier = await opened(tmp_path)
        assert all(tier.adopt([(t.slot, SHAPE) for t in written]))
        await tier.finish_recovery()
        assert await tier.read(written) == [Outcome.OK] * 2
        await tier.close()

    monkeypatch.setattr(os, "pwrite", full)
    asyncio.run(run())


def test_a_damaged_or_newer_store_id_is_not_overwritten(tmp_path: Path) -> None:
    asyncio.run(filled(tmp_path, 1))
    path = tmp_path / "store-id"
    good = path.read_text()
    assert good.startswith("kvstore-disk 1 ")
    for bad in ("", good[:-4], "hello\n"):
        path.write_text(bad)
        assert "damaged" in refused(tmp_path, ConfigError)
        assert path.read_text() == bad
    path.write_text(good.replace(" 1 ", " 2 "))
    assert "version 2" in refused(tmp_path, FormatVersionError)


def rewrite(path: Path, offset: int, data: bytes, *, seal: bool) -> None:
    page = bytearray(path.read_bytes()[:4096])
    page[offset : offset + len(data)] = data
    if seal:
        page[4088:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(page[:4088])))
    with path.open("r+b") as file:
        file.write(page)


def test_a_newer_segment_is_refused(tmp_path: Path) -> None:
    asyncio.run(filled(tmp_path, 1))
    rewrite(tmp_path / "seg-000000.kvs", 8, struct.pack("<I", 2), seal=True)
    text = refused(tmp_path, FormatVersionError)
    assert "seg-000000.kvs" in text
    assert "version 2" in text


@pytest.mark.parametrize(
    ("offset", "data", "seal"),
    [
        (0, b"X", True),
        (8, b"\x02", False),
        (12, b"\x05", True),
        (16, b"another store id", True),
        (32, b"\x01", True),
        (2000, b"x", False),
    ],
    ids=["magic", "flipped version", "other number", "other store", "odd slot", "padding"],
)
def test_a_segment_that_is_not_ours_is_left_alone(
    tmp_path: Path, offset: int, data: bytes, seal: bool
) -> None:
    written = asyncio.run(filled(tmp_path, 3))
    path = tmp_path / "seg-000000.kvs"
    rewrite(path, offset, data, seal=seal)
    before = path.read_bytes()

    async def run() -> None:
        tier = await opened(tmp_path)
        assert tier.adopt([(t.slot, SHAPE) for t in written]) == [False] * 3
        await tier.finish_recovery()
        assert tier.usage().allocated_bytes == 0
        tier.want(SHAPE, 32)
        await settled(tier)
        slots = tier.allocate(SHAPE, 32)
        assert len(slots) == 32
        assert 0 not in {slot.group for slot in slots}
        await tier.close()

    asyncio.run(run())
    assert path.read_bytes() == before


def test_rests_of_a_crash_go_and_foreign_files_stay(tmp_path: Path) -> None:
    asyncio.run(filled(tmp_path, 1))
    rests = ["seg-000009.kvs.tmp", "store-id.tmp", "probe.tmp"]
    foreign = ["notes.tmp", "seg-1.kvs.tmp", "seg-000001.kvs.tmp.tmp", "data.bin"]
    for name in rests + foreign:
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "seg-000011.kvs").mkdir()
    os.mkfifo(tmp_path / "seg-000012.kvs")
    asyncio.run(filled(tmp_path, 1))
    assert not [name for name in rests if (tmp_path / name).exists()]
    assert all((tmp_path / name).exists() for name in foreign)


def test_a_truncated_segment_loses_only_its_tail(tmp_path: Path) -> None:
    written = asyncio.run(filled(tmp_path, 6))
    os.truncate(tmp_path / "seg-000000.kvs", 4096 + 3 * SHAPE.block_bytes + 4096)

    async def run() -> None:
        tier = await opened(tmp_path)
        claims = [(t.slot, SHAPE) for t in written]
        assert tier.adopt(claims) == [True] * 3 + [False] * 3
        await tier.finish_recovery()
        assert await tier.read(written[:3]) == [Outcome.OK] * 3
        assert tier.free_blocks(SHAPE) == 0
        await tier.close()

    asyncio.run(run())


def test_a_lower_capacity_drops_empty_segments_and_waits_for_the_rest(tmp_path: Path) -> None:
    written = asyncio.run(filled(tmp_path, 20))
    first = [t for t in written if t.slot.group == 0]
    capacity = 4 * SHAPE.block_bytes

    async def run() -> None:
        tier = await opened(tmp_path, capacity)
        assert all(tier.adopt([(t.slot, SHAPE) for t in first]))
        await tier.finish_recovery()
        assert sorted(p.name for p in tmp_path.glob("seg-*")) == ["seg-000000.kvs"]
        assert tier.usage().used_bytes == 8 * SHAPE.block_bytes
        assert tier.excess_bytes == capacity
        assert tier.free_blocks(SHAPE) == tier.room_blocks(SHAPE) == 0
        tier.free([t.slot for t in first[:5]])
        assert tier.free_blocks(SHAPE) == 1
        assert await tier.read(first[5:]) == [Outcome.OK] * 3
        tier.retire(0)
        tier.free(tier.allocated_slots(0))
        tier.remove(0)
        await settled(tier)
        assert tier.excess_bytes == 0
        assert tier.room_blocks(SHAPE) == 4
        await tier.close()

    asyncio.run(run())


def test_a_lowered_capacity_keeps_what_still_fits(tmp_path: Path) -> None:
    async def run() -> None:
        tier = await opened(tmp_path)
        await tier.finish_recovery()
        tier.want(SHAPE, 32)
        await settled(tier)
        assert len(list(tmp_path.glob("seg-*"))) == 4
        tier.set_capacity(CAPACITY * 3 // 4)
        await settled(tier)
        assert tier.usage().allocated_bytes == CAPACITY * 3 // 4
        assert len(list(tmp_path.glob("seg-*"))) == 3
        assert tier.free_blocks(SHAPE) == 24
        tier.set_capacity(CAPACITY)
        assert tier.room_blocks(SHAPE) == 8
        await tier.close()

    asyncio.run(run())


def test_empty_segments_go_to_the_shape_that_needs_them(tmp_path: Path) -> None:
    async def run() -> None:
        tier = await opened(tmp_path)
        await tier.finish_recovery()
        tier.want(SHAPE, 32)
        await settled(tier)
        slots = tier.allocate(SHAPE, 9)
        assert {slot.group for slot in slots} == {0, 1}
        assert tier.room_blocks(OTHER) == 16
        tier.want(OTHER, 12)
        await settled(tier)
        assert 12 <= tier.free_blocks(OTHER) <= 16
        # Kept as free places of its own shape is what nobody else wanted.
        assert tier.usage().allocated_bytes <= CAPACITY
        assert tier.slots_in_use(0) == 8
        assert tier.slots_in_use(1) == 1
        tier.retire(1)
        with pytest.raises(ValueError, match="in use"):
            tier.remove(1)
        with pytest.raises(ValueError, match="not retired"):
            tier.remove(0)
        with pytest.raises(ValueError, match="no disk segment"):
            tier.retire(99)
        tier.free(tier.allocated_slots(1))
        free = tier.free_blocks(SHAPE)
        tier.remove(1)
        await settled(tier)
        assert tier.free_blocks(SHAPE) == free
        assert not (tmp_path / "seg-000001.kvs").exists()
        await tier.close()

    asyncio.run(run())


def test_segments_have_the_sizes_that_the_design_names(tmp_path: Path) -> None:
    gib = 1 << 30
    cases = [
        (64 * gib, BlockShape(1 << 20, 1), 1024),  # a 64th
        (1 * gib, BlockShape(1 << 20, 1), 64),  # not below 64 MiB
        (1024 * gib, BlockShape(1 << 20, 1), 1024),  # not above 1 GiB
        (64 * gib, BlockShape(1 << 28, 2), 8),  # at least 8 blocks
        (2 * gib, BlockShape(1 << 27, 1), 4),  # at most a quarter
        (1 * gib, BlockShape(1 << 28, 3), 1),  # at least one block
        (1 * gib, BlockShape(1 << 30, 2), 0),  # never above the capacity
    ]
    for capacity, shape, blocks in cases:
        tier = DiskTier(tmp_path, capacity)
        assert tier._segments.next_segment_blocks(shape) == blocks


def test_a_name_never_leads_to_a_header_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def note(name: str, where: Any, attribute: str) -> None:
        real = getattr(where, attribute)

        def call(*arguments: Any, **more: Any) -> Any:
            steps.append(name)
            return real(*arguments, **more)

        monkeypatch.setattr(where, attribute, call)

    note("reserve", os, "posix_fallocate")
    note("header", os, "pwrite")
    note("sync", os, "fsync")
    note("rename", Path, "rename")
    note("sync directory", segment, "sync_directory")
    create_segment(tmp_path, SegmentHeader(bytes(16), 1, SHAPE, 8))
    assert steps == ["reserve", "header", "sync", "rename", "sync directory", "sync"]


def test_a_hundred_thousand_slots_are_adopted_in_a_blink(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, CAPACITY)
    tier._recovering = True
    file = IoFile("nowhere", 0, 0)
    seconds = []
    for _ in range(3):
        tier._found = {n: Segment(n, file, SHAPE, 1000) for n in range(100)}
        claims = [(Slot(n, i), BlockShape(4096, 2)) for n in range(100) for i in range(1000)]
        begun = time.perf_counter()
        assert all(tier.adopt(claims))
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 0.2


CHILD = """
import asyncio, sys
from pathlib import Path
from kvstore.space import BlockShape
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.testing import transfers_for

async def run():
    shape = BlockShape(4096, 2)
    tier = DiskTier(Path(sys.argv[1]), 4096 * shape.block_bytes)
    await tier.open()
    await tier.finish_recovery()
    for seed in range(1000):
        tier.want(shape, 3)
        while tier.free_blocks(shape) < 3:
            await asyncio.sleep(0.001)
        slots = tier.allocate(shape, 3)
        await tier.write(transfers_for(slots, shape, (4000, 4096), seed))
        await tier.sync()
        print(seed, *(f"{s.group}:{s.index}" for s in slots), flush=True)

asyncio.run(run())
"""


@pytest.mark.parametrize("acknowledged", [1, 7, 40])
def test_a_killed_daemon_leaves_everything_it_acknowledged(
    tmp_path: Path, acknowledged: int
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(acknowledged)]
    child.send_signal(signal.SIGKILL)
    lines += child.stdout.read().splitlines()
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL

    async def run() -> None:
        tier = await opened(tmp_path, 4096 * SHAPE.block_bytes)
        expected: list[Transfer] = []
        for line in lines:
            seed, *places = line.split()
            slots = [Slot(*map(int, place.split(":"))) for place in places]
            expected += transfers_for(slots, SHAPE, LENGTHS, int(seed))
        assert len(expected) >= 3 * acknowledged
        assert all(tier.adopt([(t.slot, SHAPE) for t in expected]))
        await tier.finish_recovery()
        got = transfers_for([t.slot for t in expected], SHAPE, LENGTHS, None)
        got = [
            Transfer(t.slot, t.buffers, t.lengths, e.digests)
            for t, e in zip(got, expected, strict=True)
        ]
        assert await tier.read(got) == [Outcome.OK] * len(got)
        assert [contents(t) for t in got] == [contents(t) for t in expected]
        await tier.close()

    asyncio.run(run())
    assert not list(tmp_path.glob("*.tmp"))


def test_what_stands_where_a_segment_is_to_be_made_does_not_stop_it(tmp_path: Path) -> None:
    """A dangling link by the name of an unfinished segment, and a directory by another."""
    asyncio.run(filled(tmp_path, 0))
    treasure = tmp_path.parent / "treasure"
    treasure.write_text("not ours")
    (tmp_path / "seg-000000.kvs.tmp").symlink_to("/nowhere/at/all")
    (tmp_path / "seg-000001.kvs.tmp").symlink_to(treasure)
    (tmp_path / "seg-000002.kvs.tmp").mkdir()
    stored = asyncio.run(filled(tmp_path, 4))
    assert len(stored) == 4
    assert treasure.read_text() == "not ours"
    assert (tmp_path / "seg-000002.kvs.tmp").is_dir()
    assert not list(tmp_path.glob("seg-00000[01].kvs.tmp"))
    treasure.unlink()
