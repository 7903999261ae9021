"""The host tier: what it promises about slots, generations, capacity and its files."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore.errors import ConfigError, TierClosed
from kvstore.memory import Mapping, copy_batch
from kvstore.space import BlockShape
from kvstore.tiers.base import Outcome, Slot, Transfer
from kvstore.tiers.host import HostTier, remove_stale_pools
from kvstore.tiers.pool_limits import Room
from kvstore.tiers.slab import Slab, SlabGroup, SlabInfo, group_slots
from kvstore.units import GIB, KIB, MIB

_SMALL = BlockShape(4 * KIB, 1)
_WIDE = BlockShape(12 * KIB, 3)
_GROUP = 64 * KIB  # least group in these tests: 16 small blocks


@pytest.fixture
def root() -> Iterator[Path]:
    """Return an empty directory in shared memory."""
    path = Path(mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def _pool(
    root: Path, capacity_bytes: int, *, min_slab_bytes: int = _GROUP, **options: Any
) -> AsyncIterator[HostTier]:
    tier = HostTier(root / "pool", capacity_bytes, min_slab_bytes=min_slab_bytes, **options)
    await tier.open()
    try:
        yield tier
    finally:
        await tier.close()


class _Listener:
    """Collects what a pool announces, and waits until it stops growing."""

    def __init__(self, tier: HostTier) -> None:
        self.groups: list[SlabGroup] = []
        self.no_room = 0
        self._tier = tier
        self._threads: set[int] = set()
        tier.on_group = self._on_group
        tier.on_no_room = self._on_no_room

    def _on_group(self, group: SlabGroup) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert group in self._tier.groups()
        self.groups.append(group)

    def _on_no_room(self) -> None:
        self.no_room += 1

    async def settled(self) -> list[SlabGroup]:
        while self._tier.allocating:
            await asyncio.sleep(0.001)
        return self.groups


def _header(info: SlabInfo) -> list[int]:
    """Read the generations as a client does: through the file, not through the daemon."""
    return [int(g) for g in np.fromfile(info.path, "<u8", info.slots)]


def _run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


@pytest.mark.parametrize(
    ("capacity", "shape", "slots"),
    [
        (128 * MIB, BlockShape(2 * MIB, 1), 8),  # eight blocks are 16 MiB, the least group
        (64 * GIB, BlockShape(2 * MIB, 1), 512),  # a 64th of the pool
        (640 * GIB, BlockShape(2 * MIB, 1), 512),  # never more than 1 GiB …
        (640 * GIB, BlockShape(32 * MIB, 8), 8),  # … except for eight blocks
        (64 * GIB, BlockShape(256 * KIB, 8), 512),  # all shards together
        (128 * MIB, BlockShape(8 * MIB, 1), 4),  # a quarter of the pool wins over eight blocks
        (128 * MIB, BlockShape(64 * MIB, 1), 1),  # one block wins over a quarter
        (20 * MIB, BlockShape(4 * KIB, 1), 1280),
        (32 * MIB, BlockShape(33 * MIB, 1), 0),
    ],
)
def test_group_sizes(capacity: int, shape: BlockShape, slots: int) -> None:
    assert group_slots(shape, capacity, capacity) == slots
    assert group_slots(shape, capacity, shape.block_bytes - 1) == 0
    if slots > 1:
        assert group_slots(shape, capacity, 2 * shape.block_bytes - 1) == 1


def test_a_pool_of_64_blocks_holds_64_blocks(root: Path) -> None:
    async def body() -> None:
        shape = BlockShape(2 * MIB, 1)
        async with _pool(root, 128 * MIB, min_slab_bytes=16 * MIB) as tier:
            assert tier.room_blocks(shape) == 64
            tier.want(shape, 1_000)
            await _Listener(tier).settled()
            assert (tier.free_blocks(shape), tier.room_blocks(shape)) == (64, 0)
            slots = tier.allocate(shape, 100)
            assert len(set(slots)) == 64
            assert tier.usage().used_bytes == 128 * MIB
            assert tier.allocate(shape, 1) == []

    _run(body)


def test_the_last_group_takes_what_remains(root: Path) -> None:
    async def body() -> None:
        async with _pool(root, 37 * 4 * KIB + 100) as tier:
            tier.want(_SMALL, 37)
            groups = await _Listener(tier).settled()
            assert [g.slots for g in groups] == [9, 9, 9, 9, 1]
            tier.want(_WIDE, 1)
            assert not tier.allocating

    _run(body)


def test_every_use_of_a_slot_has_its_own_generation_in_every_shard(root: Path) -> None:
    async def body() -> None:
        async with _pool(root, 1 * MIB) as tier:
            tier.want(_WIDE, 4)
            (group,) = await _Listener(tier).settled()
            assert [s.shard for s in group.slabs] == [0, 1, 2]
            assert _header(group.slabs[0]) == [0] * group.slots
            first = tier.allocate(_WIDE, 3)
            assert [s.index for s in first] == [0, 1, 2]
            assert tier.generations(first).tolist() == [1, 1, 1]
            tier.free([first[1]])
            assert tier.generations(first).tolist() == [1, 1, 1]  # still readable by who holds it
            assert tier.allocate(_WIDE, 1) == [first[1]]
            assert tier.generations(first).tolist() == [1, 2, 1]
            # A client that scribbles over the header does not make the daemon repeat itself.
            with group.slabs[2].path.open("r+b") as file:
                file.write(bytes(8 * group.slots))
            tier.free([first[1]])
            tier.allocate(_WIDE, 1)
            for slab in group.slabs[:2]:
                assert _header(slab)[:4] == [1, 3, 1, 0]
            assert _header(group.slabs[2])[:4] == [0, 3, 0, 0]

    _run(body)


def test_a_slot_lies_where_clients_are_told(root: Path) -> None:
    async def body() -> None:
        async with _pool(root, 1 * MIB) as tier:
            tier.want(_WIDE, 4)
            (group,) = await _Listener(tier).settled()
            slots = tier.allocate(_WIDE, 4)
            for slot in slots:
                for shard, view in enumerate(tier.views(slot)):
                    view[:] = bytes([16 * slot.index + shard]) * _WIDE.slot_bytes
            for info in group.slabs:
                assert info.path.name == f"slab-{group.group}-{info.shard}"
                assert info.path.stat().st_mode & 0o777 == 0o600
                assert info.path.stat().st_size == info.length
                assert info.data_offset % 4096 == 0
                assert info.data_offset >= 8 * info.slots
                data = info.path.read_bytes()
                for slot in slots:
                    at = info.data_offset + slot.index * info.slot_bytes
                    expected = bytes([16 * slot.index + info.shard]) * info.slot_bytes
                    assert data[at : at + info.slot_bytes] == expected
                    address = tier.addresses(slot)[info.shard]
                    assert address % 4096 == 0
            assert (root / "pool").stat().st_mode & 0o777 == 0o700
            del view

    _run(body)


def test_a_double_free_frees_nothing(root: Path) -> None:
    async def body() -> None:
        async with _pool(root, 1 * MIB) as tier:
            tier.want(_SMALL, 4)
            (group,) = await _Listener(tier).settled()
            a, b, c = tier.allocate(_SMALL, 3)
            tier.free([c])
            used, free = tier.usage(), tier.free_blocks(_SMALL)
            for bad in (
                [a, c],
                [a, b, a],
                [a, Slot(99, 0)],
                [a, Slot(group.group, group.slots)],
                [a, Slot(group.group, -1)],
            ):
                with pytest.raises(ValueError, match=r"slot|slab group"):
                    tier.free(bad)
                assert (tier.usage(), tier.free_blocks(_SMALL)) == (used, free)
            tier.free([b, a])
            assert tier.usage().used_bytes == 0

    _run(body)


def test_one_group_fills_before_the_next_so_that_others_can_leave(root: Path) -> None:
    async def body() -> None:
        async with _pool(root, 1 * MIB) as tier:
            tier.want(_SMALL, 48)
            assert [g.slots for g in await _Listener(tier).settled()] == [16, 16, 16]
            slots = tier.allocate(_SMALL, 20)
            assert [s.group for s in slots] == [1] * 16 + [2] * 4
            tier.free(slots[:5])
            assert {s.group for s in tier.allocate(_SMALL, 12)} == {2}

    _run(body)


def test_wanting_again_adds_nothing(root: Path) -> None:
    async def body() -> None:
        async with _pool(root, 1 * MIB) as tier:
            listener = _Listener(tier)
            for _ in range(50):
                tier.want(_SMALL, 20)
            assert tier.allocating
            await listener.settled()
            tier.want(_SMALL, 20)
            tier.want(_SMALL, 32)
            await listener.settled()
            assert [g.slots for g in listener.groups] == [16, 16]
            assert tier.usage().allocated_bytes == 32 * 4 * KIB
            assert tier.allocate(_WIDE, 1) == []
            tier.want(_SMALL, 33)
            await listener.settled()
            assert len(listener.groups) == 3

    _run(body)


def test_shapes_take_turns_and_together_never_exceed_the_capacity(root: Path) -> None:
    async def body() -> None:
        shapes = [_SMALL, _WIDE, BlockShape(8 * KIB, 2), BlockShape(20 * KIB, 1)]
        async with _pool(root, 1 * MIB) as tier:
            listener = _Listener(tier)
            for shape in shapes:
                tier.want(shape, 1_000)
            while tier.allocating:
                usage = tier.usage()
                assert usage.used_bytes <= usage.allocated_bytes <= usage.capacity_bytes == MIB
                for shape in shapes:
                    tier.allocate(shape, 3)
                await asyncio.sleep(0)
            assert {g.shape for g in listener.groups[:4]} == set(shapes)
            assert sum(g.capacity_bytes for g in listener.groups) <= MIB
            assert MIB - tier.usage().allocated_bytes < 4 * KIB
            assert listener.no_room > 0
            assert not tier.allocating
            on_disk = sum(p.stat().st_blocks * 512 for p in (root / "pool").iterdir())
            slabs = sum(len(g.slabs) for g in listener.groups)
            assert on_disk <= MIB + slabs * 4 * KIB

    _run(body)


def test_memory_moves_from_one_shape_to_another(root: Path) -> None:
    async def body() -> None:
        async with _pool(root, 128 * KIB) as tier:
            listener = _Listener(tier)
            tier.want(_SMALL, 32)
            old = list(await listener.settled())
            slots = tier.allocate(_SMALL, 32)
            victim = old[0]
            held = [s for s in slots if s.group == victim.group]
            with pytest.raises(ValueError, match="not retired"):
                tier.remove(victim.group)
            tier.free(held[1:])
            tier.retire(victim.group)
            tier.retire(victim.group)
            assert tier.free_blocks(_SMALL) == 0
            assert tier.allocate(_SMALL, 1) == []
            assert victim not in tier.groups()
            assert tier.slots_in_use(victim.group) == 1
            with pytest.raises(ValueError, match="1 slots are in use"):
                tier.remove(victim.group)
            assert tier.room_blocks(_WIDE) == 0
            # A client that maps it still: its bytes stay what they were.
            fd = os.open(victim.slabs[0].path, os.O_RDWR)
            client = Mapping(fd, victim.slabs[0].length)
            os.close(fd)
            tier.views(held[0])[0][:4] = b"old!"
            tier.free(held[:1])
            assert tier.allocate(_SMALL, 1) == []
            tier.remove(victim.group)
            assert not victim.slabs[0].path.exists()
            assert tier.usage().allocated_bytes == 96 * KIB
            with pytest.raises(ValueError, match="no slab group"):
                tier.slots_in_use(victim.group)
            with pytest.raises(ValueError, match="no slab group"):
                tier.views(held[0])
            tier.want(_WIDE, 1)
            await listener.settled()
            assert tier.usage().allocated_bytes == 96 * KIB
            tier.want(BlockShape(16 * KIB, 2), 1)
            new = (await listener.settled())[-1]
            assert new.group > max(g.group for g in old)
            (slot,) = tier.allocate(new.shape, 1)
            for view in tier.views(slot):
                view[:] = b"\xff" * len(view)
            assert bytes(client.view(victim.slabs[0].data_offset, 4)) == b"old!"
            client.close()
            del view

    _run(body)


def test_a_full_file_system_degrades_the_pool_and_it_recovers(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.posix_fallocate
    left = [2]

    def scarce(fd: int, offset: int, length: int) -> None:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        real(fd, offset, length)

    async def body() -> None:
        monkeypatch.setattr(os, "posix_fallocate", scarce)
        async with _pool(root, 1 * MIB, retry_seconds=0.0) as tier:
            listener = _Listener(tier)
            tier.want(_SMALL, 100)
            await listener.settled()
            assert (len(listener.groups), listener.no_room) == (2, 1)
            assert tier.state.startswith("degraded: no memory for 64 KiB")
            assert tier.usage().capacity_bytes == tier.usage().allocated_bytes == 128 * KIB
            assert len(tier.allocate(_SMALL, 100)) == 32
            tier.want(_WIDE, 1)  # fails at its first shard or later: nothing is left behind
            await listener.settled()
            left[0] = 2
            tier.want(_WIDE, 1)
            await listener.settled()
            assert sorted(p.name for p in (root / "pool").iterdir()) == ["slab-1-0", "slab-2-0"]
            assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
            left[0] = 1_000
            tier.want(_SMALL, 1_000)
            await listener.settled()
            assert tier.state == "ok"
            assert tier.usage().capacity_bytes == tier.usage().allocated_bytes == MIB

    _run(body)


def test_after_a_failure_the_system_is_left_alone_for_a_while(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def full(fd: int, offset: int, length: int) -> None:
        tries.append(length)
        raise OSError(errno.ENOSPC, "No space left on device")

    async def body() -> None:
        monkeypatch.setattr(os, "posix_fallocate", full)
        async with _pool(root, 1 * MIB, retry_seconds=3600.0) as tier:
            listener = _Listener(tier)
            for _ in range(5):
                tier.want(_SMALL, 1)
                await listener.settled()
            assert len(tries) == 1
            assert tier.room_blocks(_SMALL) == 0

    _run(body)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_small_tmpfs_that_others_fill_costs_no_signal(root: Path) -> None:
    mount = root / "mount"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mount], check=True)
    try:

        async def body() -> None:
            async with _pool(mount, 3 * MIB, retry_seconds=0.0) as tier:
                listener = _Listener(tier)
                tier.want(_SMALL, 16)
                await listener.settled()
                (mount / "other").write_bytes(bytes(3 * MIB))
                tier.want(_SMALL, 10_000)
                await listener.settled()
                assert tier.state.startswith("degraded")
                taken = tier.usage().allocated_bytes
                assert 512 * KIB < taken < MIB
                # Every page that was promised is there.
                for slot in tier.allocate(_SMALL, 10_000):
                    for view in tier.views(slot):
                        view[:] = b"x" * len(view)
                (mount / "other").unlink()
                tier.want(_SMALL, 10_000)
                await listener.settled()
                assert tier.usage().allocated_bytes == 3 * MIB
                assert tier.state == "ok"
                del view
                # The slab itself finds out, when the look before did not.
                (mount / "other").write_bytes(bytes(600 * KIB))
                with pytest.raises(OSError, match="No space") as caught:
                    Slab.create(
                        mount / "slab", slots=64, slot_bytes=4096, shard=0, populate_threads=2
                    )
                assert caught.value.errno == errno.ENOSPC
                assert not (mount / "slab").exists()

        _run(body)
        assert sorted(p.name for p in mount.iterdir()) == ["other"]
    finally:
        subprocess.run(["umount", mount], check=True)


def test_a_pool_that_cannot_be_is_refused_and_leaves_nothing(root: Path) -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match=r"host pool of 900 TiB .* free in its file system"):
            await HostTier(root / "pool", 900 << 40).open()
        with pytest.raises(ConfigError, match="host pool of 0 bytes"):
            await HostTier(root / "pool", 0).open()
        with pytest.raises(ConfigError, match="No such file"):
            await HostTier(root / "absent" / "pool", MIB).open()
        assert list(root.iterdir()) == []
        async with _pool(root, MIB) as tier:
            second = HostTier(root / "pool", MIB)
            with pytest.raises(ConfigError, match="exists already"):
                await second.open()
            await second.close()
            assert tier.directory.exists()  # not the second's to remove

    _run(body)


def test_a_pool_grows_and_shrinks_while_serving(root: Path) -> None:
    async def body() -> None:
        async with _pool(root, 128 * KIB) as tier:
            listener = _Listener(tier)
            tier.want(_SMALL, 1_000)
            await listener.settled()
            slots = tier.allocate(_SMALL, 1_000)
            assert len(slots) == 32
            tier.set_capacity(256 * KIB)
            tier.want(_SMALL, 1_000)
            await listener.settled()
            assert tier.free_blocks(_SMALL) == 32
            tier.set_capacity(140 * KIB)
            assert (tier.free_blocks(_SMALL), tier.room_blocks(_SMALL)) == (3, 0)
            assert len(tier.allocate(_SMALL, 10)) == 3
            with pytest.raises(ConfigError, match="not possible"):
                tier.set_capacity(900 << 40)
            with pytest.raises(ConfigError, match="not possible"):
                tier.set_capacity(-1)
            assert tier.usage().capacity_bytes == 140 * KIB

    _run(body)


def test_closing_while_a_group_is_being_made_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate
    begun, go_on = threading.Event(), threading.Event()

    def slow(fd: int, offset: int, length: int) -> None:
        begun.set()
        assert go_on.wait(30)
        real(fd, offset, length)

    async def body() -> None:
        monkeypatch.setattr(os, "posix_fallocate", slow)
        tier = HostTier(root / "pool", MIB, min_slab_bytes=_GROUP)
        listener = _Listener(tier)
        await tier.open()
        tier.want(_WIDE, 1_000)
        await asyncio.to_thread(begun.wait, 30)
        closing = asyncio.ensure_future(tier.close())
        await asyncio.sleep(0)
        tier.want(_SMALL, 1)
        assert not closing.done()
        go_on.set()
        await closing
        await tier.close()
        assert listener.groups == []
        assert tier.usage().allocated_bytes == 0
        with pytest.raises(TierClosed):
            await tier.read([])
        with pytest.raises(TierClosed):
            await tier.sync()

    _run(body)
    assert list(root.iterdir()) == []


def test_a_loop_that_ends_while_a_group_is_being_made_leaves_no_memory_behind(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate
    begun, go_on = threading.Event(), threading.Event()

    def slow(fd: int, offset: int, length: int) -> None:
        begun.set()
        assert go_on.wait(30)
        real(fd, offset, length)

    async def body() -> None:
        monkeypatch.setattr(os, "posix_fallocate", slow)
        async with _pool(root, 1 * MIB) as tier:
            tier.want(_WIDE, 1)
            await asyncio.to_thread(begun.wait, 30)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.sleep(0.01)
            assert not any(task.done() for task in others)
            go_on.set()
            await asyncio.wait(others)
            assert not tier.allocating
            assert tier.usage().allocated_bytes == 0
            assert list(tier.directory.iterdir()) == []

    _run(body)


def test_memory_that_is_not_there_is_not_even_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking it would call for the out-of-memory killer."""

    async def body() -> None:
        async with _pool(root, 1 * MIB) as tier:
            listener = _Listener(tier)
            scarce = Room(1 * GIB, 1 * GIB, _GROUP - 1)
            monkeypatch.setattr("kvstore.tiers.slab_making.memory_room", lambda _: scarce)
            monkeypatch.setattr("kvstore.tiers.host.Slab.create", None)
            tier.want(_SMALL, 16)
            assert await listener.settled() == []
            assert tier.state.startswith("degraded: no memory")

    _run(body)


