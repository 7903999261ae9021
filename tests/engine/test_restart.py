"""What a boot finds of the one before it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_invariants import check
from engine_world import World, chain, spec_of

from kvstore.errors import ConfigError
from kvstore.index.records import BlockRecord
from kvstore.miss import MissReason
from kvstore.tiers.faulty import Fault, FaultKind, Faulty

Make = Callable[..., World]


def test_exactly_what_was_flushed_comes_back(make_world: Make) -> None:
    kept, lost = chain("kept", 12), chain("lost", 4)

    async def first(world: World) -> None:
        player = world.player()
        await player.put(kept)
        _, skipped = await world.engine.flush(5)
        assert not skipped
        world.disk.plan.append(Fault(FaultKind.IO_ERROR, "write"))
        await player.put(lost)
        await player.put([*kept, *chain("more", 2)], at=12)
        _, skipped = await world.engine.flush(5)
        assert len(skipped) == 6

    async def second(world: World) -> None:
        assert world.engine.recovered_blocks == 12
        assert world.counts("recovery_dropped_blocks") == 0
        check(world.engine, quiet=True)
        player = world.player()
        assert world.tiers(kept) == "d" * 12
        assert await player.load(kept) == 12
        assert world.engine.lookup(world.space, lost)[1].reason is MissReason.NEVER_SEEN

    make_world(wrap=Faulty).run(first, second)


def test_the_order_of_use_survives(make_world: Make) -> None:
    old, hot = chain("old", 6), chain("hot", 6)

    async def first(world: World) -> None:
        player = world.player()
        await player.put(hot)
        await player.put(old)
        await world.settle()
        assert world.tiers([*hot, *old]) == "b" * 12
        assert await player.load(hot) == 6

    async def second(world: World) -> None:
        sequence = [world.block(key).sequence for key in (*hot, *old)]
        assert sequence == sorted(sequence, reverse=True)
        await world.player().put(chain("new", 4))
        await world.settle()
        assert world.tiers(hot) == "d" * 6
        assert world.tiers(old).count("d") == 2
        check(world.engine, quiet=True)

    make_world(disk_blocks=12).run(first, second)


def test_records_whose_chain_is_broken_are_dropped_for_good(make_world: Make) -> None:
    keys = chain("broken", 8)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.settle()
        # As damage to the index would: the record of one block is gone, and not written again.
        world.block(keys[3]).recorded = world.block(keys[3]).sequence
        world.store.commit_blocks(world.disk.store_id, [], [(world.space.id, keys[3])])

    async def second(world: World) -> None:
        assert world.engine.recovered_blocks == 3
        assert world.counts("recovery_dropped_blocks") == 4
        assert world.tiers(keys) == "ddd-----"
        assert world.disk.usage().used_bytes == 3 * 4096
        check(world.engine, quiet=True)
        assert len(world.store.load_blocks(world.disk.store_id).records) == 3

    async def third(world: World) -> None:
        assert world.engine.recovered_blocks == 3
        assert world.counts("recovery_dropped_blocks") == 0
        assert await world.player().put(keys) == 8

    make_world().run(first, second, third)


def test_two_records_of_one_slot_and_a_circle_of_parents_bring_no_wrong_byte(
    make_world: Make,
) -> None:
    keys, circle = chain("slot", 3), chain("circle", 2)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.settle()
        [one, *_] = world.store.load_blocks(world.disk.store_id).records

        def record(key: bytes, parent: bytes | None, slot: int) -> BlockRecord:
            return BlockRecord(
                space_id=one.space_id,
                key=key,
                parent=parent,
                epoch=one.epoch,
                segment=one.segment,
                slot=slot,
                digests=one.digests,
                sequence=999,
            )

        stale = [record(b"\xff" * 16, None, one.slot)]
        rings = [record(circle[0], circle[1], 14), record(circle[1], circle[0], 15)]
        world.store.commit_blocks(world.disk.store_id, stale + rings, [])

    async def second(world: World) -> None:
        check(world.engine, quiet=True)
        assert world.counts("recovery_dropped_blocks") >= 3
        blocks = await world.player().load(keys)
        assert blocks == sum(t == "d" or t == "b" for t in world.tiers(keys))
        assert await world.player().put(keys) == 3

    make_world().run(first, second)


def test_blocks_of_a_bumped_epoch_do_not_come_back(make_world: Make) -> None:
    keys = chain("epoch", 5)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.settle()
        records = world.store.load_blocks(world.disk.store_id).records
        await world.engine.removal.bump_epoch(world.space)
        await world.settle()
        # As if the daemon had been killed before the deletes were durable.
        world.store.commit_blocks(world.disk.store_id, records, [])

    async def second(world: World) -> None:
        assert world.engine.recovered_blocks == 0
        assert world.tiers(keys) == "-----"
        assert world.disk.usage().used_bytes == 0
        assert world.store.load_blocks(world.disk.store_id).records == []
        check(world.engine, quiet=True)

    make_world().run(first, second)


def test_pins_come_back_with_their_blocks_and_end_with_them(make_world: Make) -> None:
    keys, gone = chain("pinned", 4), chain("gone", 2)

    async def first(world: World) -> None:
        player = world.player()
        await player.put(keys)
        await world.evict_host()
        assert await world.engine.pin(world.space, keys, 0) == 4
        world.disk.plan.append(Fault(FaultKind.IO_ERROR, "write"))
        await player.put(gone)
        await world.engine.flush(5)
        await world.engine.pin(world.space, gone, 0)
        assert world.engine.pins.counts() == {world.space.id: 6}

    async def second(world: World) -> None:
        assert world.engine.pins.counts() == {world.space.id: 4}
        assert len(world.store.pins()) == 4
        # The disk is full of pinned blocks: what comes stays in host.
        await world.player().put(chain("new", 2))
        await world.engine.flush(5)
        assert world.tiers(keys) == "dddd"
        assert await world.engine.pins.unpin(world.space, keys[2:]) == 2
        assert await world.engine.pins.unpin(world.space, None) == 2
        check(world.engine, quiet=True)

    make_world(disk_blocks=4, wrap=Faulty).run(first, second)


def test_a_lost_directory_is_an_empty_cache(make_world: Make) -> None:
    keys = chain("directory", 4)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.settle()

    async def second(world: World) -> None:
        assert world.engine.recovered_blocks == 0
        assert await world.player().put(keys) == 4
        await world.settle()
        check(world.engine, quiet=True)

    world = make_world()
    world.run(first)
    shutil.rmtree(world.directory / "disk")
    world.run(second)


def test_a_segment_cut_short_costs_its_blocks_only(make_world: Make) -> None:
    keys = chain("cut", 12)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.settle()

    async def second(world: World) -> None:
        blocks = world.engine.recovered_blocks
        assert 0 < blocks < 12
        assert world.tiers(keys) == "d" * blocks + "-" * (12 - blocks)
        assert await world.player().load(keys) == blocks
        assert await world.player().put(keys) == 12
        await world.settle()
        check(world.engine, quiet=True)

    world = make_world(disk_blocks=16)
    world.run(first)
    [second_segment] = (world.directory / "disk").glob("seg-*1.kvs")
    with second_segment.open("r+b") as file:
        file.truncate(4096 + 4096)
    world.run(second)


def test_a_start_that_fails_leaves_nothing_open(make_world: Make) -> None:
    async def story(world: World) -> None:
        raise AssertionError("it has started")

    world = make_world()
    (world.directory / "disk").write_text("a file, not a directory")
    with pytest.raises(ConfigError):
        world.run(story)
    world.store.close()
    assert list(world.pools.iterdir()) == []
    (world.directory / "disk").unlink()

    async def works(world: World) -> None:
        assert await world.player().put(chain("works", 2)) == 2

    world.run(works)


def test_a_start_whose_pins_cannot_be_read_leaves_nothing_open(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from kvstore.engine.pins import Pins

    async def story(world: World) -> None:
        raise AssertionError("it has started")

    def broken(self: Any) -> None:
        raise ConfigError("pins")

    world = make_world()
    monkeypatch.setattr(Pins, "restore", broken)
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="pins"):
        world.run(story)
    world.store.close()
    assert list(world.pools.iterdir()) == []
    assert threading.active_count() == threads


def test_a_space_of_another_run_is_known(make_world: Make, tmp_path: Path) -> None:
    spec = spec_of("other", (4096, 4096))

    async def first(world: World) -> None:
        await world.engine.open_space(spec)

    async def second(world: World) -> None:
        assert spec.fingerprint in world.engine.index.spaces

    make_world().run(first, second)
