"""Saving the LRU order rewrites records of what is there, and of nothing that has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine_world import Gate, World, chain, until

from kvstore.index.records import BlockRecord

Make = Callable[..., World]


async def _held_on_disk(world: World) -> list[bytes]:
    """Have a chain on disk only, used since its records were written, and a read of it stand still."""
    player = world.player()
    keys = chain("old", 3)
    await player.put(keys)
    await world.evict_host(keys)
    world.disk.closed = True
    player.acquire(keys, deadline=60.0)
    await until(lambda: world.disk.reads)
    return keys


@asynccontextmanager
async def _bumped_while_saving(world: World) -> AsyncIterator[None]:
    """Bump the epoch when the saving has its list of blocks; it waits until the end of the context."""
    assert world.engine.flusher is not None
    # As when somebody else rewrites records.
    async with world.engine.flusher.records.rewriting:
        saving = asyncio.create_task(world.engine._housekeeper.save_touches())
        await asyncio.sleep(0.01)
        await world.engine.removal.bump_epoch(world.space)
        yield
    await saving


def _records(world: World) -> list[BlockRecord]:
    return world.store.load_blocks(world.disk.store_id).records


def test_a_bump_while_the_order_is_being_saved_leaves_no_record_of_the_new_epoch(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        await _held_on_disk(world)
        async with _bumped_while_saving(world):
            pass
        # Killed now, the next start must find nothing that it could take for the new epoch's.
        assert [r for r in _records(world) if r.epoch == world.space.epoch] == []
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        await world.settle()
        assert _records(world) == []

    make_world(wrap=Gate).run(story)


def test_a_block_that_came_back_under_its_key_keeps_its_own_record(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await _held_on_disk(world)
        async with _bumped_while_saving(world):
            assert await world.player().put(keys) == 3
            await until(lambda: world.tiers(keys) == "bbb")
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        await world.settle()
        slots = {key: world.block(key).disk for key in keys}
        assert {r.key: (r.segment, r.slot) for r in _records(world)} == slots

    make_world(wrap=Gate).run(story)