def test_slabs_are_left_out_of_forked_children(root: Path) -> None:
    async def body() -> None:
        async with _pool(root, 1 * MIB) as tier:
            tier.want(_SMALL, 1)
            await _Listener(tier).settled()
            (address,) = tier.addresses(tier.allocate(_SMALL, 1)[0])
            smaps = Path("/proc/self/smaps").read_text()
            # The slot lies one page behind the start of its mapping.
            flags = (
                smaps.split(f"{address - 4096:x}-", 1)[1].split("VmFlags:", 1)[1].splitlines()[0]
            )
            assert "dc" in flags.split()

    _run(body)


def _buffers(shape: BlockShape, seed: int) -> tuple[memoryview, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(0, 256, shape.slot_bytes, np.uint8).data for _ in range(shape.shards))


def test_copies_check_digests_and_refuse_what_does_not_fit(root: Path) -> None:
    async def body() -> None:
        async with _pool(root, 1 * MIB) as tier:
            tier.want(_WIDE, 2)
            await _Listener(tier).settled()
            lengths = (12_288, 1, 7_777)
            slots = tier.allocate(_WIDE, 2)
            sources = [_buffers(_WIDE, seed) for seed in range(2)]
            digests = [
                tuple(xxhash.xxh3_64_intdigest(b[:n]) for b, n in zip(source, lengths, strict=True))
                for source in sources
            ]
            put = [Transfer(s, b, lengths) for s, b in zip(slots, sources, strict=True)]
            assert await tier.write(put) == [Outcome.OK] * 2
            out = [_buffers(_WIDE, seed) for seed in (8, 9)]
            get = [Transfer(s, b, lengths, d) for s, b, d in zip(slots, out, digests, strict=True)]
            assert await tier.read(get) == [Outcome.OK] * 2
            for source, copy in zip(sources, out, strict=True):
                for a, b, n in zip(source, copy, lengths, strict=True):
                    assert a[:n] == b[:n]
            tier.views(slots[1])[2][7_776] ^= 1
            assert await tier.read(get) == [Outcome.OK, Outcome.CORRUPT]
            tier.views(slots[1])[2][7_776] ^= 1
            tier.views(slots[1])[2][7_777] ^= 1  # padding
            assert await tier.read(get) == [Outcome.OK, Outcome.OK]

            before = [bytes(v) for v in tier.views(slots[0])]
            fresh = _buffers(_WIDE, 5)
            good = Transfer(slots[0], fresh, lengths)
            for bad in (
                Transfer(slots[1], fresh[:2], lengths[:2]),
                Transfer(slots[1], fresh, (1, 1, 12_289)),
                Transfer(slots[1], (fresh[0][:9], *fresh[1:]), (10, 1, 1)),
                Transfer(Slot(slots[0].group, 5), fresh, lengths),
            ):
                with pytest.raises(ValueError, match=r"fit|buffers|allocated"):
                    await tier.write([good, bad])
            assert [bytes(v) for v in tier.views(slots[0])] == before

    _run(body)


