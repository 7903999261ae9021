"""What a boot takes over from the memory of the one before it, and when that may be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from engine_invariants import check
from engine_world import SLOT_BYTES, World, chain, until

from kvstore.engine import verifier
from kvstore.engine.host_index import encode, read_host_index, write_host_index
from kvstore.index import Flush
from kvstore.miss import MissReason
from kvstore.outcomes import CommitOutcome, Shortage
from kvstore.tiers.base import TierName

Make = Callable[..., World]


def spoil(world: World, key: bytes) -> None:
    """Change one byte of a block in memory."""
    slot = world.block(key).host
    assert slot is not None
    world.host.views(slot)[0][99] ^= 1


def test_what_is_unchecked_is_there_but_is_not_read(make_world: Make) -> None:
    keys = chain("a", 6)
    world = make_world(disk_blocks=0)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.save()
        world.hold_checks = True

    async def second(world: World) -> None:
        player = world.player()
        assert world.tiers(keys) == "h" * 6
        assert len(world.engine.lookup(world.space, keys)[0]) == 6
        _, none = player.acquire(keys)
        assert (none.blocks, none.growing) == (0, False)
        assert (none.miss.reason, none.miss.tier) == (MissReason.DEADLINE, "host")
        late, _ = player.acquire(keys, deadline=0.01)
        done = await player.lease_done(late)
        assert (done.blocks, done.miss.reason) == (0, MissReason.DEADLINE)
        lease, answer = player.acquire(keys, deadline=5)
        assert (answer.blocks, answer.growing) == (0, True)
        world.may_check.set()
        assert (await player.lease_done(lease)).blocks == 6
        assert await player.load(keys, deadline=0) == 6
        for lease_id in (late, lease):
            player.release(lease_id)
        await until(lambda: world.counts("adopted_checked_blocks") == 6)
        check(world.engine, quiet=True)

    world.run(first, second)


def test_who_leaves_while_it_waits_holds_nothing(make_world: Make) -> None:
    keys = chain("a", 6)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.save()
        world.hold_checks = True

    async def second(world: World) -> None:
        player, other = world.player(), world.player()
        lease, _ = player.acquire(keys, deadline=5)
        other.acquire(keys[:3], deadline=5)
        assert not world.engine.index.evict(world.block(keys[-1]), TierName.HOST)
        player.release(lease)
        other.detach()
        # Nobody waits: it may go unchecked, unless a thread reads it just now.
        world.may_check.set()
        await until(lambda: world.counts("adopted_checked_blocks") == 6)
        check(world.engine, quiet=True)

    make_world(disk_blocks=0).run(first, second)


def test_damage_ends_the_run_there_and_takes_what_hangs_on_it(make_world: Make) -> None:
    keys = chain("a", 8)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.save()
        spoil(world, keys[5])
        world.hold_checks = True

    async def second(world: World) -> None:
        player = world.player()
        lease, _ = player.acquire(keys, deadline=5)
        world.may_check.set()
        done = await player.lease_done(lease)
        assert (done.blocks, done.miss.reason, done.miss.tier) == (5, MissReason.CORRUPT, "host")
        player.release(lease)
        await until(lambda: world.tiers(keys) == "hhhhh---")
        assert world.counts("corrupt_blocks") == 1
        assert await player.put(keys, at=5) == 8
        check(world.engine, quiet=True)

    make_world(disk_blocks=0).run(first, second)


def test_damage_in_memory_is_replaced_from_disk_for_who_waits(make_world: Make) -> None:
    keys = chain("a", 8)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.settle()
        await world.save()
        spoil(world, keys[5])
        world.hold_checks = True

    async def second(world: World) -> None:
        player = world.player()
        assert world.tiers(keys) == "b" * 8
        lease, _ = player.acquire(keys, deadline=5)
        world.may_check.set()
        assert (await player.lease_done(lease)).blocks == 8
        player.release(lease)
        assert await player.load(keys, deadline=0) == 8
        assert world.counts("promoted_blocks") == 1
        await until(lambda: world.counts("adopted_checked_blocks") == 7)
        check(world.engine, quiet=True)

    make_world().run(first, second)


def test_damaged_bytes_are_not_flushed(make_world: Make) -> None:
    keys = chain("a", 8)
    world = make_world(disk_blocks=0)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.save()
        spoil(world, keys[5])
        world.hold_checks = True

    async def second(world: World) -> None:
        await until(lambda: world.block(keys[0]).flush is Flush.WRITING)
        world.may_check.set()
        _, skipped = await world.engine.flush(5)
        assert skipped == []
        await world.settle()
        assert world.tiers(keys) == "bbbbb---"
        check(world.engine, quiet=True)

    world.run(first)
    world.disk_blocks = 64
    world.run(second)


def test_a_check_that_fails_is_made_again_for_who_waits(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain("a", 4)
    world = make_world(disk_blocks=0)
    compare, calls = verifier._compare, [0]

    def fails_once(work: Sequence[verifier.Work]) -> list[bool]:
        calls[0] += 1
        if calls[0] == 1:
            raise MemoryError
        return compare(work)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.save()
        world.hold_checks = True
        monkeypatch.setattr(verifier, "_compare", fails_once)
        monkeypatch.setattr(verifier, "_FAILURE_PAUSE_SECONDS", 0.1)

    async def second(world: World) -> None:
        player = world.player()
        checks = world.engine.verifier
        await until(lambda: len(checks._reading) == 4)
        lease, _ = player.acquire(keys, deadline=30)
        # What is being read already is passed over.
        await until(lambda: not checks._asked)
        world.may_check.set()
        # Somebody else asks for something while the one that failed pauses.
        await until(lambda: calls[0])
        await asyncio.sleep(0.02)
        checks._work.set()
        assert (await player.lease_done(lease)).blocks == 4
        player.release(lease)
        check(world.engine, quiet=True)

    world.run(first, second)


def test_an_epoch_that_ends_during_the_check_ends_the_wait(make_world: Make) -> None:
    keys = chain("a", 4)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.save()
        world.hold_checks = True

    async def second(world: World) -> None:
        player = world.player()
        read = world.engine.start_read(world.space, keys)
        player.acquire(keys, deadline=5)
        await world.engine.removal.bump_epoch(world.space)
        world.may_check.set()
        assert (await read.wait(0, 5)).reason is MissReason.OTHER_EPOCH
        read.close()
        await until(lambda: world.host.usage().used_bytes == 0)
        check(world.engine, quiet=True)

    make_world(disk_blocks=0).run(first, second)


def test_after_saving_nobody_gets_a_slot(make_world: Make) -> None:
    """Not even one that is free, nor for a promotion; commits and epochs go on."""
    keys, late = chain("a", 8), chain("late", 2)

    async def first(world: World) -> None:
        player = world.player()
        await player.put(keys)
        await world.settle()
        await world.evict_host(keys[4:])
        grant, slots, _ = await player.reserve(2)
        await world.save()
        assert (await player.reserve(2))[1:] == ([], Shortage.DRAINING)
        assert await player.load(keys, deadline=0.5) == 4
        put = world.engine.reservations.take_for_put
        assert await put(world.space, world.space.epoch, 0.1, None) is None
        player.write(slots, late)
        outcomes = player.commit(grant, slots, late)
        assert outcomes == [CommitOutcome.COMMITTED] * 2

    async def second(world: World) -> None:
        # What was committed too late to be saved was not too late for the disk.
        assert world.tiers(late) == "dd"
        assert world.tiers(keys) == "bbbbdddd"
        assert await world.player().load(keys) == 8
        check(world.engine)

    make_world().run(first, second)


def test_each_writer_of_a_slot_keeps_it(make_world: Make) -> None:
    """Two shards, two writers: who has committed writes no more, who is gone neither."""

    async def first(world: World) -> None:
        space = await world.engine.open_space(two)
        owner, one, other = world.player(), world.player(), world.player()
        keys = chain("a", 3)
        grant, slots, _ = await owner.reserve(3, writers=(one, other), space=space)
        one.commit(grant, slots[:2], keys[:2], shard=0, owner=owner, space=space)
        other.commit(grant, slots[:1], keys[:1], shard=1, owner=owner, space=space)
        await world.save()
        saved = read_host_index(world.host_index)
        assert saved is not None
        ids = (one.attachment.id, other.attachment.id)
        assert dict(saved.busy) == {slots[1]: ids[1:], slots[2]: ids}
        # Both live on, across the restart.
        kept[:] = [one, other]
        for player in kept:
            world.players.remove(player)

    async def second(world: World) -> None:
        one, other = kept
        quarantine = world.engine.quarantine
        assert quarantine.stuck == (2, 4 * SLOT_BYTES)
        assert world.player().attachment.id > other.attachment.id
        other.drop_lock()
        await until(lambda: len(quarantine) == 1)
        one.drop_lock()
        await until(lambda: not len(quarantine))
        check(world.engine)
        await world.settle()

    from engine_world import Player, spec_of

    two = spec_of("two", (SLOT_BYTES, SLOT_BYTES))
    kept: list[Player] = []
    make_world(disk_blocks=0).run(first, second)


def test_a_block_whose_parent_or_slab_is_gone_is_not_adopted(make_world: Make) -> None:
    keys, other = chain("a", 6), chain("b", 2)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.player().put(other)
        await world.save()
        saved = read_host_index(world.host_index)
        assert saved is not None
        [space] = saved.spaces
        blocks = [b for b in space.blocks if b.key != keys[3]]
        # And one claims the slot of another.
        assert blocks[-1].key == other[1]
        blocks[-1] = blocks[-1]._replace(slot=blocks[0].slot)
        spaces = [replace(space, blocks=blocks)]
        write_host_index(world.host_index, encode(replace(saved, spaces=spaces)))

    async def second(world: World) -> None:
        assert world.tiers(keys) == "hhh---"
        assert world.tiers(other) == "h-"
        assert world.counts("adoption_dropped_blocks") == 3
        await until(lambda: world.counts("adopted_checked_blocks") == 4)
        check(world.engine, quiet=True)
        assert await world.player().put(keys, at=3) == 6

    make_world(disk_blocks=0).run(first, second)


def test_slab_files_that_are_not_as_they_were_are_left_out(make_world: Make) -> None:
    keys = chain("a", 32)

    async def first(world: World) -> None:
        await world.warm(32)
        await world.player().put(keys)
        await world.save()
        saved = read_host_index(world.host_index)
        assert saved is not None
        groups = dict.fromkeys(b.slot.group for s in saved.spaces for b in s.blocks)
        assert len(groups) >= 4
        gone, cut, hole = [saved.pool / f"slab-{g}-0" for g in list(groups)[1:4]]
        gone.unlink()
        with cut.open("r+b") as file:
            file.truncate(cut.stat().st_size - 4096)
        # Cut and grown again: reading what is not there could be SIGBUS.
        length = hole.stat().st_size
        with hole.open("r+b") as file:
            file.truncate(4096)
            file.truncate(length)

    async def second(world: World) -> None:
        found = world.tiers(keys).count("h")
        assert 0 < found < 32
        assert len(world.host.groups()) == len(world.host._groups)
        assert world.host.usage().used_bytes == found * SLOT_BYTES
        assert world.tiers(keys) == "h" * found + "-" * (32 - found)
        assert await world.player().load(keys) == found
        assert await world.player().put(keys, at=found) == 32
        await world.settle()
        check(world.engine, quiet=True)

    make_world(disk_blocks=0).run(first, second)


def test_pins_of_what_is_in_memory_only_stay(make_world: Make) -> None:
    keys = chain("pinned", 4)

    async def first(world: World) -> None:
        await world.player().put(keys)
        await world.engine.pin(world.space, keys, 0)
        await world.save()

    async def second(world: World) -> None:
        assert world.engine.pins.counts() == {world.space.id: 4}
        player = world.player()
        for i in range(30):
            await player.put(chain(f"fill {i}", 4))
        assert world.tiers(keys) == "hhhh"
        assert await player.load(keys) == 4

    make_world(disk_blocks=0, host_blocks=16).run(first, second)
