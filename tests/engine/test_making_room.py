"""Memory that is made ahead of need: how much of it, at whose cost, and for whom else it is there."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from engine_invariants import check
from engine_world import SLOT_BYTES, World, chain, spec_of, until
from unmapping_clients import unmapping

from kvstore.engine.room import Made
from kvstore.errors import InvalidRequest
from kvstore.space import BlockShape
from kvstore.tiers import host, slab_making

Make = Callable[..., World]

NARROW = BlockShape(SLOT_BYTES, 1)
WIDE = BlockShape(2 * SLOT_BYTES, 1)


async def made(world: World, shape: BlockShape) -> Made:
    """Ask until nothing more comes, as a client does."""
    while True:
        answer = world.engine.make_room(shape)
        assert answer.made_bytes <= answer.expected_bytes <= world.host.capacity_bytes
        if answer.made_bytes == answer.expected_bytes:
            return answer
        await asyncio.sleep(0.001)


def taken(world: World, shape: BlockShape) -> int:
    return sum(g.slots for g in world.host.groups() if g.shape == shape) * shape.block_bytes


def in_host(world: World, keys: list[bytes]) -> int:
    return sum(tier in "hb" for tier in world.tiers(keys))


def test_all_of_the_pool_is_made_once_and_named(make_world: Make) -> None:
    async def story(world: World) -> None:
        first = world.engine.make_room(NARROW)
        assert first.expected_bytes == world.host.capacity_bytes
        answer = await made(world, NARROW)
        assert answer.made_bytes == world.host.capacity_bytes
        assert set(answer.groups) == {g.group for g in world.host.groups()}
        assert await made(world, NARROW) == answer
        # It is for use.
        player = world.player()
        assert await player.put(chain("a", 64), step=64) == 64
        assert world.engine.make_room(NARROW) == answer
        assert not world.counts("slab_groups_retired")

    make_world(host_blocks=64, disk_blocks=0).run(story)


def test_what_another_shape_has_stays_its_own(make_world: Make) -> None:
    async def story(world: World) -> None:
        player, keys = world.player(), chain("a", 20)
        await player.put(keys)
        await until(lambda: not world.host.allocating)
        others = taken(world, NARROW)
        assert 20 * SLOT_BYTES <= others <= world.host.capacity_bytes // 2
        answer = await made(world, WIDE)
        assert answer.made_bytes == world.host.capacity_bytes - others
        assert in_host(world, keys) == 20
        assert not world.counts("slab_groups_retired")
        check(world.engine, quiet=True)

    make_world(host_blocks=128, disk_blocks=0).run(story)


def test_of_what_was_made_for_another_shape_and_is_empty_a_new_one_gets_its_part(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        player, keys = world.player(), chain("a", 12)
        half = world.host.capacity_bytes // 2
        await made(world, NARROW)
        await player.put(keys)
        async with unmapping(world, player):
            assert (await made(world, WIDE)).made_bytes == half
            assert taken(world, NARROW) == half
            # Neither takes it back by asking again, which all workers of both do.
            for shape in (NARROW, WIDE, NARROW):
                assert (await made(world, shape)).made_bytes == half
        assert in_host(world, keys) == 12
        assert not world.counts("evicted_blocks_host")
        check(world.engine, quiet=True)

    make_world(host_blocks=128, disk_blocks=0).run(story)


def test_two_shapes_that_ask_at_once_get_about_as_much(make_world: Make) -> None:
    async def story(world: World) -> None:
        world.engine.make_room(NARROW)
        world.engine.make_room(WIDE)
        await until(lambda: not world.host.allocating)
        assert world.host.room_blocks(NARROW) == 0
        for shape in (NARROW, WIDE):
            assert taken(world, shape) >= world.host.capacity_bytes // 4

    make_world(host_blocks=128, disk_blocks=0).run(story)


def test_a_shape_that_did_not_ask_gets_empty_groups_as_it_needs_them(make_world: Make) -> None:
    """Nobody's blocks leave for it as long as there are such groups."""

    async def story(world: World) -> None:
        player, keys = world.player(), chain("a", 8)
        await made(world, NARROW)
        await player.put(keys)
        wide = await world.engine.open_space(spec_of("wide", (WIDE.slot_bytes,)))
        async with unmapping(world, player):
            wanted = chain("w", 44)
            assert await player.put(wanted, step=8, deadline=60.0, space=wide) == 44
        assert taken(world, WIDE) >= 44 * WIDE.block_bytes
        assert in_host(world, keys) == 8
        assert not world.counts("evicted_blocks_host")
        check(world.engine, quiet=True)

    make_world(host_blocks=128, disk_blocks=0).run(story)