def test_a_cancelled_read_returns_only_when_nobody_writes_to_its_buffers(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(30)
        copy_batch(*arguments)

    async def body() -> None:
        async with _pool(root, 1 * MIB) as tier:
            tier.want(_SMALL, 1)
            await _Listener(tier).settled()
            (slot,) = tier.allocate(_SMALL, 1)
            tier.views(slot)[0][:3] = b"abc"
            buffer = bytearray(4096)
            monkeypatch.setattr("kvstore.tiers.pool_copy.copy_batch", slow)
            reading = asyncio.ensure_future(
                tier.read([Transfer(slot, (memoryview(buffer),), (3,))])
            )
            await asyncio.to_thread(begun.wait, 30)
            reading.cancel()
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.sleep(0.01)
            assert not reading.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert buffer[:3] == b"abc"

    _run(body)


def test_only_dead_pools_of_this_state_directory_are_removed(root: Path) -> None:
    def pool(name: str) -> Path:
        path = root / name
        path.mkdir()
        for file in ("slab-1-0", "control"):
            (path / file).write_bytes(b"x")
        return path

    dead, kept, other = pool("kv-abc-1"), pool("kv-abc-2"), pool("kv-xyz-1")
    precious = pool("kv-abc-3")
    (precious / "thesis.txt").write_text("years of work")
    (root / "kv-abc-4").symlink_to(other)
    (root / "kv-abc-5").write_text("a file")
    assert remove_stale_pools(root, "kv-abc-", kept) == [dead]
    assert sorted(p.name for p in root.iterdir()) == [
        "kv-abc-2",
        "kv-abc-3",
        "kv-abc-4",
        "kv-abc-5",
        "kv-xyz-1",
    ]
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert (other / "slab-1-0").exists()
    with pytest.raises(ValueError, match="empty prefix"):
        remove_stale_pools(root, "", kept)
