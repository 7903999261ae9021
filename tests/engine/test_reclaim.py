"""Memory that moves between block sizes: whose groups go, at what price, and what a deaf client can stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from engine_invariants import check
from engine_world import World, chain, spec_of, until
from unmapping_clients import unmapping

from kvstore.engine import reclaimer, retirement
from kvstore.index import SpaceIndex
from kvstore.outcomes import Shortage

Make = Callable[..., World]

WIDE = (8192,)  # two blocks of the other size


def groups_of(world: World, space: SpaceIndex) -> int:
    return sum(g.shape == space.shape for g in world.host.groups())


def there(world: World, space: SpaceIndex, keys: Sequence[bytes]) -> int:
    blocks = [space.blocks.get(key) for key in keys]
    return sum(block is not None and block.host is not None for block in blocks)


@pytest.mark.parametrize("disk_blocks", [0, 64])
@pytest.mark.parametrize("stepwise", [False, True])
def test_traffic_of_another_size_gets_the_pool_for_what_the_old_groups_hold(
    make_world: Make, disk_blocks: int, stepwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of the new size hardly leave before all of the old one have.

    The odd one may, while the groups in question are being looked for.
    """
    if stepwise:
        # The look at all blocks takes many turns of the loop.
        monkeypatch.setattr(reclaimer, "_STEP", 1)
        monkeypatch.setattr(reclaimer, "_STEPS_AT_ONCE", 1)

    async def story(world: World) -> None:
        player = world.player()
        old = [chain(f"old{i}", 8) for i in range(4)]
        for keys in old:
            await player.put(keys)
        await world.settle()
        held = sum(there(world, world.space, keys) for keys in old)
        assert held >= 28
        wide = await world.engine.open_space(spec_of("wide", WIDE))
        before = world.counts("evicted_blocks_host")
        new = [chain(f"new{i}", 2) for i in range(8)]
        async with unmapping(world, player):
            for keys in new[:7]:
                assert await player.put(keys, step=1, deadline=20.0, space=wide) == 2
                await world.settle()
        if not stepwise:
            assert sum(there(world, wide, keys) for keys in new) >= 12
        assert groups_of(world, world.space) <= 2
        assert world.counts("evicted_blocks_host") - before <= held + (4 if stepwise else 2)
        check(world.engine, quiet=True)

    make_world(host_blocks=32, disk_blocks=disk_blocks).run(story)


