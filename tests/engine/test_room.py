"""Slots for whoever needs them: who pays, who waits, and who is told at once."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
from engine_invariants import check
from engine_world import World, chain, spec_of, until

from kvstore.engine.events import SlabRetireEvent
from kvstore.outcomes import Shortage
from kvstore.tiers.base import TierName
from kvstore.tiers.faulty import Fault, FaultKind, Faulty

Make = Callable[..., World]


def test_a_pool_that_gets_no_memory_for_now_refuses_no_space(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the machine's is not the client's, who would never ask again."""

    async def story(world: World) -> None:
        await until(lambda: world.host.state != "ok")
        assert world.host.usage().capacity_bytes == 0
        player = world.player()
        space = await world.engine.open_space(spec_of("other"))
        _, slots, _ = await player.reserve(1, deadline=0.0, space=space)
        assert slots == []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    make_world(disk_blocks=0).run(story)


def test_opening_a_space_takes_a_part_of_the_pool_ahead_of_the_first_prompt(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        await until(lambda: world.host.free_blocks(world.space.shape) >= 400 // 8)
        await until(lambda: not world.host.allocating)
        # Not all of it: most daemons never need all.
        assert world.host.room_blocks(world.space.shape) > 300

    make_world(host_blocks=400, disk_blocks=0).run(story)


@pytest.mark.parametrize(("disk_blocks", "least", "most"), [(8, 12, 12), (24, 24, 36)])
def test_a_chain_longer_than_host_and_disk_keeps_its_head_and_hears_so_at_once(
    make_world: Make, disk_blocks: int, least: int, most: int
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        await player.put(chain("other", 6))
        keys = chain("longest", 40)
        begun = asyncio.get_running_loop().time()
        blocks = await player.put(keys, step=3, deadline=30.0)
        assert asyncio.get_running_loop().time() - begun < 5.0
        await world.settle()
        # Tails leave before heads: what is in host hangs together up to its last block.
        assert least <= blocks <= most
        assert world.tiers(keys)[disk_blocks:blocks] == "h" * (blocks - disk_blocks)
        assert world.tiers(keys)[:disk_blocks].strip("bd") == ""
        _, slots, shortage = await player.reserve(1, protect=[keys[blocks - 1]], deadline=30.0)
        assert (slots, shortage) == ([], Shortage.NO_ROOM)
        # Nobody but the lease itself holds anything: it is told at once what it gets.
        half = keys[: blocks // 2]
        assert await player.load(half, deadline=30.0) == min(blocks // 2, 12)
        assert asyncio.get_running_loop().time() - begun < 6.0
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=12, disk_blocks=disk_blocks).run(story)


def test_without_a_disk_a_chain_longer_than_the_pool_keeps_its_head(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("long", 30)
        assert await player.put(keys, step=1, deadline=30.0) == 8
        assert await player.load(keys) == 8
        # Unprotected, somebody else's chain pushes its tail out.
        assert await player.put(chain("other", 3)) == 3
        assert world.tiers(keys) == "h" * 5 + "-" * 25
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=8, disk_blocks=0).run(story)


def test_busy_wait_when_nothing_can_be_evicted_reserve_answers_at_once(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("leased", 8)
        await player.put(keys)
        await world.settle()
        lease, answer = player.acquire(keys)
        assert answer.blocks == 8
        loop = asyncio.get_running_loop()
        begun = loop.time()
        assert (await player.reserve(1, deadline=0))[2] is Shortage.BUSY
        assert loop.time() - begun < 30
        # A waiter costs nothing while nothing happens.
        room: Any = world.engine.room
        takes: list[object] = []
        take = room.take

        def counted(*args: Any) -> Any:
            takes.append(args)
            return take(*args)

        room.take = counted
        assert (await player.reserve(1, deadline=0.3))[2] is Shortage.BUSY
        assert 0.3 <= loop.time() - begun < 0.6
        assert len(takes) <= 3
        room.take = take
        waiting = asyncio.create_task(player.reserve(4, deadline=10))
        await asyncio.sleep(0.01)
        player.release(lease)
        assert len((await waiting)[1]) == 4
        player.detach()

    make_world(host_blocks=8, disk_blocks=0).run(story)


def test_dirty_blocks_are_waited_for_not_lost(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("dirty", 8)
        await player.put(keys, step=8)
        await asyncio.wait_for(world.disk.stalled.wait(), 60)
        assert (await player.reserve(1, deadline=0.05))[2] is Shortage.BUSY
        assert world.tiers(keys) == "h" * 8
        waiting = asyncio.create_task(player.reserve(2, deadline=10))
        await asyncio.sleep(0.01)
        world.disk.plan.clear()
        world.disk.resume()
        assert len((await waiting)[1]) == 2
        assert "-" not in world.tiers(keys)
        player.detach()
        await world.settle()
        check(world.engine, quiet=True)

    stall = [Fault(FaultKind.STALL, "write")]
    make_world(host_blocks=8, wrap=lambda disk: Faulty(disk, stall)).run(story)


def test_slots_are_made_free_ahead_of_need_only_by_dropping_copies(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("ahead", 100)
        await player.put(keys[:98])
        await world.settle()
        await player.put(keys, at=98, step=1)
        await world.settle()
        free = world.host.free_blocks(world.space.shape)
        assert 2 <= free <= 4
        assert "-" not in world.tiers(keys)
        assert world.counts("evictions_background") >= free
        check(world.engine, quiet=True)

    make_world(host_blocks=100, disk_blocks=128).run(story)


def test_another_block_size_gets_a_group_of_a_full_pool(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        cold, warm = chain("cold", 8), chain("warm", 8)
        await player.put(cold)
        await player.put(warm)
        await world.settle()
        assert await player.load(warm) == 8
        wide = await world.engine.open_space(spec_of("wide", (4096, 8192)))
        keys = chain("w", 2)

        async def unmap() -> None:
            while True:
                for event in player.heard_of(SlabRetireEvent):
                    world.engine.room.unmapped(player.attachment.id, event.groups)
                await asyncio.sleep(0.002)

        unmapping = asyncio.create_task(unmap())
        assert await player.put(keys, step=1, deadline=5.0, space=wide) == 2
        await world.settle()
        # Clean copies only: all is still on disk.
        assert "-" not in world.tiers(cold) + world.tiers(warm)
        assert world.tiers(warm).count("b") >= world.tiers(cold).count("b")
        assert await player.load(cold, deadline=20.0) == 8
        unmapping.cancel()
        check(world.engine, quiet=True)

    make_world(host_blocks=16, disk_blocks=64).run(story)


def test_a_group_that_is_in_use_is_not_taken_and_nothing_is_dropped_in_vain(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        chains = [chain(f"c{n}", 4) for n in range(4)]
        for keys in chains:
            await player.put(keys)
        await world.settle()
        # One block of each group is held, by a lease or by a pin of a last copy.
        groups: dict[int, bytes] = {}
        for block in world.space.blocks.values():
            if block.host is not None:
                groups.setdefault(block.host.group, block.key)
        for keys in chains:
            await world.engine.removal.evict(world.space, keys, TierName.DISK)
        pinned, *leased = groups.values()
        world.block(pinned).pinned_until = 1e18
        for key in leased:
            player.acquire([key])
        before = [world.tiers(keys) for keys in chains]
        wide = await world.engine.open_space(spec_of("wide", (8192,)))
        _, slots, shortage = await world.player().reserve(1, deadline=0.3, space=wide)
        assert (slots, shortage) == ([], Shortage.BUSY)
        assert [world.tiers(keys) for keys in chains] == before
        check(world.engine)
        world.block(pinned).pinned_until = 0.0

    make_world(host_blocks=16).run(story)


def test_a_client_that_never_unmaps_keeps_the_group_and_the_others_go_on(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        deaf, player = world.player("deaf"), world.player()
        await player.put(chain("c", 8))
        await world.settle()
        wide = await world.engine.open_space(spec_of("wide", (8192,)))
        waiting = asyncio.create_task(
            world.engine.reservations.reserve(player.attachment, wide, 99, 1, [], 10.0, [])
        )
        await until(lambda: world.engine.room.retiring)
        [group] = world.engine.room.retiring
        world.engine.room.unmapped(player.attachment.id, [group])
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert await player.load(chain("c", 8), deadline=0.1) >= 4
        deaf.die()
        slots, _ = await waiting
        assert len(slots) == 1
        player.detach()

    make_world(host_blocks=8).run(story)


def test_four_clients_on_a_tiny_pool_and_a_small_disk_never_hang(make_world: Make) -> None:
    async def story(world: World) -> None:
        async def client(n: int) -> None:
            player = world.player(f"client{n}")
            for turn in range(12):
                keys = chain(f"{n % 2}/{turn % 5}", 6)
                stored = await player.put(keys, step=1 + n % 3, deadline=3.0)
                loaded = await player.load(keys, deadline=1.0)
                assert 0 <= loaded <= 6
                if turn % 4 == n:
                    await world.engine.removal.evict(world.space, keys, None)
                assert stored >= 0
            player.detach()

        await asyncio.wait_for(asyncio.gather(*(client(n) for n in range(4))), 60)
        await world.settle()
        check(world.engine, quiet=True)
        assert not world.engine.leases.count
        assert not len(world.engine.grants)

    make_world(host_blocks=8, disk_blocks=16).run(story)


def test_draining_grants_nothing_more_and_waits_for_what_is_granted(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("drain", 4)
        grant, slots, _ = await player.reserve(4)
        drain = asyncio.create_task(world.engine.drain(5.0))
        await asyncio.sleep(0.01)
        assert (await player.reserve(1))[2] is Shortage.DRAINING
        player.write(slots, keys)
        player.commit(grant, slots, keys)
        assert await drain == (True, 0, [])
        assert world.tiers(keys) == "bbbb"
        assert await player.load(keys) == 4

    make_world().run(story)


def test_a_drain_that_takes_too_long_says_what_is_left(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        await player.reserve(2)
        assert await world.engine.drain(0.1) == (False, 1, [])
        player.detach()

    make_world().run(story)
