"""Checking what is on disk while everything else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_invariants import check
from engine_world import SLOT_BYTES, Gate, World, chain, spec_of, until

from kvstore.engine.scrubber import Scrub
from kvstore.errors import Busy, InvalidRequest
from kvstore.index import Flush
from kvstore.miss import MissReason
from kvstore.tiers.base import Slot
from kvstore.tiers.faulty import Fault, FaultKind, Faulty
from kvstore.tiers.segment import HEADER_BYTES, segment_name

Make = Callable[..., World]


def _begin(world: World, fraction: float = 1.0, rate: int = 0) -> Scrub:
    assert world.engine.scrubber is not None
    return world.engine.scrubber.begin(fraction, rate)


async def _ended(scrub: Scrub) -> Scrub:
    await until(lambda: scrub.over)
    assert scrub.error is None
    return scrub


async def _scrub(world: World, fraction: float = 1.0) -> Scrub:
    scrub = await _ended(_begin(world, fraction))
    assert scrub.done
    return scrub


def _path(world: World, slot: Slot) -> Path:
    return world.directory / "disk" / segment_name(slot.group)


def flip(world: World, key: bytes) -> Slot:
    """Change one byte of a block on disk, behind everybody's back."""
    slot = world.block(key).disk
    assert slot is not None
    with _path(world, slot).open("r+b") as file:
        file.seek(HEADER_BYTES + slot.index * SLOT_BYTES + 77)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))
    return slot


async def _stored(world: World, name: str, blocks: int) -> list[bytes]:
    keys = chain(name, blocks)
    assert await world.player().put(keys) == blocks
    await world.settle()
    return keys


def test_a_rotten_block_goes_with_what_hangs_on_it_and_nothing_else(make_world: Make) -> None:
    async def story(world: World) -> None:
        bad, good = await _stored(world, "bad", 6), await _stored(world, "good", 6)
        await world.evict_host()
        slot = flip(world, bad[2])
        scrub = await _scrub(world)
        assert (scrub.total, scrub.checked, scrub.damaged) == (12, 12, 1)
        assert (scrub.dropped, scrub.lost, scrub.unreadable, scrub.gone) == (4, 4, 0, 0)
        [fault] = scrub.take_faults(10)
        assert (fault.key, fault.slot, fault.problem, fault.kept) == (
            bad[2],
            slot,
            "damaged",
            False,
        )
        assert fault.space_id == world.space.id
        assert world.tiers(bad) == "dd----"
        assert world.tiers(good) == "dddddd"
        _, miss = world.engine.lookup(world.space, bad)
        assert miss.reason is MissReason.CORRUPT
        await world.settle()
        check(world.engine, quiet=True)
        # A second look finds nothing: the damage is gone.
        again = await _scrub(world)
        assert (again.checked, again.damaged) == (8, 0)

    async def after(world: World) -> None:
        # What was dropped does not come back, what stayed is right.
        assert world.engine.recovered_blocks == 8
        assert await world.player().load(chain("good", 6)) == 6

    make_world().run(story, after)


