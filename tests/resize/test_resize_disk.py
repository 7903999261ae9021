"""The disk tier grows and shrinks while it serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engine_invariants import check
from engine_world import SLOT_BYTES, Gate, World, chain, until

from kvstore.engine.resizer import Resized
from kvstore.errors import ConfigError
from kvstore.index.lmdb_store import MetaStore, StoreDamaged
from kvstore.index.records import BlockRecord
from kvstore.tiers.base import Slot, TierName
from kvstore.tiers.faulty import Fault, FaultKind, Faulty

Make = Callable[..., World]


async def resize(world: World, blocks: int, timeout: float = 10.0) -> Resized:
    return await world.engine.resizer.resize(TierName.DISK, blocks * SLOT_BYTES, timeout)


async def _mixed(world: World) -> list[list[bytes]]:
    """Chains of eight on disk only, a block of each in turn, so that segments hold some of all."""
    keys = [chain(f"mixed{n}", 8) for n in range(8)]
    player = world.player()
    for at in range(8):
        for one in keys:
            assert await player.put(one[: at + 1], at=at) == at + 1
        await world.settle()
    await world.evict_host()
    return keys


async def _half(world: World) -> list[list[bytes]]:
    """Four chains of eight, and as many free slots between them in every segment."""
    keys = await _mixed(world)
    for one in keys[1::2]:
        await world.engine.removal.evict(world.space, one, None)
    await world.settle()
    return keys[::2]


def _files(world: World) -> int:
    """Bytes of all segment files, headers not counted."""
    sizes = [f.stat().st_size - 4096 for f in (world.directory / "disk").glob("seg-*.kvs")]
    return sum(sizes)


def test_the_coldest_leave_and_the_others_move_together(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await _mixed(world)
        for one in keys[4:] + keys[:4]:
            # Loaded and dropped again: used, and on disk only.
            assert await world.player().load(one) == 8
            await world.evict_host()
        assert len(world.disk.segments()) >= 4
        done = await resize(world, 32)
        assert done == Resized(32 * SLOT_BYTES, True, 32)
        assert _files(world) <= 32 * SLOT_BYTES
        await world.settle()
        assert [world.tiers(one) for one in keys] == ["d" * 8] * 4 + ["-" * 8] * 4
        check(world.engine, quiet=True)
        assert await world.player().load(keys[0]) == 8

    async def after(world: World) -> None:
        # The records name the new places.
        assert world.engine.recovered_blocks == 32
        for n in range(4):
            assert await world.player().load(chain(f"mixed{n}", 8)) == 8
        check(world.engine, quiet=True)

    world = make_world()
    world.run(story)
    world.disk_blocks = 32
    world.run(after)


def test_less_disk_than_before_a_restart_is_kept_to_as_well(make_world: Make) -> None:
    async def story(world: World) -> None:
        await _half(world)
        assert _files(world) > 40 * SLOT_BYTES

    async def after(world: World) -> None:
        await until(lambda: world.disk.usage().allocated_bytes <= 40 * SLOT_BYTES, 60)
        await world.settle()
        assert _files(world) <= 40 * SLOT_BYTES
        check(world.engine, quiet=True)
        # What lay in the segments that went is in those that stayed.
        for n in range(0, 8, 2):
            assert world.tiers(chain(f"mixed{n}", 8)) == "d" * 8
            assert await world.player().load(chain(f"mixed{n}", 8)) == 8

    world = make_world()
    world.run(story)
    world.disk_blocks = 40
    world.run(after)


def test_nothing_is_lost_that_fits(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await _half(world)
        done = await resize(world, 32)
        assert done == Resized(32 * SLOT_BYTES, True, 0)
        assert world.counts("moved_blocks_disk") >= 8
        for one in keys:
            assert await world.player().load(one) == 8
        await world.settle()
        check(world.engine, quiet=True)

    make_world().run(story)


class Doubtful(MetaStore):
    """Fails commits that move blocks, after having made them durable."""

    failing = 0
    failed = 0

    def commit_blocks(
        self,
        store_id: bytes,
        puts: Sequence[BlockRecord],
        deletes: Sequence[tuple[bytes, bytes]],
    ) -> None:
        super().commit_blocks(store_id, puts, deletes)
        if puts and self.failing:
            self.failing -= 1
            self.failed += 1
            raise StoreDamaged("here", "input/output error", 5)


def test_a_commit_that_fails_and_is_durable_all_the_same_loses_no_block(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await _half(world)
        assert isinstance(world.store, Doubtful)
        world.store.failing = 2
        done = await resize(world, 32, timeout=20)
        assert world.store.failed == 2
        assert done == Resized(32 * SLOT_BYTES, True, 0)
        # A check that finds the slots in doubt leaked, or given to somebody else.
        await world.settle()
        check(world.engine, quiet=True)
        for one in keys:
            assert await world.player().load(one) == 8

    async def after(world: World) -> None:
        assert world.engine.recovered_blocks == 32

    make_world(store_class=Doubtful).run(story, after)


def test_a_promotion_that_reads_the_old_place_gets_the_right_bytes(make_world: Make) -> None:
    """A load begins while its block is being moved, another one reads while it is to be moved."""

    class Slow(Gate):
        async def write(self, transfers: Any) -> Any:
            outcomes = await self.disk.write(transfers)
            if self.closed:
                pass_ = asyncio.get_running_loop().create_future()
                self.reads.append((transfers, pass_))
                await pass_
            return outcomes

        async def read(self, transfers: Any) -> Any:
            return await self.disk.read(transfers)

    async def story(world: World) -> None:
        keys = await _half(world)
        world.disk.closed = True
        resizing = asyncio.create_task(resize(world, 32))
        await until(lambda: world.disk.reads)
        for one in keys:
            assert await world.player().load(one) == 8
        # An epoch's end while blocks are on their way: new and old slots come back, once.
        await world.engine.removal.bump_epoch(world.space)
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        assert (await resizing).done
        await world.settle()
        assert world.disk.usage().used_bytes == 0
        check(world.engine, quiet=True)

    async def after(world: World) -> None:
        assert world.engine.recovered_blocks == 0

    make_world(wrap=Slow).run(story, after)


def test_what_cannot_be_read_is_tried_again_what_is_damaged_goes(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await _half(world)
        victim = world.block(keys[2][3])
        world.disk.plan.append(Fault(FaultKind.IO_ERROR, "read", call=0, block=0))
        digests, victim.digests = victim.digests, (1,)  # as if its bytes had changed
        assert digests is not None
        # All segments but one leave, so that the victim's does.
        done = await resize(world, 8, timeout=20)
        assert done.done
        await world.settle()
        check(world.engine, quiet=True)
        left = "".join(world.tiers(one) for one in keys)
        assert left.count("d") <= 8
        assert world.space.blocks.get(keys[2][3]) is None
        for one in keys:
            present = len(world.tiers(one).rstrip("-"))
            assert await world.player().load(one) == present

    make_world(wrap=Faulty).run(story)


def test_broken_off_at_a_stop_it_leaves_every_block_in_one_place(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await _half(world)
        world.disk.closed = True
        resizing = asyncio.create_task(resize(world, 32))
        await until(lambda: world.disk.reads)
        assert not resizing.done()
        await world.engine.resizer.stop()
        world.disk.closed = False
        assert not (await resizing).done
        check(world.engine, quiet=True)
        for one in keys:
            assert await world.player().load(one) == 8

    async def after(world: World) -> None:
        assert world.engine.recovered_blocks == 32
        # Asked for again, it gets there.
        assert (await resize(world, 32)).done
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story, after)


def test_grown_it_takes_what_it_had_refused(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("refused", 24)
        assert await world.player().put(keys) == 24
        _, skipped = await world.engine.flush(10)
        assert len(skipped) == 16
        with pytest.raises(ConfigError, match="free in"):
            await world.engine.resizer.resize(TierName.DISK, 1 << 60, 1.0)
        assert world.disk.capacity_bytes == 8 * SLOT_BYTES
        assert (await resize(world, 32)).done
        await until(lambda: world.tiers(keys) == "b" * 24)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(disk_blocks=8).run(story)


def test_stores_go_on_while_it_shrinks(make_world: Make) -> None:
    async def story(world: World) -> None:
        await _mixed(world)
        resizing = asyncio.create_task(resize(world, 24))
        player = world.player()
        for n in range(10):
            await player.put(chain(f"during{n}", 4))
        assert (await resizing).done
        assert _files(world) <= 24 * SLOT_BYTES
        await world.settle()
        check(world.engine, quiet=True)
        assert world.disk.usage().used_bytes <= 24 * SLOT_BYTES
        assert await player.load(chain("during9", 4)) == 4

    make_world().run(story)


class Held(MetaStore):
    """Knows what is durable, and holds a commit until it is told to go on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.durable: dict[bytes, Slot] = {}
        self.holding = False
        self.entered, self.go = threading.Event(), threading.Event()

    def commit_blocks(
        self,
        store_id: bytes,
        puts: Sequence[BlockRecord],
        deletes: Sequence[tuple[bytes, bytes]],
    ) -> None:
        if self.holding and puts:
            self.holding = False
            self.entered.set()
            assert self.go.wait(10)
        super().commit_blocks(store_id, puts, deletes)
        for _, key in deletes:
            self.durable.pop(key, None)
        for record in puts:
            self.durable[record.key] = Slot(record.segment, record.slot)
        assert len(set(self.durable.values())) == len(self.durable), "two records name one slot"


