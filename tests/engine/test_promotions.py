"""Moves up: faults stay with their blocks, nobody starves, nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from engine_invariants import check
from engine_world import Gate, World, chain, spec_of, until

from kvstore.miss import MissReason
from kvstore.tiers.base import TierName
from kvstore.tiers.faulty import Fault, FaultKind, Faulty

Make = Callable[..., World]

# One block a batch, so that every block's read can be let through on its own.
BIG = 16 << 20


def _spoil(world: World, key: bytes) -> None:
    """Damage a block on disk, behind everybody's back."""
    block = world.block(key)
    assert block.disk is not None
    path = world.directory / "disk" / f"seg-{block.disk.group:06d}.kvs"
    with path.open("r+b") as file:
        file.seek(4096 + block.disk.index * world.space.shape.block_bytes)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_block_is_a_miss_and_takes_what_hangs_on_it(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys, branch = chain("good", 8), chain("branch", 3)
        await player.put(keys)
        await player.put([*keys[:4], *branch], at=4)
        await world.evict_host()
        await world.engine.pin(world.space, keys[:6], 0)
        _spoil(world, keys[3])
        assert await player.load(keys) == 3
        assert world.counts("corrupt_blocks") == 1
        await world.settle()
        # Prefix-closed: the children of the damaged block are unreachable, on disk too.
        assert world.tiers(keys) == "bbb-----"
        assert world.tiers(branch) == "---"
        assert world.engine.lookup(world.space, keys)[1].reason is MissReason.CORRUPT
        assert world.engine.pins.counts() == {world.space.id: 3}
        check(world.engine, quiet=True)
        assert len(world.store.load_blocks(world.disk.store_id).records) == 3
        assert await player.put(keys) == 8
        assert await player.load(keys) == 8

    make_world().run(story)


def test_a_damaged_block_under_a_lease_that_holds_its_descendants(make_world: Make) -> None:
    async def story(world: World) -> None:
        world.space = await world.engine.open_space(spec_of("big", (BIG,)))
        player, other = world.player(), world.player()
        keys = chain("held", 4)
        await player.put(keys, step=1)
        await world.evict_host()
        _spoil(world, keys[1])
        world.disk.closed = True
        lease, _ = player.acquire(keys, deadline=30)
        await until(lambda: len(world.disk.reads) == 3)
        world.disk.let(2)
        await until(lambda: world.tiers(keys) == "ddbd")
        # Somebody else reads below the damage: right bytes, which stay until the reader is done.
        [early] = world.engine.start_read(world.space, keys[2:3]).run
        slot = early.host
        world.disk.let(0)
        await until(lambda: world.tiers(keys) == "bdbd")
        while world.disk.reads:
            world.disk.let(0)
            await asyncio.sleep(0)
        done = await player.lease_done(lease)
        assert (done.blocks, done.miss.reason) == (1, MissReason.CORRUPT)
        assert world.tiers(keys) == "b---"
        assert early.dead
        assert early.host_refs == 1
        assert slot is not None
        assert player.reads_right(keys[2:3], [slot])
        world.engine.index.release_host(early)
        assert early.host is None
        player.release(lease)
        other.detach()
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        await world.settle()
        check(world.engine, quiet=True)

    world = make_world(host_blocks=8, disk_blocks=8, block_bytes=BIG, wrap=Gate)
    world.run(story)


def test_an_unreadable_block_ends_the_run_there_and_is_not_given_up(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("eio", 8)
        await player.put(keys)
        await world.evict_host()
        world.disk.plan.append(Fault(FaultKind.IO_ERROR, "read", block=5))
        lease, _ = player.acquire(keys, deadline=5)
        done = await player.lease_done(lease)
        assert (done.blocks, done.miss.reason) == (5, MissReason.IO_ERROR)
        player.release(lease)
        await world.settle()
        assert world.tiers(keys) == "bbbbbdbb"
        check(world.engine, quiet=True)
        world.disk.plan.clear()
        assert await player.load(keys) == 8

    make_world(wrap=Faulty).run(story)


def test_all_of_a_batch_fails_again_and_again_and_the_next_one_works(make_world: Make) -> None:
    """Each failure makes its lease cancel the other moves of the same batch."""

    async def story(world: World) -> None:
        player = world.player()
        keys = chain("unavailable", 8)
        await player.put(keys)
        await world.evict_host()
        world.disk.plan.append(Fault(FaultKind.UNAVAILABLE, "read"))
        for _ in range(5):  # more often than there are tasks to lose
            assert await player.load(keys) == 0
        world.disk.plan.clear()
        assert await player.load(keys) == 8
        await world.settle()
        check(world.engine, quiet=True)

    make_world(wrap=Faulty).run(story)


def test_a_fault_that_nobody_expects_ends_one_batch_not_the_service(make_world: Make) -> None:
    class Odd(Gate):
        async def read(self, transfers: Any) -> Any:
            if self.closed:
                raise ValueError("out of the blue")
            return await super().read(transfers)

    async def story(world: World) -> None:
        player = world.player()
        keys = chain("odd", 4)
        await player.put(keys)
        await world.evict_host()
        world.disk.closed = True
        for _ in range(5):
            assert await player.load(keys) == 0
        world.disk.closed = False
        assert await player.load(keys) == 4
        await world.settle()
        check(world.engine, quiet=True)

    make_world(wrap=Odd).run(story)


def test_no_room_fails_a_whole_batch_of_one_lease_and_the_service_goes_on(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("noroom", 12)
        await player.put(keys, step=2)
        await world.evict_host()
        # Pinned blocks that are nowhere else fill the pool: nothing may come.
        world.disk.plan.append(Fault(FaultKind.NO_SPACE, "write"))
        full = chain("full", 8)
        assert await player.put(full, step=2) == 8
        await world.settle()
        await world.engine.pin(world.space, full, 0)
        assert world.tiers(full) == "h" * 8
        for _ in range(5):
            lease, _ = player.acquire(keys, deadline=20)
            done = await player.lease_done(lease)
            assert (done.blocks, done.miss.reason) == (0, MissReason.NO_ROOM)
            player.release(lease)
        await world.engine.pins.unpin(world.space, None)
        world.disk.plan.clear()
        assert await player.load(keys[:8]) == 8
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=8, wrap=Faulty).run(story)


def test_a_shape_without_room_does_not_stop_another_one(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        wide = await world.engine.open_space(spec_of("wide", (8192,)))
        small, big = chain("small", 4), chain("big", 2)
        await player.put(big, step=1, space=wide)
        await player.put(small)
        await world.settle()
        await world.evict_host()
        await world.engine.removal.evict(wide, None, TierName.HOST)
        # Every slot of the wide shape is granted to somebody who takes his time.
        hog = world.player()
        while (await hog.reserve(1, deadline=0.0, space=wide))[1]:
            pass
        waiting, _ = player.acquire(big, deadline=30, priority=9, space=wide)
        await asyncio.sleep(0.05)
        assert await player.load(small) == 4
        assert await player.load(small) == 4
        hog.detach()
        assert (await player.lease_done(waiting)).blocks == 2
        player.release(waiting)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=16).run(story)


def test_moves_that_waited_for_room_keep_their_order_and_priority(make_world: Make) -> None:
    async def story(world: World) -> None:
        player, hog = world.player(), world.player()
        low, high = chain("low", 3), chain("high", 3)
        await player.put(low)
        await player.put(high)
        await world.evict_host()
        slots = {world.block(key).disk: key for key in (*low, *high)}
        grant, held, _ = await hog.reserve(8)
        assert len(held) == 8
        one, _ = player.acquire(low, deadline=30)
        await asyncio.sleep(0.02)
        two, _ = player.acquire(high, deadline=30, priority=1)
        await asyncio.sleep(0.02)
        # One slot at a time: what is served first shows in the order of the reads.
        for slot in held:
            world.engine.abort(hog.attachment, hog.attachment.id, grant, [slot], all_shards=True)
            await asyncio.sleep(0.01)
        assert (await player.lease_done(two)).blocks == 3
        assert (await player.lease_done(one)).blocks == 3
        assert [slots[slot] for slot in world.disk.read_slots] == [*high, *low]

    make_world(host_blocks=8, wrap=Gate).run(story)


def test_a_block_wanted_more_urgently_moves_up(make_world: Make) -> None:
    async def story(world: World) -> None:
        player, hog = world.player(), world.player()
        keys, urgent = chain("first", 3), chain("urgent", 2)
        await player.put(keys)
        await player.put(urgent)
        await world.evict_host()
        slots = {world.block(key).disk: key for key in (*keys, *urgent)}
        await hog.reserve(8)
        player.acquire(keys, deadline=30)
        player.acquire(urgent, deadline=30)
        player.acquire(urgent, deadline=30, priority=5)
        hog.detach()
        await until(lambda: len(world.disk.read_slots) == 5)
        assert [slots[slot] for slot in world.disk.read_slots] == [*urgent, *keys]
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=8, wrap=Gate).run(story)


def test_prefetching_a_chain_longer_than_the_pool_keeps_its_head_and_reads_no_more(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("long", 24)
        await player.put(keys, step=2)
        await world.evict_host()
        prefetch = world.engine.tickets.prefetch
        blocks, done, miss = await prefetch(world.space, keys, 1, 0.0, 0, 10.0)
        assert done
        assert (blocks, miss.reason) == (8, MissReason.NO_ROOM)
        assert world.tiers(keys) == "b" * 8 + "d" * 16
        assert len(world.disk.read_slots) == 8
        check(world.engine, quiet=True)

    make_world(host_blocks=8, wrap=Gate).run(story)


def test_a_ticket_is_joined_cancelled_and_forgotten(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("ticket", 4)
        await player.put(keys)
        await world.evict_host()
        tickets = world.engine.tickets
        world.disk.closed = True
        assert await tickets.prefetch(world.space, keys, 7, 0.0, 0, 0.0) == (
            0,
            False,
            (await tickets.prefetch(world.space, keys, 7, 0.0, 0, 0.0))[2],
        )
        waiting = asyncio.create_task(tickets.prefetch(world.space, keys, 7, 0.0, 0, 30.0))
        await until(lambda: world.disk.reads)
        tickets.cancel(7)
        blocks, done, _ = await asyncio.wait_for(waiting, 60)
        assert (blocks, done) == (0, True)
        assert len(tickets) == 0
        late = asyncio.create_task(tickets.prefetch(world.space, keys, 8, 0.1, 0, 30.0))
        blocks, done, miss = await asyncio.wait_for(late, 60)
        assert (blocks, done, miss.reason) == (0, True, MissReason.DEADLINE)
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        await world.settle()
        check(world.engine, quiet=True)
        assert await tickets.prefetch(world.space, keys, 9, 0.0, 0, 5.0) == (
            4,
            True,
            type(miss)(),
        )

    make_world(wrap=Gate).run(story)


def test_a_stop_in_the_middle_of_a_read_waits_for_it(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("stopping", 4)
        await player.put(keys)
        await world.evict_host()
        lease, _ = player.acquire(keys, deadline=30)
        await asyncio.wait_for(world.disk.stalled.wait(), 60)
        promoter = world.engine.promoter
        assert promoter is not None
        stop = asyncio.create_task(promoter.stop())
        await asyncio.sleep(0.01)
        world.disk.resume()
        await stop
        assert len(promoter) == 0
        assert promoter.moving == 0
        player.release(lease)
        await world.settle()
        check(world.engine, quiet=True)

    stall = [Fault(FaultKind.STALL, "read", call=0)]
    make_world(wrap=lambda disk: Faulty(disk, stall)).run(story)


def test_a_stream_lets_go_of_what_it_has_sent_and_of_the_rest_when_it_is_closed(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("stream", 6)
        await player.put(keys)
        await world.evict_host(keys[3:])
        read = world.engine.start_read(world.space, keys)
        for at in range(4):
            assert not await read.wait(at, 5.0)
            assert read.tier(at) is (TierName.HOST if at < 3 else TierName.DISK)
        await world.settle()
        read.let_go(0)
        read.let_go(3)
        refs = [world.block(key).host_refs for key in keys]
        assert refs == [0, 1, 1, 0, 1, 1]
        read.close()
        read.close()
        check(world.engine, quiet=True)

    make_world().run(story)


def test_a_ticket_asked_for_anew_is_not_forgotten_with_the_cancelled_one(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys, tickets = chain("ticket", 4), world.engine.tickets
        await world.player().put(keys)
        await world.evict_host(keys)
        world.disk.closed = True
        first = asyncio.create_task(tickets.prefetch(world.space, keys, 1, 60.0, 0, 60.0))
        await until(lambda: world.disk.reads)
        tickets.cancel(1)
        # Before the one who waits for it has heard of that.
        again = asyncio.create_task(tickets.prefetch(world.space, keys, 1, 60.0, 0, 0.0))
        await first
        assert (await again)[1] is False
        assert len(tickets) == 1
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        await until(lambda: world.tiers(keys) == "bbbb")

    make_world(wrap=Gate).run(story)