def test_what_memory_holds_is_written_again(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await _stored(world, "warm", 5)
        flip(world, keys[1])
        scrub = await _scrub(world)
        assert (scrub.damaged, scrub.dropped, scrub.lost) == (1, 4, 0)
        assert [f.kept for f in scrub.take_faults(10)] == [True]
        await world.settle()
        assert world.tiers(keys) == "bbbbb"
        check(world.engine, quiet=True)
        assert (await _scrub(world)).damaged == 0

    async def after(world: World) -> None:
        assert await world.player().load(chain("warm", 5)) == 5

    make_world().run(story, after)


def test_below_a_gap_in_memory_nothing_is_kept(make_world: Make) -> None:
    """Host holds the block and its grandchild, the child is on disk only: it hangs on damage."""

    async def story(world: World) -> None:
        keys = await _stored(world, "gap", 4)
        await world.evict_host()
        player = world.player()
        assert await player.load(keys[:2]) == 2
        flip(world, keys[1])
        scrub = await _scrub(world)
        assert (scrub.damaged, scrub.dropped, scrub.lost) == (1, 3, 2)
        await world.settle()
        assert world.tiers(keys) == "bb--"
        check(world.engine, quiet=True)

    make_world().run(story)


def test_a_copy_in_memory_that_was_scribbled_on_saves_nothing(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await _stored(world, "scribbled", 3)
        host = world.block(keys[1]).host
        assert host is not None
        flip(world, keys[1])
        world.host.views(host)[0][5] ^= 1
        scrub = await _scrub(world)
        assert (scrub.damaged, scrub.lost) == (1, 2)
        assert [f.kept for f in scrub.take_faults(10)] == [False]
        await world.settle()
        assert world.tiers(keys) == "b--"
        check(world.engine, quiet=True)

    make_world().run(story)


def test_children_on_their_way_follow_a_parent_that_is_written_again(make_world: Make) -> None:
    """The parent's copy is found damaged while its child is being written below it."""

    class Slow(Gate):
        async def write(self, transfers: Any) -> Any:
            if self.closed:
                pass_ = asyncio.get_running_loop().create_future()
                self.reads.append((transfers, pass_))
                await pass_
            return await self.disk.write(transfers)

        async def read(self, transfers: Any) -> Any:
            return await self.disk.read(transfers)

    async def story(world: World) -> None:
        keys = chain("family", 4)
        player = world.player()
        assert await player.put(keys[:2]) == 2
        await world.settle()
        flip(world, keys[1])
        world.disk.closed = True
        assert await player.put(keys, at=2) == 4
        await until(lambda: world.disk.reads)
        assert world.block(keys[2]).flush is Flush.WRITING
        scrub = await _scrub(world)
        assert (scrub.damaged, scrub.dropped, scrub.lost) == (1, 1, 0)
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        await world.settle()
        assert world.tiers(keys) == "bbbb"
        check(world.engine, quiet=True)

    make_world(wrap=Slow).run(story)


def test_an_unreadable_block_is_reported_and_stays(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await _stored(world, "eio", 3)
        await world.evict_host()
        world.disk.plan.append(Fault(FaultKind.IO_ERROR, "read", call=0, block=1))
        scrub = await _scrub(world)
        assert (scrub.checked, scrub.damaged, scrub.unreadable) == (3, 0, 1)
        assert [f.problem for f in scrub.take_faults(10)] == ["unreadable"]
        assert world.tiers(keys) == "ddd"
        assert await world.player().load(keys) == 3
        check(world.engine, quiet=True)

    make_world(wrap=Faulty).run(story)


def test_a_segment_cut_short_loses_what_lay_beyond_its_end(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await _stored(world, "cut", 8)
        await world.evict_host()
        slots = [world.block(key).disk for key in keys]
        assert [s.index for s in slots if s is not None] == list(range(8))
        assert slots[0] is not None
        with _path(world, slots[0]).open("r+b") as file:
            file.truncate(HEADER_BYTES + 5 * SLOT_BYTES)
        scrub = await _scrub(world)
        assert scrub.damaged >= 1
        assert scrub.lost == 3
        assert world.tiers(keys) == "ddddd---"
        await world.settle()
        check(world.engine, quiet=True)

    make_world().run(story)


def test_a_block_in_memory_meanwhile_evicted_is_not_looked_at(make_world: Make) -> None:
    """Between the list and a block's turn anything may happen to it."""

    async def story(world: World) -> None:
        keys = await _stored(world, "races", 6)
        other = await world.engine.open_space(spec_of("other"))
        mine = chain("bumped", 4)
        assert await world.player().put(mine, space=other) == 4
        await world.settle()
        await world.evict_host()
        world.disk.closed = True
        # One block a batch: the first is being read while the others leave.
        scrub = _begin(world, rate=SLOT_BYTES * 10)
        await until(lambda: world.disk.reads)
        assert world.engine.index.disk_held == 1
        await world.engine.removal.bump_epoch(other)
        removed, skipped = await world.engine.removal.evict(world.space, keys[3:], None)
        assert (removed, skipped) == (3, 0)
        world.disk.closed = False
        world.disk.let(0)
        await _ended(scrub)
        assert (scrub.total, scrub.damaged, scrub.dropped) == (10, 0, 0)
        assert scrub.gone >= 6
        await world.settle()
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


def test_a_block_whose_epoch_ends_while_it_is_read_frees_its_slot_afterwards(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        keys = await _stored(world, "bumped", 3)
        await world.evict_host()
        flip(world, keys[0])
        world.disk.closed = True
        scrub = _begin(world)
        await until(lambda: world.disk.reads)
        await world.engine.removal.bump_epoch(world.space)
        assert world.disk.usage().used_bytes == 3 * SLOT_BYTES
        world.disk.let(0)
        await _ended(scrub)
        assert (scrub.damaged, scrub.dropped, scrub.lost) == (1, 0, 0)
        await world.settle()
        assert world.disk.usage().used_bytes == 0
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


def test_broken_off_it_lets_go_of_everything(make_world: Make) -> None:
    async def story(world: World) -> None:
        await _stored(world, "cancelled", 6)
        await world.evict_host()
        world.disk.closed = True
        scrub = _begin(world)
        await until(lambda: world.disk.reads)
        with pytest.raises(Busy, match="under way: 0 of 6 blocks"):
            _begin(world)
        assert world.engine.index.disk_held == 6
        scrub.cancel()
        await until(lambda: scrub.over)
        assert not scrub.done
        assert world.engine.index.disk_held == 0
        world.disk.closed = False
        assert (await _scrub(world)).checked == 6
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


def test_a_stop_does_not_wait_for_a_slow_check(make_world: Make) -> None:
    async def story(world: World) -> None:
        await _stored(world, "slow", 8)
        scrub = _begin(world, rate=SLOT_BYTES)  # it would take 8 seconds
        await until(lambda: scrub.checked)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await world.engine.quiesce(1.0)
        assert loop.time() - begun < 1.0
        assert scrub.over
        assert not scrub.done
        with pytest.raises(Busy, match="stopping"):
            _begin(world)

    make_world().run(story)


def test_the_rate_holds(make_world: Make) -> None:
    async def story(world: World) -> None:
        await _stored(world, "rate", 20)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        scrub = await _ended(_begin(world, rate=50 * SLOT_BYTES))
        took = loop.time() - begun
        assert scrub.checked == 20
        # The last batch needs no time after it; at 50 a second, in batches of 5.
        assert 0.29 < took < 2.0
        assert scrub.read_bytes == 20 * SLOT_BYTES

    make_world().run(story)


def test_loads_go_first(make_world: Make) -> None:
    """While a promotion waits for the disk, the check begins no read of its own."""

    async def story(world: World) -> None:
        keys = await _stored(world, "first", 4)
        await world.evict_host()
        player = world.player()
        world.disk.closed = True
        player.acquire(keys, deadline=5.0)
        await until(lambda: world.disk.reads)
        before = len(world.disk.read_slots)
        scrub = _begin(world)
        await asyncio.sleep(0.1)
        assert len(world.disk.read_slots) == before
        # Not for ever: somebody loads all the time.
        await until(lambda: len(world.disk.read_slots) > before)
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        assert (await _ended(scrub)).checked == 4

    make_world(wrap=Gate).run(story)


def test_a_sample_reads_its_part(make_world: Make) -> None:
    async def story(world: World) -> None:
        await _stored(world, "sample", 40)
        scrub = await _scrub(world, 0.25)
        segments = len({s for s, *_, used in world.disk.segments() if used})
        assert 10 <= scrub.total <= 10 + segments
        assert scrub.checked == scrub.total
        for wrong in (0.0, -1.0, 1.01, float("nan")):
            with pytest.raises(InvalidRequest, match="fraction"):
                _begin(world, wrong)

    make_world().run(story)


def test_shards_are_checked_one_by_one(make_world: Make) -> None:
    async def story(world: World) -> None:
        lengths: Sequence[int] = (4096, 1000)
        space = await world.engine.open_space(spec_of("sharded", lengths))
        keys = chain("sharded", 3)
        assert await world.player().put(keys, space=space) == 3
        await world.settle()
        await world.engine.removal.evict(space, None, None)
        assert await world.player().put(keys, space=space) == 3
        await world.settle()
        slot = space.blocks[keys[2]].disk
        assert slot is not None
        # In the padding of the second shard: no byte of the block.
        at = HEADER_BYTES + slot.index * 8192 + 4096
        with _path(world, slot).open("r+b") as file:
            file.seek(at + 1000)
            file.write(b"x")
        assert (await _scrub(world)).damaged == 0
        with _path(world, slot).open("r+b") as file:
            file.seek(at + 999)
            byte = file.read(1)
            file.seek(at + 999)
            file.write(bytes([byte[0] ^ 1]))
        scrub = await _scrub(world)
        assert (scrub.damaged, scrub.take_faults(1)[0].key) == (1, keys[2])
        await world.settle()
        check(world.engine, quiet=True)

    make_world().run(story)
