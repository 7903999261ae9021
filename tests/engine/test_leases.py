"""Leases hold what they name, grow in order, and end once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engine_invariants import check
from engine_world import Gate, World, chain, until

from kvstore.engine.events import LeaseDoneEvent, LeaseGrownEvent
from kvstore.errors import InvalidRequest
from kvstore.miss import MissReason
from kvstore.tiers.faulty import Fault, FaultKind, Faulty
from kvstore.tiers.throttled import Throttled

Make = Callable[..., World]

# One block a batch, so that every block's read can be let through on its own.
BIG = 16 << 20


def _big(world: World) -> Any:
    from engine_world import spec_of

    return world.engine.open_space(spec_of("big", (BIG,)))


def test_a_lease_grows_in_order_while_blocks_land_out_of_order(make_world: Make) -> None:
    async def story(world: World) -> None:
        space = await _big(world)
        player = world.player()
        keys = chain("order", 5)
        assert await player.put(keys, step=1, space=space) == 5
        await world.settle()
        # The head stays in host; the rest is on disk only.
        await world.engine.removal.evict(space, keys[1:], None)
        assert len(space.blocks) == 1
        assert await player.put(keys, at=1, step=1, space=space) == 5
        await world.settle()
        from kvstore.tiers.base import TierName

        await world.engine.removal.evict(space, keys[1:], TierName.HOST)
        world.disk.closed = True
        lease, answer = player.acquire(keys, deadline=20, space=space)
        assert (answer.blocks, answer.growing) == (1, True)
        assert answer.tiers == bytes([TierName.HOST])
        await until(lambda: len(world.disk.reads) == 3)

        async def land(at: int) -> None:
            before = world.counts("promoted_blocks")
            world.disk.let(at)
            await until(lambda: world.counts("promoted_blocks") > before)

        await land(1)  # block 2 is there, 1 is not
        assert player.heard_of(LeaseGrownEvent) == []
        # It is held before its turn: nothing can take it away.
        assert space.blocks[keys[2]].host_refs == 1
        await land(0)  # block 1: two at once
        [grown] = player.heard_of(LeaseGrownEvent)
        assert (grown.first, len(grown.slots.slots)) == (1, 2)
        assert player.reads_right(keys[1:3], grown.slots.slots, space)
        await until(lambda: len(world.disk.reads) == 2)
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        done = await player.lease_done(lease)
        assert (done.blocks, done.miss.reason) == (5, MissReason.NONE)
        firsts = [event.first for event in player.heard_of(LeaseGrownEvent)]
        assert firsts == sorted(set(firsts))
        tiers = b"".join(event.tiers for event in player.heard_of(LeaseGrownEvent))
        assert tiers == bytes([TierName.DISK]) * 4
        check(world.engine)
        player.release(lease)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=8, disk_blocks=8, block_bytes=BIG, wrap=Gate).run(story)


def test_the_deadline_ends_growth_and_lets_go_of_what_came_early(make_world: Make) -> None:
    async def story(world: World) -> None:
        space = await _big(world)
        player = world.player()
        keys = chain("late", 6)
        await player.put(keys, step=1, space=space)
        await world.settle()
        from kvstore.tiers.base import TierName

        await world.engine.removal.evict(space, None, TierName.HOST)
        world.disk.closed = True
        lease, answer = player.acquire(keys, deadline=600, space=space)
        assert (answer.blocks, answer.growing) == (0, True)
        await until(lambda: len(world.disk.reads) == 3)
        world.disk.let(1)
        await until(lambda: space.blocks[keys[1]].host is not None)
        # The deadline comes now, not whenever a slow machine is ready for it.
        world.engine.leases._expire(player.attachment.leases[lease])
        done = await player.lease_done(lease)
        assert (done.blocks, done.miss.reason, done.miss.tier) == (0, MissReason.DEADLINE, "disk")
        assert space.blocks[keys[1]].host_refs == 0
        assert player.attachment.leased_bytes == 0
        # Those under way end, the fourth began when the first ended; the others never do.
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        await world.settle()
        assert len(world.disk.read_slots) == 4
        assert player.heard_of(LeaseGrownEvent) == []
        assert len(player.heard_of(LeaseDoneEvent)) == 1
        player.release(lease)
        player.release(lease)
        check(world.engine, quiet=True)

    make_world(host_blocks=8, disk_blocks=8, block_bytes=BIG, wrap=Gate).run(story)


def test_release_while_it_grows_drops_moves_that_nobody_waits_for(make_world: Make) -> None:
    async def story(world: World) -> None:
        space = await _big(world)
        one, two = world.player(), world.player()
        keys = chain("released", 6)
        await one.put(keys, step=1, space=space)
        await world.settle()
        from kvstore.tiers.base import TierName

        await world.engine.removal.evict(space, None, TierName.HOST)
        world.disk.closed = True
        first, _ = one.acquire(keys, deadline=30, space=space)
        second, _ = two.acquire(keys[:4], deadline=30, space=space)
        await until(lambda: len(world.disk.reads) == 3)
        one.release(first)
        assert len(world.engine.promoter or ()) == 4
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        assert (await two.lease_done(second)).blocks == 4
        assert one.heard_of(LeaseDoneEvent) == []
        assert len(world.disk.read_slots) == 4
        two.release(second)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=8, disk_blocks=8, block_bytes=BIG, wrap=Gate).run(story)


def test_n_readers_of_a_cold_block_cause_one_read(make_world: Make) -> None:
    async def story(world: World) -> None:
        players = [world.player() for _ in range(64)]
        keys = chain("shared", 8)
        await players[0].put(keys)
        await world.evict_host()
        world.disk.closed = True
        loads = [asyncio.create_task(player.load(keys)) for player in players]
        await until(lambda: world.disk.reads)
        await asyncio.sleep(0)
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        assert await asyncio.gather(*loads) == [8] * 64
        assert len(world.disk.read_slots) == len(set(world.disk.read_slots)) == 8
        await world.settle()
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


def test_beyond_the_cap_nothing_is_held(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("cap", 10)
        await player.put(keys)
        await world.settle()
        first, answer = player.acquire(keys[:4])
        assert answer.blocks == 4
        second, answer = player.acquire(keys)
        assert (answer.blocks, answer.miss.reason) == (2, MissReason.LEASE_CAP)
        _, answer = player.acquire(keys)
        assert (answer.blocks, answer.miss.reason) == (0, MissReason.LEASE_CAP)
        player.release(first)
        assert player.acquire(keys)[1].blocks == 4
        assert player.attachment.leased_bytes == 6 * 4096
        assert world.player().acquire(keys)[1].blocks == 6
        player.release(second)

    make_world(lease_cap_blocks=6).run(story)


def test_one_id_is_one_lease_however_often_it_is_asked_for(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("id", 3)
        await player.put(keys)
        await world.settle()
        lease, first = player.acquire(keys)
        _, again = player.acquire(keys, lease_id=lease)
        assert first.slots.slots == again.slots.slots
        assert list(first.slots.generations) == list(again.slots.generations)
        assert world.block(keys[0]).host_refs == 1
        player.release(lease)
        assert world.block(keys[0]).host_refs == 0

    make_world().run(story)


def test_a_release_that_overtakes_its_acquire_leaves_no_lease_for_ever(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("overtaken", 3)
        await player.put(keys)
        await world.settle()
        player.release(4711)
        _, answer = player.acquire(keys, lease_id=4711)
        assert (answer.blocks, answer.miss.reason) == (0, MissReason.LEASE_LOST)
        check(world.engine, quiet=True)

    make_world().run(story)


def test_a_key_named_twice_is_no_chain(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("loop", 2)
        await player.put(keys)
        await world.evict_host()
        with pytest.raises(InvalidRequest, match="twice"):
            player.acquire([keys[0], keys[0]], deadline=5)
        check(world.engine, quiet=True)

    make_world().run(story)


def test_without_a_deadline_nothing_is_promoted(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("cold", 4)
        await player.put(keys)
        await world.evict_host(keys[2:])
        _, answer = player.acquire(keys)
        assert (answer.blocks, answer.growing) == (2, False)
        assert (answer.miss.reason, answer.miss.tier) == (MissReason.DEADLINE, "disk")
        assert len(world.engine.promoter or ()) == 0
        assert world.engine.counters.miss_blocks["deadline"] == 2

    make_world().run(story)


def test_misses_are_counted_where_the_run_ends_and_where_it_was_cut(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("counted", 8)
        await player.put(keys[:4])
        await world.evict_host()
        lease, answer = player.acquire(keys, deadline=0.2)
        assert answer.growing
        done = await player.lease_done(lease)
        assert done.blocks == 0
        misses = world.engine.counters.miss_blocks
        assert (misses["never_seen"], misses["deadline"]) == (4, 4)
        assert sum(misses.values()) == 8
        world.disk.plan.clear()
        world.disk.resume()
        await world.settle()

    stall = [Fault(FaultKind.STALL, "read")]
    make_world(wrap=lambda disk: Faulty(disk, stall)).run(story)


def test_slow_storage_is_not_waited_for_beyond_the_deadline(make_world: Make) -> None:
    async def story(world: World) -> None:
        space = await _big(world)
        player = world.player()
        keys = chain("slow", 6)
        await player.put(keys, step=1, space=space)
        await world.settle()
        from kvstore.tiers.base import TierName

        await world.engine.removal.evict(space, None, TierName.HOST)
        # One block comes soon; the others' turn on the device is an hour away.
        world.disk.bytes_per_second = BIG / 0.05
        lease, _ = player.acquire(keys, deadline=600, space=space)
        held = player.attachment.leases[lease]
        await until(lambda: len(held.where) < 6)
        world.disk.bytes_per_second = BIG / 3600
        came = held.count
        world.engine.leases._expire(held)
        done = await player.lease_done(lease)
        assert done.blocks == came
        assert done.miss.reason is MissReason.DEADLINE
        player.release(lease)
        await world.settle()
        check(world.engine, quiet=True)

    world = make_world(
        host_blocks=8,
        disk_blocks=8,
        block_bytes=BIG,
        wrap=lambda disk: Throttled(disk, float("inf")),
    )
    world.run(story)
