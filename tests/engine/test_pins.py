"""Pins are what the store says, and housekeeping goes on whatever it meets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engine_invariants import check
from engine_world import World, chain, until

from kvstore.engine import housekeeper
from kvstore.index.lmdb_store import MetaStore, StoreDamaged
from kvstore.index.records import PinRecord

Make = Callable[..., World]


class Fragile(MetaStore):
    """Fails to store pins, when told to."""

    failing = False

    def put_pins(self, pins: Sequence[PinRecord]) -> None:
        self._maybe()
        super().put_pins(pins)

    def delete_pins(self, pins: Sequence[tuple[bytes, bytes]]) -> None:
        self._maybe()
        super().delete_pins(pins)

    def _maybe(self) -> None:
        if self.failing:
            raise StoreDamaged("here", "input/output error", 5)


def _stored(world: World) -> set[bytes]:
    return {pin.key for pin in world.store.pins()}


def _in_force(world: World) -> set[bytes]:
    return {b.key for b in world.space.blocks.values() if b.pinned_until}


def test_a_pin_that_cannot_be_stored_is_not_in_force_and_the_one_before_it_still_is(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        store: Any = world.store
        keys = chain("pin", 4)
        await world.player().put(keys)
        await world.engine.pin(world.space, keys[:2], 0)
        store.failing = True
        with pytest.raises(StoreDamaged):
            await world.engine.pin(world.space, keys, 60.0)
        with pytest.raises(StoreDamaged):
            await world.engine.pins.unpin(world.space, None)
        assert _stored(world) == _in_force(world) == set(keys[:2])
        store.failing = False
        assert await world.engine.pins.unpin(world.space, keys) == 2
        assert _stored(world) == _in_force(world) == set()
        await world.settle()
        check(world.engine, quiet=True)

    make_world(store_class=Fragile).run(story)


def test_pinning_and_unpinning_at_once_end_the_same_in_memory_and_in_the_store(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        keys = chain("race", 3)
        await world.player().put(keys)
        for n in range(6):
            calls = [
                world.engine.pin(world.space, keys, 0),
                world.engine.pins.unpin(world.space, keys[n % 3 :]),
                world.engine.pin(world.space, keys[: n % 3], 0),
                world.engine.pins.unpin(world.space, None),
            ]
            await asyncio.gather(*(calls[(i + n) % 4] for i in range(4)))
            assert _stored(world) == _in_force(world)

    make_world().run(story)


def test_a_pinned_last_copy_stays_and_expires(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeper, "_INTERVAL_SECONDS", 0.02)

    async def story(world: World) -> None:
        store: Any = world.store
        player = world.player()
        keys = chain("stay", 4)
        await player.put(keys)
        await world.engine.pin(world.space, keys, 0.2)
        assert await player.put(chain("other", 8), step=1, deadline=0.0) == 4
        assert world.tiers(keys) == "hhhh"
        # The first attempts to end it fail; they are not the last ones.
        store.failing = True
        await asyncio.sleep(0.3)
        assert _in_force(world) == set(keys)
        store.failing = False
        await until(lambda: not _in_force(world), 5)
        assert _stored(world) == set()
        assert await player.put(chain("other", 8), at=4, step=1) == 8
        check(world.engine, quiet=True)

    make_world(host_blocks=8, disk_blocks=0, store_class=Fragile).run(story)