def test_a_block_touched_while_it_moves_is_recorded_at_its_new_place(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await _half(world)
        store, flusher = world.store, world.engine.flusher
        assert isinstance(store, Held)
        assert flusher is not None
        store.holding = True
        resizing = asyncio.create_task(resize(world, 32))
        await until(store.entered.is_set)
        # The records of the new places are on their way to LMDB; the LRU order is saved now.
        blocks = [world.block(key) for one in keys for key in one]
        world.engine.index.touch(blocks)
        saving = asyncio.create_task(flusher.records.save_touches(blocks))
        await asyncio.sleep(0.02)
        store.go.set()
        await saving
        assert (await resizing).done
        await world.settle()
        assert store.durable == {b.key: b.disk for b in world.space.blocks.values()}
        assert len(store.durable) == 32
        check(world.engine, quiet=True)

    make_world(store_class=Held).run(story)


async def _with_tail_in_host(world: World) -> list[bytes]:
    """A chain on disk only, but for its end, which was stored when the rest had left host."""
    keys, player = chain("tail", 8), world.player()
    assert await player.put(keys[:7]) == 7
    await world.evict_host()
    assert await player.put(keys, at=7) == 8
    await world.settle()
    assert world.tiers(keys) == "dddddddb"
    return keys


def test_what_host_holds_only_the_end_of_leaves_too_when_nothing_else_can(make_world: Make) -> None:
    """It kept the tier from becoming smaller for as long as nobody needed room in host."""

    async def story(world: World) -> None:
        keys = await _with_tail_in_host(world)
        resized = await resize(world, 4, timeout=60.0)
        assert (resized.done, resized.capacity_bytes) == (True, 4 * SLOT_BYTES)
        kept = world.tiers(keys).rstrip("-")
        assert set(kept) == {"d"}
        assert 1 <= len(kept) <= 4
        await world.settle()
        check(world.engine, quiet=True)

    make_world(disk_blocks=16).run(story)


@pytest.mark.parametrize("why", ["leased", "pinned"])
def test_the_end_in_host_stays_while_somebody_needs_it(make_world: Make, why: str) -> None:
    async def story(world: World) -> None:
        keys, player = await _with_tail_in_host(world), world.player()
        if why == "pinned":
            await world.engine.pin(world.space, keys, 0)
        else:
            lease, answer = player.acquire(keys[7:])
            assert answer.blocks == 1
        resized = await resize(world, 4, timeout=0.5)
        assert not resized.done
        assert len(world.tiers(keys).rstrip("-")) == 8
        if why == "pinned":
            await world.engine.pins.unpin(world.space, None)
        else:
            player.release(lease)
        await until(lambda: not world.disk.excess_bytes)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(disk_blocks=16).run(story)
