"""The host pool grows and shrinks while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from engine_invariants import check
from engine_world import SLOT_BYTES, Player, World, chain, spec_of, until

from kvstore.engine.events import SlabRetireEvent
from kvstore.engine.resizer import Resized
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.tiers.base import TierName

Make = Callable[..., World]


async def resize(world: World, blocks: int, timeout: float = 10.0) -> Resized:
    return await world.engine.resizer.resize(TierName.HOST, blocks * SLOT_BYTES, timeout)


async def unmaps(world: World, *players: Player) -> None:
    """Be clients that unmap what they are told to."""
    done: set[int] = set()
    while True:
        for player in players:
            for event in player.heard_of(SlabRetireEvent):
                if event.groups[0] not in done or len(players) > 1:
                    done.update(event.groups)
                    player.attachment.groups.difference_update(event.groups)
                    world.engine.room.unmapped(player.attachment.id, event.groups)
        await asyncio.sleep(0.005)


async def _serving(world: World, *players: Player) -> asyncio.Task[None]:
    return asyncio.create_task(unmaps(world, *players))


def test_the_coldest_leave_and_the_others_move_together(make_world: Make) -> None:
    """Hot and cold blocks lie mixed in every group; without a disk what leaves is lost."""

    async def story(world: World) -> None:
        player = world.player()
        task = await _serving(world, player)
        chains = [chain(f"mixed{n}", 8) for n in range(8)]
        # A block of each in turn: every group has some of all.
        for at in range(8):
            for keys in chains:
                assert await player.put(keys[: at + 1], at=at) == at + 1
        await world.settle()
        for keys in chains[4:] + chains[:4]:
            lease, _ = player.acquire(keys)
            player.release(lease)
        assert len(world.host.groups()) >= 4
        done = await resize(world, 32)
        assert done == Resized(32 * SLOT_BYTES, True, 32)
        usage = world.host.usage()
        assert usage.allocated_bytes <= 32 * SLOT_BYTES
        # What was used last is all there, and right.
        assert [world.tiers(keys) for keys in chains[:4]] == ["h" * 8] * 4
        assert [world.tiers(keys) for keys in chains[4:]] == ["-" * 8] * 4
        for keys in chains[:4]:
            assert await player.load(keys) == 8
        check(world.engine, quiet=True)
        task.cancel()

    make_world(disk_blocks=0).run(story)


def test_nothing_is_lost_that_fits(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        task = await _serving(world, player)
        keys = [chain(f"few{n}", 8) for n in range(8)]
        for one in keys:
            await player.put(one)
        for one in keys[::2]:
            await world.engine.removal.evict(world.space, one, None)
        done = await resize(world, 32)
        assert done == Resized(32 * SLOT_BYTES, True, 0)
        for one in keys[1::2]:
            assert await player.load(one) == 8
        check(world.engine, quiet=True)
        task.cancel()

    make_world(disk_blocks=0).run(story)


def test_what_is_leased_or_granted_stays_until_it_is_not(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        task = await _serving(world, player)
        keys = chain("leased", 32)
        assert await player.put(keys) == 32
        lease, answer = player.acquire(keys)
        assert answer.blocks == 32
        grant, slots, _ = await player.reserve(32)
        assert len(slots) == 32
        done = await resize(world, 32, timeout=0.2)
        assert not done.done
        assert done.capacity_bytes > 32 * SLOT_BYTES
        assert not player.heard_of(SlabRetireEvent)
        assert player.reads_right(keys, answer.slots.slots)
        # Nothing more is given out meanwhile.
        assert (await player.reserve(1, deadline=0.05))[1] == []
        # The writer finishes; the pool is twice as full as it may be, and nobody can leave.
        more = chain("granted", 32)
        player.write(slots, more)
        player.commit(grant, slots, more)
        player.release(lease)
        await until(lambda: world.host.usage().allocated_bytes <= 32 * SLOT_BYTES)
        assert world.tiers(keys + more).count("h") == 32
        check(world.engine, quiet=True)
        task.cancel()

    make_world(disk_blocks=0).run(story)


def test_a_lease_that_comes_during_a_copy_keeps_its_slot(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        task = await _serving(world, player)
        keys = [chain(f"late{n}", 16) for n in range(4)]
        for one in keys:
            await player.put(one)
        write = world.host.write
        leases = []

        async def leased_meanwhile(transfers):  # type: ignore[no-untyped-def]
            outcomes = await write(transfers)
            for one in keys:
                lease, answer = player.acquire(one)
                leases.append((lease, one[: answer.blocks], answer.slots.slots))
            return outcomes

        world.host.write = leased_meanwhile  # type: ignore[method-assign]
        done = await resize(world, 48, timeout=0.3)
        world.host.write = write  # type: ignore[method-assign]
        assert leases
        assert not done.done
        for lease, one, slots in leases:
            assert player.reads_right(one, slots)
            player.release(lease)
        await until(lambda: world.host.usage().allocated_bytes <= 48 * SLOT_BYTES)
        check(world.engine, quiet=True)
        task.cancel()

    make_world(disk_blocks=0).run(story)


def test_memory_goes_back_only_when_everybody_has_unmapped_it(make_world: Make) -> None:
    async def story(world: World) -> None:
        one, other = world.player("one"), world.player("other")
        await one.put(chain("mapped", 32))
        before = world.host.usage().allocated_bytes
        done = await resize(world, 16, timeout=0.3)
        assert not done.done
        assert world.host.usage().allocated_bytes == before
        told = {g for event in one.heard_of(SlabRetireEvent) for g in event.groups}
        assert told
        one.attachment.groups.difference_update(told)
        world.engine.room.unmapped(one.attachment.id, sorted(told))
        assert world.host.usage().allocated_bytes == before
        other.die()
        await until(lambda: world.host.usage().allocated_bytes <= 16 * SLOT_BYTES)
        await until(lambda: world.engine.resizer._tasks[TierName.HOST].done())
        check(world.engine, quiet=True)

    make_world(disk_blocks=0).run(story)


def test_it_grows_again_before_it_was_small(make_world: Make) -> None:
    """A later call replaces an earlier one; groups that were on their way out serve again."""

    async def story(world: World) -> None:
        player = world.player()
        keys = chain("back", 64)
        assert await player.put(keys) == 64
        lease, _ = player.acquire(keys)
        assert not (await resize(world, 16, timeout=0.1)).done
        assert not (await resize(world, 32, timeout=0.1)).done
        done = await resize(world, 64)
        assert done == Resized(64 * SLOT_BYTES, True, 0)
        player.release(lease)
        assert sum(g.slots for g in world.host.groups()) == 64
        await world.engine.removal.evict(world.space, keys[32:], None)
        assert await player.put(keys, at=32) == 64
        check(world.engine, quiet=True)

    make_world(disk_blocks=0).run(story)


def test_growing_wakes_who_waits_for_room(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("waits", 16)
        assert await player.put(keys) == 16
        lease, _ = player.acquire(keys)
        waiting = asyncio.create_task(
            world.engine.reservations.reserve(player.attachment, world.space, 77, 8, [], 5.0, [])
        )
        await asyncio.sleep(0.05)
        assert not waiting.done()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        assert (await resize(world, 32)).done
        slots, _ = await waiting
        assert slots
        assert loop.time() - begun < 2
        player.release(lease)

    make_world(host_blocks=16, disk_blocks=0).run(story)


def test_what_cannot_be_is_refused_and_changes_nothing(make_world: Make) -> None:
    async def story(world: World) -> None:
        big = await world.engine.open_space(spec_of("big", (8 * SLOT_BYTES,)))
        assert await world.player().put(chain("big", 1), space=big) == 1
        for size, why in ((1 << 60, "not possible"), (4 * SLOT_BYTES, "a block of space")):
            with pytest.raises(ConfigError, match=why) as refused:
                await world.engine.resizer.resize(TierName.HOST, size, 1.0)
            assert "\n" not in str(refused.value)
        with pytest.raises(InvalidRequest, match="no disk tier"):
            await world.engine.resizer.resize(TierName.DISK, 1 << 20, 1.0)
        assert world.host.usage().capacity_bytes == 64 * SLOT_BYTES

    make_world(disk_blocks=0).run(story)


def test_dirty_blocks_are_on_disk_before_they_leave(make_world: Make) -> None:
    """Under `evict` nothing is on disk yet; what leaves host goes there."""

    async def story(world: World) -> None:
        player = world.player()
        task = await _serving(world, player)
        keys = [chain(f"dirty{n}", 8) for n in range(6)]
        for one in keys:
            await player.put(one)
        done = await resize(world, 16)
        assert done.done
        everywhere = "".join(world.tiers(one) for one in keys)
        assert "-" not in everywhere
        assert sum(tier in "hb" for tier in everywhere) <= 16
        for one in keys:
            assert await player.load(one) == 8
        await world.settle()
        check(world.engine, quiet=True)
        task.cancel()

    make_world(flush_on_commit=False).run(story)
