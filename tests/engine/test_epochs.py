"""Weights change in place: nothing of before is ever served after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engine_invariants import check
from engine_world import Gate, World, chain, until

from kvstore.engine.events import LeasesRevokedEvent
from kvstore.errors import StaleEpoch
from kvstore.index.lmdb_store import MetaStore, StoreDamaged
from kvstore.miss import MissReason
from kvstore.outcomes import CommitOutcome as Outcome
from kvstore.tiers.faulty import Fault, FaultKind, Faulty

Make = Callable[..., World]


async def _bump(world: World) -> int:
    return await world.engine.removal.bump_epoch(world.space)


def test_everything_is_gone_at_once_and_slots_come_back(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("old", 10)
        await player.put(keys)
        await world.settle()
        await world.engine.pin(world.space, keys[:3], 0)
        lease, _ = player.acquire(keys[:5])
        grant, slots, _ = await player.reserve(4)
        player.commit(grant, slots[:1], chain("new", 1))
        old = world.space.epoch
        assert await _bump(world) == old + 1
        with pytest.raises(StaleEpoch):
            world.engine.space(world.space.id, old)
        assert [e.lease_ids for e in player.heard_of(LeasesRevokedEvent)] == [(lease,)]
        assert player.commit(grant, slots[1:3], keys[:2]) == [Outcome.ABORTED] * 2
        tiers, miss = world.engine.lookup(world.space, keys)
        assert (tiers, miss.reason) == (b"", MissReason.OTHER_EPOCH)
        world.engine.abort(player.attachment, player.attachment.id, grant, None, all_shards=False)
        await world.settle()
        check(world.engine, quiet=True)
        assert world.host.usage().used_bytes == world.disk.usage().used_bytes == 0
        assert world.engine.pins.counts() == {}
        assert world.store.pins() == []
        # The same keys can be stored again, and are other blocks.
        assert await player.put(keys) == 10
        assert await player.load(keys) == 10

    make_world().run(story)


def test_a_reserve_that_waited_over_a_bump_grants_nothing_to_the_old_epoch(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        hog, player = world.player(), world.player()
        await hog.reserve(8)
        waiting = asyncio.create_task(player.reserve(2))
        put = asyncio.create_task(
            world.engine.reservations.take_for_put(world.space, world.space.epoch, 5.0, None)
        )
        await asyncio.sleep(0.01)
        await _bump(world)
        hog.detach()
        with pytest.raises(StaleEpoch):
            await waiting
        # The stream's own slot was sought under the old epoch: what fills it never appears.
        grant = await put
        assert grant is not None
        [slot] = grant.slots
        key = chain("stale", 1)[0]
        outcome = world.engine.grants.commit(grant, 1, [(slot, key, None)])
        assert outcome == [Outcome.ABORTED]
        assert not world.space.blocks
        assert world.host.usage().used_bytes == 0

    make_world(host_blocks=8).run(story)


def test_a_bump_during_a_flush(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("flushing", 6)
        await player.put(keys, step=6)
        await asyncio.wait_for(world.disk.stalled.wait(), 60)
        flush = asyncio.create_task(world.engine.flush(5.0))
        await asyncio.sleep(0)
        await _bump(world)
        assert await player.put(keys[:2]) == 2
        world.disk.plan.clear()
        world.disk.resume()
        assert await flush == (0, [])
        await world.settle()
        check(world.engine, quiet=True)
        assert world.tiers(keys[:2]) == "bb"
        records = world.store.load_blocks(world.disk.store_id).records
        assert {(r.key, r.epoch) for r in records} == {(key, world.space.epoch) for key in keys[:2]}

    stall = [Fault(FaultKind.STALL, "write")]
    make_world(wrap=lambda disk: Faulty(disk, stall)).run(story)


def test_a_bump_between_commit_and_index_leaves_no_record_of_a_slot_in_use(
    make_world: Make,
) -> None:
    """The group's records are durable when its blocks are dead: their slots must wait."""

    async def story(world: World) -> None:
        player = world.player()
        keys = chain("committing", 4)
        store: Any = world.store
        commit, entered = store.commit_blocks, asyncio.Event()
        loop = asyncio.get_running_loop()
        import threading

        go = threading.Event()

        def slow(*args: Any) -> None:
            commit(*args)
            loop.call_soon_threadsafe(entered.set)
            assert go.wait(10)

        store.commit_blocks = slow
        await player.put(keys, step=4)
        await asyncio.wait_for(entered.wait(), 60)
        bump = asyncio.create_task(_bump(world))
        await asyncio.sleep(0.01)
        # The bump's own record waits behind the group's; both go through now.
        store.commit_blocks = commit
        go.set()
        await bump
        await world.settle()
        check(world.engine, quiet=True)
        assert world.store.load_blocks(world.disk.store_id).records == []
        assert world.disk.usage().used_bytes == 0

    make_world().run(story)


def test_a_bump_during_a_promotion(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("rising", 6)
        await player.put(keys)
        await world.evict_host()
        world.disk.closed = True
        ticket = asyncio.create_task(
            world.engine.tickets.prefetch(world.space, keys, 5, 0.0, 0, 5.0)
        )
        read = world.engine.start_read(world.space, keys)
        _, answer = player.acquire(keys, deadline=30)
        assert answer.growing
        await until(lambda: world.disk.reads)
        await _bump(world)
        assert await player.put(keys[:1]) == 1
        while world.disk.reads:
            world.disk.let(0)
        world.disk.closed = False
        blocks, done, miss = await ticket
        assert (blocks, done, miss.reason) == (0, True, MissReason.OTHER_EPOCH)
        assert (await read.wait(0, 5)).reason is MissReason.OTHER_EPOCH
        read.close()
        await world.settle()
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


def test_a_bump_whose_caller_went_away_happens_all_the_same(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        await player.put(chain("gone", 3))
        old = world.space.epoch
        task = asyncio.create_task(_bump(world))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: world.space.epoch == old + 1)
        assert not world.space.blocks

    make_world().run(story)


def test_a_bump_that_cannot_be_durable_changes_nothing(make_world: Make) -> None:
    class Broken(MetaStore):
        broken = False

        def bump_epoch(self, space_id: bytes) -> int:
            if self.broken:
                raise StoreDamaged("here", "no space left", 28)
            return super().bump_epoch(space_id)

    async def story(world: World) -> None:
        player = world.player()
        keys = chain("kept", 3)
        await player.put(keys)
        store: Any = world.store
        store.broken = True
        with pytest.raises(StoreDamaged):
            await _bump(world)
        assert await player.load(keys) == 3

    make_world(store_class=Broken).run(story)


def test_two_bumps_at_once_are_two_epochs(make_world: Make) -> None:
    async def story(world: World) -> None:
        old = world.space.epoch
        epochs = await asyncio.gather(_bump(world), _bump(world))
        assert sorted(epochs) == [old + 1, old + 2]
        assert world.space.epoch == old + 2

    async def after(world: World) -> None:
        assert world.store.spaces()[0].epoch == world.space.epoch
        assert world.space.epoch >= 2

    make_world().run(story, after)
