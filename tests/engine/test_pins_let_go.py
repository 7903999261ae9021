"""Whoever asked for a pin may go, and the blocks too, while others' pins are being stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from engine_world import World, chain

Make = Callable[..., World]


def test_a_pin_whose_caller_went_before_its_turn_is_none(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("pin", 3)
        await world.player().put(keys)
        pins = world.engine.pins
        await world.engine.pin(world.space, keys[:1], 60.0, "before")
        async with pins._turn:
            call = asyncio.create_task(world.engine.pin(world.space, keys, 0))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        kept = [bool(world.block(key).pinned_until) for key in keys]
        assert kept == [True, False, False]
        assert world.block(keys[0]).pinned_until < float("inf")
        await world.settle()

    make_world().run(story)


@pytest.mark.parametrize("damaged", [False, True])
def test_what_has_gone_before_its_turn_is_not_pinned(make_world: Make, damaged: bool) -> None:
    """Else what is stored under its key later would be, for ever, from the next start on."""

    async def story(world: World) -> None:
        keys = chain("pin", 3)
        player = world.player()
        await player.put(keys)
        await world.settle()
        pins = world.engine.pins
        async with pins._turn:
            call = asyncio.create_task(world.engine.pin(world.space, keys, 0))
            await asyncio.sleep(0)
            if damaged:
                world.engine.removal.corrupt(world.block(keys[1]))
            else:
                bump = asyncio.create_task(world.engine.removal.bump_epoch(world.space))
                while world.space.blocks:
                    await asyncio.sleep(0)
        pinned = await call
        if not damaged:
            await bump
        assert pinned == (1 if damaged else 0)
        assert {pin.key for pin in world.store.pins()} == set(keys[:pinned])
        assert sum(pins.counts().values()) == pinned
        await world.settle()

    make_world().run(story)
