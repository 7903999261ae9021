"""Every owner has pins of its own; a block stays as long as anybody's does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engine_invariants import check
from engine_world import World, chain, spec_of, until

from kvstore.engine import housekeeper
from kvstore.index import NEVER
from kvstore.index.lmdb_store import MetaStore, StoreDamaged
from kvstore.index.records import PinRecord

Make = Callable[..., World]


def _pinned(world: World) -> set[bytes]:
    return {b.key for b in world.space.blocks.values() if b.pinned_until}


def _stored(world: World) -> set[tuple[bytes, str]]:
    return {(pin.key, pin.owner) for pin in world.store.pins()}


def test_a_block_stays_until_the_last_owner_lets_go(make_world: Make) -> None:
    async def story(world: World) -> None:
        engine, pins = world.engine, world.engine.pins
        keys = chain("shared", 6)
        await world.player().put(keys)
        await engine.pin(world.space, keys[:4], 600.0, "a")
        await engine.pin(world.space, keys, 700.0, "b")
        await engine.pin(world.space, keys[:2], 0.0)
        assert pins.counts() == {world.space.id: 6}
        assert world.block(keys[0]).pinned_until == NEVER
        assert await pins.unpin(world.space, None, "b") == 6
        assert _pinned(world) == set(keys[:4])
        assert await pins.unpin(world.space, keys, "") == 2
        assert _pinned(world) == set(keys[:4])
        assert world.block(keys[0]).pinned_until < NEVER
        # Nobody in particular means everybody.
        await engine.pin(world.space, keys[:1], 50.0, "c")
        assert await pins.unpin(world.space, keys[:1]) == 1
        assert _pinned(world) == set(keys[1:4])
        assert _stored(world) == {(key, "a") for key in keys[1:4]}
        check(engine)

    make_world().run(story)


def test_an_owner_lets_go_of_everything_at_once(make_world: Make) -> None:
    async def story(world: World) -> None:
        engine = world.engine
        other = await engine.open_space(spec_of("other"))
        here, there = chain("here", 3), chain("there", 2)
        player = world.player()
        await player.put(here)
        await player.put(there, space=other)
        await engine.pin(world.space, here, 60.0, "agent")
        await engine.pin(other, there, 90.0, "agent")
        await engine.pin(other, there[:1], 30.0, "another")
        groups = await engine.pins.groups(None, "agent")
        assert {(g.space.id, g.owner, g.blocks) for g in groups} == {
            (world.space.id, "agent", 3),
            (other.id, "agent", 2),
        }
        assert len(await engine.pins.groups(other, None)) == 2
        assert await engine.pins.unpin_owner("agent") == 5
        assert engine.pins.counts() == {other.id: 1}
        assert await engine.pins.unpin_owner("agent") == 0

    make_world().run(story)


def test_pins_of_an_owner_that_is_gone_end_by_themselves_and_pinning_again_moves_the_end(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeper, "_INTERVAL_SECONDS", 0.02)

    async def story(world: World) -> None:
        engine, pins = world.engine, world.engine.pins
        gone, alive = chain("gone", 3), chain("alive", 3)
        player = world.player()
        await player.put(gone)
        await player.put(alive)
        await engine.pin(world.space, [*gone], 0.1, "session")
        await engine.pin(world.space, alive, 0.1, "session")
        await engine.pin(world.space, alive, 600.0, "session")
        await until(lambda: not any(world.block(key).pinned_until for key in gone))
        assert _pinned(world) == set(alive)
        await until(lambda: _stored(world) == {(key, "session") for key in alive})
        (group,) = await pins.groups(None, None)
        assert group.first_end == group.last_end
        # Known exactly after the next look at all pins.
        await until(lambda: pins.first_end(world.space.id) == group.first_end)

    make_world().run(story)


def test_owners_and_their_ends_are_there_after_a_crash(make_world: Make) -> None:
    world = make_world()
    keys = chain("kept", 4)

    async def pin(world: World) -> None:
        await world.player().put(keys)
        await world.settle()
        await world.engine.pin(world.space, keys, 600.0, "Zoë's session")
        await world.engine.pin(world.space, keys[:1], 0.0)

    async def again(world: World) -> None:
        pins = world.engine.pins
        assert {owner for key in keys for owner in pins.owners(world.space.id, key)} == {
            "",
            "Zoë's session",
        }
        assert await pins.unpin(world.space, None, "") == 1
        assert _pinned(world) == set(keys)
        assert await pins.unpin_owner("Zoë's session") == 4
        assert not _pinned(world)
        assert not _stored(world)

    world.run(pin, again)


class Fragile(MetaStore):
    """Fails to store pins, when told to."""

    failing = False

    def put_pins(self, pins: Sequence[PinRecord]) -> None:
        if self.failing:
            raise StoreDamaged("here", "input/output error", 5)
        super().put_pins(pins)


def test_a_pin_that_cannot_be_stored_leaves_those_of_others_and_the_one_before(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        store: Any = world.store
        engine = world.engine
        keys = chain("fails", 3)
        await world.player().put(keys)
        await engine.pin(world.space, keys[:1], 600.0, "a")
        await engine.pin(world.space, keys[:2], 900.0, "b")
        before = [world.block(key).pinned_until for key in keys]
        store.failing = True
        with pytest.raises(StoreDamaged):
            await engine.pin(world.space, keys, 5_000.0, "a")
        assert [world.block(key).pinned_until for key in keys] == before
        assert engine.pins.owners(world.space.id, keys[2]) == []
        assert _stored(world) == {(keys[0], "a"), (keys[0], "b"), (keys[1], "b")}
        check(engine)

    make_world(store_class=Fragile).run(story)


@pytest.mark.parametrize("by", ["expiry", "unpin"])
def test_pins_of_a_block_that_was_lost_do_not_come_back_with_it(make_world: Make, by: str) -> None:
    world = make_world()
    keys = chain("lost", 4)

    async def lose(world: World) -> None:
        engine = world.engine
        await world.player().put(keys)
        await world.settle()
        await engine.pin(world.space, keys, 0.0)
        await engine.pin(world.space, keys, 600.0, "session")
        engine.removal.corrupt(world.block(keys[1]))
        await world.player().put(keys)
        await world.settle()
        assert _pinned(world) == {keys[0]}
        # The other one's new pin is none of those that are lost.
        await engine.pin(world.space, keys[:2], 600.0, "another")
        if by == "unpin":
            assert await engine.pins.unpin(world.space, None, "session") == 1
        else:
            await engine.pins.expire()
        left = {(keys[0], ""), (keys[0], "another"), (keys[1], "another")}
        assert _stored(world) == (left if by == "unpin" else left | {(keys[0], "session")})
        check(engine)

    async def again(world: World) -> None:
        assert len(world.space.blocks) == 4
        assert _pinned(world) == set(keys[:2])

    world.run(lose, again)


def test_pins_that_a_start_without_the_disk_drops_are_said(
    make_world: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    keys = chain("away", 3)

    async def pin(world: World) -> None:
        await world.player().put(keys)
        await world.settle()
        await world.engine.pin(world.space, keys, 600.0, "session")
        await world.engine.pin(world.space, keys[:1], 0.0)

    async def without_disk(world: World) -> None:
        assert not _stored(world)
        check(world.engine)

    world.run(pin)
    world.disk_blocks = 0
    world.run(without_disk)
    assert "4 pins are gone: their blocks are not there any more" in caplog.text
    assert "another disk" not in caplog.text
    # As when its file system is not mounted: an empty directory in its place.
    world.disk_blocks = 64
    (world.directory / "disk").rename(world.directory / "unmounted")
    world.run(without_disk)
    assert "are on another disk than this: is it mounted?" in caplog.text
