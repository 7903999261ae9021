"""Processes that die, stop, or leave, in every state of what they hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from engine_invariants import check
from engine_world import World, chain, spec_of, until

from kvstore.engine.attachments import State
from kvstore.engine.events import GrantRevokedEvent, LeasesRevokedEvent, SlabRetireEvent
from kvstore.errors import AttachmentLost
from kvstore.outcomes import CommitOutcome as Outcome
from kvstore.outcomes import Shortage

Make = Callable[..., World]
TWO = spec_of("two", (4096, 4096))


def test_slots_of_a_writer_whose_stream_broke_wait_for_its_lock(make_world: Make) -> None:
    async def story(world: World) -> None:
        stopped, other = world.player("stopped"), world.player("other")
        await stopped.reserve(8)
        stopped.hang_up()
        assert stopped.attachment.state is State.PRESUMED_DEAD
        _, slots, shortage = await other.reserve(1, deadline=0.05)
        assert (slots, shortage) == ([], Shortage.BUSY)
        assert world.engine.grants.open_slots_of(stopped.attachment).slots == 8
        waiting = asyncio.create_task(other.reserve(4, deadline=5))
        stopped.drop_lock()
        _, slots, _ = await waiting
        assert len(slots) == 4
        other.detach()
        assert world.host.usage().used_bytes == 0

    make_world(host_blocks=8).run(story)


@pytest.mark.parametrize("slots", [0, 2])
def test_only_slots_that_wait_for_a_lock_are_worth_a_warning(
    make_world: Make, caplog: pytest.LogCaptureFixture, slots: int
) -> None:
    async def story(world: World) -> None:
        player = world.player("brief")
        if slots:
            await player.reserve(slots)
        player.hang_up()
        player.drop_lock()
        await until(lambda: player.attachment.state is State.GONE)

    with caplog.at_level(logging.INFO):
        make_world().run(story)
    (line,) = [record for record in caplog.records if "lock still held" in record.getMessage()]
    assert line.levelno == (logging.WARNING if slots else logging.INFO)


def test_a_writer_killed_before_its_commit_blocks_neither_key_nor_others(make_world: Make) -> None:
    async def story(world: World) -> None:
        space = await world.engine.open_space(TWO)
        owner, dead, alive = (world.player() for _ in range(3))
        keys = chain("half", 3)
        grant, slots, _ = await owner.reserve(3, writers=[owner, dead], space=space)
        owner.commit(grant, slots[:2], keys[:2], shard=0, space=space)
        # Its key is half there, and everybody else can store it at once.
        assert await alive.put(keys, space=space) == 3
        dead.die()
        assert dead.attachment.state is State.GONE
        # What the owner has not settled it may still be writing to.
        assert list(owner.attachment.owned[grant].slots) == slots[2:]
        outcome = owner.commit(grant, slots[2:], keys[2:], parent=keys[1], shard=0, space=space)
        assert outcome == [Outcome.ABORTED]
        await world.settle()
        check(world.engine, quiet=True)
        assert not len(world.engine.grants)

    make_world().run(story)


def test_writers_hear_that_their_owner_died_and_may_still_commit(make_world: Make) -> None:
    async def story(world: World) -> None:
        space = await world.engine.open_space(TWO)
        owner, left, right = (world.player() for _ in range(3))
        keys = chain("orphaned", 4)
        grant, slots, _ = await owner.reserve(4, writers=[left, right], space=space)
        left.commit(grant, slots[:2], keys[:2], shard=0, owner=owner, space=space)
        owner.die()
        for writer in (left, right):
            [event] = writer.heard_of(GrantRevokedEvent)
            assert (event.owner_id, event.grant_id) == (owner.attachment.id, grant)
        committed = right.commit(grant, slots[:2], keys[:2], shard=1, owner=owner, space=space)
        assert committed == [Outcome.COMMITTED] * 2
        for writer in (left, right):
            world.engine.abort(
                writer.attachment, owner.attachment.id, grant, None, all_shards=False
            )
        await world.settle()
        check(world.engine, quiet=True)
        assert len(space.blocks) == 2

    make_world().run(story)


def test_an_owner_that_writes_itself_leaves_nothing_behind(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("own", 2)
        grant, slots, _ = await player.reserve(4)
        player.commit(grant, slots[:2], keys)
        player.die()
        await world.settle()
        check(world.engine, quiet=True)
        assert world.host.usage().used_bytes == 2 * 4096
        assert player.heard_of(GrantRevokedEvent) == []

    make_world().run(story)


def test_a_client_that_dies_while_it_waits_for_slots_is_granted_none(make_world: Make) -> None:
    async def story(world: World) -> None:
        hog, waiting, writer = (world.player() for _ in range(3))
        await hog.reserve(8)
        tasks = [
            asyncio.create_task(waiting.reserve(2)),
            asyncio.create_task(hog.reserve(2, writers=[writer])),
        ]
        await asyncio.sleep(0.01)
        waiting.die()
        writer.die()
        world.engine.abort(hog.attachment, hog.attachment.id, 0, None, all_shards=True)
        for grant in list(hog.attachment.owned):
            world.engine.abort(hog.attachment, hog.attachment.id, grant, None, all_shards=True)
        for task in tasks:
            with pytest.raises(AttachmentLost):
                await task
        assert world.host.usage().used_bytes == 0

    make_world(host_blocks=8).run(story)


def test_a_reserve_that_is_cancelled_takes_nothing(make_world: Make) -> None:
    async def story(world: World) -> None:
        hog, impatient = world.player(), world.player()
        await hog.reserve(8)
        task = asyncio.create_task(impatient.reserve(4))
        await asyncio.sleep(0.01)
        task.cancel()
        hog.detach()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.host.usage().used_bytes == 0
        assert not world.engine.room.signal._waiters

    make_world(host_blocks=8).run(story)


def test_leases_end_with_silence_and_come_back_with_a_heartbeat(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("silent", 4)
        await player.put(keys)
        await world.settle()
        lease, answer = player.acquire(keys)
        assert answer.blocks == 4
        await until(lambda: player.attachment.state is State.SILENT)
        [event] = player.heard_of(LeasesRevokedEvent)
        assert event.lease_ids == (lease,)
        assert world.block(keys[0]).host_refs == 0
        player.release(lease)
        world.engine.attachments.heard(player.attachment)
        assert player.attachment.state is State.ACTIVE
        assert player.acquire(keys)[1].blocks == 4
        player.hang_up()
        await until(lambda: not player.attachment.leases)
        assert str(player.attachment.state) == "presumed dead"

    make_world(lease_ttl=0.2).run(story)


def test_death_while_a_lease_waits_for_the_disk(make_world: Make) -> None:
    from engine_world import Gate

    async def story(world: World) -> None:
        player, reader = world.player(), world.player()
        keys = chain("deadly", 6)
        await player.put(keys)
        await world.evict_host()
        world.disk.closed = True
        _, answer = reader.acquire(keys, deadline=30)
        assert answer.growing
        await until(lambda: world.disk.reads)
        reader.die()
        assert not reader.attachment.leases
        assert world.block(keys[0]).disk_refs == 1
        world.disk.let(0)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


def test_an_attachment_is_writer_only_with_its_lock(make_world: Make) -> None:
    from kvstore.errors import InvalidRequest

    async def story(world: World) -> None:
        attachments = world.engine.attachments
        bare = attachments.open("bare", 1, mapped=True, shards=frozenset())
        with pytest.raises(AttachmentLost, match="lock"):
            attachments.writer(bare.id)
        with pytest.raises(InvalidRequest, match="no lock"):
            attachments.locked(bare)
        attachments.stream_ended(bare)
        assert bare.state is State.GONE
        with pytest.raises(AttachmentLost):
            attachments.find(bare.id)
        unmapped = attachments.open("bytes", 1, mapped=False, shards=frozenset())
        with pytest.raises(InvalidRequest, match="map"):
            attachments.writer(unmapped.id)

    make_world().run(story)


def test_a_group_on_its_way_out_waits_for_everybody_who_maps_it(make_world: Make) -> None:
    async def story(world: World) -> None:
        one, two, dying = (world.player() for _ in range(3))
        keys = chain("retire", 4)
        await one.put(keys)
        await world.settle()
        [group] = {b.host.group for b in world.space.blocks.values() if b.host is not None}
        lease, _ = one.acquire(keys)
        room = world.engine.room
        room.retire(group)
        late = world.player()
        assert [e.groups for e in two.heard_of(SlabRetireEvent)] == [(group,)]
        assert late.heard_of(SlabRetireEvent) == []
        for player in (one, two):
            room.unmapped(player.attachment.id, [group])
        dying.hang_up()
        dying.drop_lock()
        await until(lambda: dying.attachment.state is State.GONE)
        # Unmapped everywhere, but blocks are still there.
        assert group in room.retiring
        one.release(lease)
        await world.evict_host()
        assert not room.retiring
        assert group not in world.host._groups
        check(world.engine, quiet=True)
        assert await one.load(keys) == 4

    make_world().run(story)