def test_a_group_with_a_block_in_use_stays_and_its_own_coldest_go_instead(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        old = [chain(f"old{i}", 4) for i in range(4)]
        for keys in old:
            await player.put(keys)
        await world.settle()
        wide = await world.engine.open_space(spec_of("wide", WIDE))
        async with unmapping(world, player):
            for turn in range(12):
                # The old ones are used all the time: hotter than whatever the new size has.
                for keys in old[1:]:
                    await player.load(keys, deadline=0)
                await player.put(chain(f"new{turn}", 2), step=1, deadline=20.0, space=wide)
                await world.settle()
        assert groups_of(world, wide)
        for keys in old[2:]:
            assert there(world, world.space, keys) == 4
        check(world.engine, quiet=True)

    make_world(host_blocks=16, disk_blocks=0).run(story)


def test_a_group_with_a_last_copy_that_a_gpu_s_reader_needs_is_not_emptied_in_part(
    make_world: Make,
) -> None:
    """While somebody reads a GPU copy, the block's other last copy stays: so do all of its group."""

    async def story(world: World) -> None:
        player = world.player()
        old = [chain(f"old{i}", 4) for i in range(4)]
        for keys in old:
            await player.put(keys)
        await world.settle()
        read = [world.block(keys[3]) for keys in old]
        for block in read:
            block.gpu_refs += 1
        before = [world.tiers(keys) for keys in old]
        wide = await world.engine.open_space(spec_of("wide", WIDE))
        _, slots, _ = await player.reserve(1, deadline=0.2, space=wide)
        assert not slots
        assert [world.tiers(keys) for keys in old] == before
        for block in read:
            block.gpu_refs -= 1

    make_world(host_blocks=16, disk_blocks=0).run(story)


def test_a_deaf_client_keeps_its_groups_and_no_others(make_world: Make) -> None:
    """It was stopped when half of the pool was there: the other half moves."""

    async def story(world: World) -> None:
        deaf, player = world.player("deaf"), world.player()
        early = [chain(f"early{i}", 4) for i in range(4)]
        for keys in early:
            await player.put(keys)
        deaf.hang_up()
        kept = {g.group for g in world.host.groups()}
        late = [chain(f"late{i}", 4) for i in range(4)]
        for keys in late:
            await player.put(keys)
        await world.settle()
        lost = sum(there(world, world.space, keys) for keys in late)
        wide = await world.engine.open_space(spec_of("wide", WIDE))
        async with unmapping(world, player):
            for i in range(3):
                keys = chain(f"new{i}", 2)
                assert await player.put(keys, step=1, deadline=20.0, space=wide) == 2
            await world.settle()
        assert lost >= 12
        assert groups_of(world, wide)
        assert kept <= {g.group for g in world.host.groups()}
        deaf.drop_lock()
        check(world.engine)

    make_world(host_blocks=32, disk_blocks=0).run(story)


def test_a_client_that_stops_listening_costs_a_bounded_number_of_groups(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for memory hears that there is none; when the client is gone, there is."""
    monkeypatch.setattr(retirement, "_PATIENCE_SECONDS", 0.02)

    async def story(world: World) -> None:
        deaf, player = world.player("deaf"), world.player()
        old = [chain(f"old{i}", 4) for i in range(8)]
        for keys in old:
            await player.put(keys)
        await world.settle()
        groups = len(world.host.groups())
        wide = await world.engine.open_space(spec_of("wide", WIDE))
        async with unmapping(world, player):
            for _ in range(5):
                _, slots, shortage = await player.reserve(8, deadline=0.2, space=wide)
                assert not slots
                assert shortage in (Shortage.NO_ROOM, Shortage.BUSY)
            assert 1 <= len(world.engine.room.retiring) <= 4
            assert len(world.host.groups()) >= groups - 4
            deaf.die()
            await until(lambda: not world.engine.room.retiring)
            assert len((await player.reserve(1, deadline=20.0, space=wide))[1]) == 1
        player.detach()
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=32, disk_blocks=0).run(story)


def test_a_silent_client_is_told_of_new_groups_when_it_is_back(make_world: Make) -> None:
    async def story(world: World) -> None:
        quiet, player = world.player("quiet"), world.player()
        await player.put(chain("a", 2))
        attachments = world.engine.attachments
        quiet.attachment.last_heard = -1e9
        await until(lambda: quiet.attachment.state.value == "silent")
        known = set(quiet.attachment.groups)
        while {g.group for g in world.host.groups()} <= known:
            await player.put(chain(f"b{len(world.host.groups())}", 32), step=4)
            assert quiet.attachment.groups == known
            if len(world.host.groups()) * 4 >= 64:
                break
        new = {g.group for g in world.host.groups()} - known
        assert new
        attachments.heard(quiet.attachment)
        assert new <= quiet.attachment.groups

    make_world(host_blocks=64, disk_blocks=0).run(story)


def test_last_copies_of_another_size_leave_only_for_a_block_that_needs_their_room(
    make_world: Make,
) -> None:
    """Not so that there is room for whoever comes next."""

    async def story(world: World) -> None:
        player = world.player()
        old, wide = chain("old", 8), await world.engine.open_space(spec_of("wide", WIDE))
        assert await player.put(old) == 8
        await world.settle()
        async with unmapping(world, player):
            for name in range(12):
                full = not (world.host.free_blocks(wide.shape) or world.host.untaken_bytes)
                if full and groups_of(world, world.space) < 3:
                    break
                assert there(world, world.space, old) == 8
                assert await player.put(chain(f"new{name}", 1), space=wide) == 1
                await world.settle()
                # What is made ahead of need is made in turns of the loop after that.
                for _ in range(100):
                    await asyncio.sleep(0)
            assert full
            assert there(world, world.space, old) == 8
            assert await player.put(chain("needs", 1), deadline=20.0, space=wide) == 1
            assert there(world, world.space, old) < 8

    make_world(host_blocks=24, flush_on_commit=False, flush_on_reuse=True).run(story)