def test_a_client_that_unmaps_nothing_is_not_waited_for(make_world: Make) -> None:
    async def story(world: World) -> None:
        await made(world, NARROW)
        deaf = world.player("deaf")
        # What it keeps counts as coming only for as long as it may still answer.
        assert (await made(world, WIDE)).made_bytes < world.host.capacity_bytes // 2
        assert len(world.engine.room.retiring) <= 4
        deaf.die()
        await until(lambda: not world.engine.room.retiring)
        assert (await made(world, WIDE)).made_bytes == world.host.capacity_bytes // 2

    make_world(host_blocks=128, disk_blocks=0).run(story)


def test_a_pool_that_gets_no_memory_says_so(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        await until(lambda: world.host.state != "ok")
        answer = await made(world, NARROW)
        assert (answer.made_bytes, answer.groups) == (0, ())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    make_world(disk_blocks=0).run(story)


def test_what_does_not_fit_is_refused_and_a_daemon_that_stops_makes_nothing(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        with pytest.raises(InvalidRequest, match="a block takes 270336 bytes, the host pool has"):
            world.engine.make_room(BlockShape(66 * SLOT_BYTES, 1))
        await until(lambda: not world.host.allocating)
        world.engine.room.closed = True
        before = taken(world, NARROW)
        answer = world.engine.make_room(NARROW)
        assert answer.made_bytes == answer.expected_bytes == before
        assert not world.host.allocating
        world.engine.room.closed = False

    make_world(host_blocks=64, disk_blocks=0).run(story)


def test_a_stop_does_not_wait_for_a_pool_that_is_being_made(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for one that gives way to others, nor for memory of a space that opens meanwhile."""
    begun, go = threading.Event(), threading.Event()
    hurries: list[Any] = []
    make_slabs = slab_making.make_slabs

    def held(*arguments: Any) -> Any:
        hurries.append(arguments[-1])
        begun.set()
        assert go.wait(60.0)
        return make_slabs(*arguments)

    async def story(world: World) -> None:
        await until(lambda: not world.host.allocating)
        before = taken(world, NARROW)
        monkeypatch.setattr(host, "make_slabs", held)
        world.engine.make_room(NARROW)
        await until(begun.is_set)
        assert not hurries[0].set_already
        await world.engine.quiesce(5.0)
        assert hurries[0].set_already
        await world.engine.open_space(spec_of("wide", (WIDE.slot_bytes,)))
        go.set()
        await until(lambda: not world.host.allocating)
        assert not taken(world, WIDE)
        assert before < taken(world, NARROW) <= before + world.host.capacity_bytes // 4

    make_world(host_blocks=256, disk_blocks=0).run(story)


def test_memory_that_nobody_waits_for_is_made_by_threads_that_give_way(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    gentle: list[bool] = []
    make_slabs = slab_making.make_slabs

    def watched(*arguments: Any) -> Any:
        gentle.append(not arguments[-1].set_already)
        return make_slabs(*arguments)

    async def story(world: World) -> None:
        await until(lambda: not world.host.allocating)
        await made(world, NARROW)
        assert gentle
        assert all(gentle)
        gentle.clear()
        wide = await world.engine.open_space(spec_of("wide", (WIDE.slot_bytes,)))
        player = world.player()
        async with unmapping(world, player):
            _, slots, _ = await player.reserve(2, deadline=60.0, space=wide)
        assert len(slots) == 2
        assert not gentle[0]

    monkeypatch.setattr(host, "make_slabs", watched)
    make_world(host_blocks=128, disk_blocks=0).run(story)
