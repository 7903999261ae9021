"""A space keeps to its quota in each tier, at the cost of its own coldest blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engine_invariants import check
from engine_world import SLOT_BYTES, World, chain, spec_of, until

from kvstore.engine import limits as limits_module
from kvstore.index import NO_LIMIT, SpaceIndex, SpaceLimits
from kvstore.index.lmdb_store import MetaStore, StoreDamaged
from kvstore.outcomes import Shortage
from kvstore.tiers.base import TierName

Make = Callable[..., World]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "_INTERVAL_SECONDS", 0.02)


async def _limit(world: World, space: SpaceIndex | None = None, **blocks: int) -> None:
    sizes = {f"{tier}_bytes": n * SLOT_BYTES for tier, n in blocks.items()}
    await world.engine.limits.change(space or world.space, sizes)


def _there(space: SpaceIndex, keys: list[bytes]) -> int:
    return len(space.run(keys))


@pytest.mark.parametrize("disk_blocks", [0, 64])
def test_a_store_makes_room_in_its_own_space(make_world: Make, disk_blocks: int) -> None:
    async def story(world: World) -> None:
        player = world.player()
        other = await world.engine.open_space(spec_of("other"))
        theirs = chain("theirs", 6)
        await player.put(theirs, space=other)
        await _limit(world, host=4)
        chains = [chain(f"c{n}", 2) for n in range(5)]
        for keys in chains:
            assert await player.put(keys) == 2
            assert world.space.host_blocks <= 4
        await world.settle()
        # What was used last is there; what was used first of all belongs to others, and stays.
        assert world.tiers([*chains[-2], *chains[-1]]) == ("bbbb" if disk_blocks else "hhhh")
        assert _there(other, theirs) == other.host_blocks == 6
        assert world.engine.counters.counts["quota_evicted_blocks_host"] == 6
        if not disk_blocks:
            ghost = world.engine.index.ghosts.get(world.space.id, chains[0][1])
            assert ghost is not None
            assert ghost.pressure == "over the quota of its space"
        check(world.engine, quiet=True)

    make_world(disk_blocks=disk_blocks).run(story)


def test_a_chain_longer_than_the_quota_keeps_its_head(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        await _limit(world, host=5)
        keys = chain("long", 12)
        assert await player.put(keys, step=2) == 5
        _, _, shortage = await player.reserve(1, protect=[keys[4]])
        assert shortage is Shortage.QUOTA
        assert world.engine.counters.counts["quota_refused_blocks"] > 0
        # Without protection, others of the space may come in its place.
        assert await player.put(chain("next", 3)) == 3
        assert world.space.host_blocks == 5
        assert _there(world.space, keys) == 2

    make_world(disk_blocks=0).run(story)


def test_slots_taken_ahead_of_need_leave_half_of_the_quota(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        await _limit(world, host=8)
        old = chain("old", 8)
        assert await player.put(old) == 8
        await world.settle()
        grant, slots, shortage = await player.reserve(100)
        assert (len(slots), shortage) == (4, Shortage.BUSY)
        assert world.space.host_blocks == 4
        _, more, shortage = await player.reserve(1)
        assert (more, shortage) == ([], Shortage.BUSY)
        # Who waits goes on as soon as blocks are committed.
        waiting = asyncio.create_task(player.reserve(2, deadline=60.0))
        new = chain("new", 4)
        player.write(slots, new)
        player.commit(grant, slots, new)
        _, slots, _ = await waiting
        assert len(slots) == 2

    make_world(disk_blocks=0).run(story)


@pytest.mark.parametrize("blocks", [0, 1])
def test_what_can_never_fit_is_refused_at_once_and_said(make_world: Make, blocks: int) -> None:
    async def story(world: World) -> None:
        player = world.player()
        size = blocks * SLOT_BYTES - 1 if blocks else 0
        await world.engine.limits.change(world.space, {"host_bytes": size})
        _, slots, shortage = await player.reserve(3, deadline=30.0)
        assert (slots, shortage) == ([], Shortage.QUOTA)
        assert world.engine.counters.counts["quota_refused_blocks"] == 3
        await world.engine.limits.change(world.space, {}, ["host_bytes"])
        assert await player.put(chain("fits", 3)) == 3

    make_world().run(story)


def test_a_store_waits_for_what_a_lease_of_its_space_holds(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        await _limit(world, host=2)
        keys = chain("held", 2)
        await player.put(keys)
        lease, answer = player.acquire(keys)
        assert answer.blocks == 2
        _, slots, shortage = await player.reserve(1, deadline=0.0)
        assert (slots, shortage) == ([], Shortage.BUSY)
        waiting = asyncio.create_task(player.reserve(1, deadline=60.0))
        await asyncio.sleep(0)
        assert player.reads_right(keys, player.leased_slots(lease))
        player.release(lease)
        grant, slots, _ = await waiting
        assert len(slots) == 1
        player.engine.abort(player.attachment, player.attachment.id, grant, slots, all_shards=True)
        check(world.engine, quiet=True)

    make_world(disk_blocks=0).run(story)


def test_a_smaller_quota_is_reached_in_the_background_but_for_what_is_leased_or_pinned(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        leased, pinned, rest = chain("leased", 3), chain("pinned", 3), chain("rest", 20)
        for keys in (leased, pinned, rest):
            await player.put(keys)
        lease, _ = player.acquire(leased)
        await world.engine.pin(world.space, pinned, 0)
        await _limit(world, host=4)
        await until(lambda: world.space.host_blocks == 6)
        assert _there(world.space, leased) == _there(world.space, pinned) == 3
        await world.engine.pins.unpin(world.space, None)
        await until(lambda: world.space.host_blocks == 4)
        assert _there(world.space, leased) == 3
        player.release(lease)
        check(world.engine, quiet=True)

    make_world(disk_blocks=0).run(story)


def test_the_disk_quota_takes_the_place_of_the_spaces_own_blocks_only(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        other = await world.engine.open_space(spec_of("other"))
        theirs = chain("theirs", 10)
        await player.put(theirs, space=other)
        await world.settle()
        await _limit(world, disk=4)
        # The disk is full of others' colder blocks: none of them leaves for this space.
        for n in range(4):
            await player.put(chain(f"c{n}", 2))
            await world.settle()
            assert world.space.disk_blocks <= 4
        assert other.disk_blocks == 10
        assert world.tiers(chain("c3", 2)) == "bb"
        # A chain longer than the quota: its head is on disk, the rest in host only, and it is said.
        long = chain("long", 7)
        await player.put(long)
        await world.settle()
        assert world.tiers(long) == "bbbbhhh"
        _, skipped = await world.engine.flush(60)
        reasons = {world.engine.skip_reason(block) for block in skipped if block.key in long}
        assert reasons == {"over the quota of its space"}
        assert world.engine.counters.counts["flush_skipped_quota_blocks"] >= 3
        # With more, what was refused is written by itself.
        await _limit(world, disk=7)
        await until(lambda: world.tiers(long) == "bbbbbbb")
        await world.settle()
        check(world.engine, quiet=True)

    make_world(disk_blocks=20).run(story)


def test_a_lower_disk_quota_drops_the_coldest_and_survives_a_crash(make_world: Make) -> None:
    world = make_world(disk_blocks=64)
    old, new = chain("old", 6), chain("new", 6)

    async def fill(world: World) -> None:
        player = world.player()
        await player.put(old)
        await player.put(new)
        await world.settle()
        await _limit(world, disk=5, host=3)
        await until(lambda: world.space.disk_blocks == 5 and world.space.host_blocks == 3)
        await world.settle()
        assert world.tiers(new)[:5].count("-") == 0

    async def again(world: World) -> None:
        space = world.space
        assert space.limits == SpaceLimits(None, 3 * SLOT_BYTES, 5 * SLOT_BYTES)
        assert space.disk_blocks == 5
        assert await world.player().put(chain("more", 4)) == 4
        await world.settle()
        assert (space.disk_blocks, space.host_blocks) == (5, 3)

    world.run(fill, again)


def test_promotions_keep_to_the_quota(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("down", 10)
        await player.put(keys)
        await world.evict_host()
        await _limit(world, host=4)
        lease, answer = player.acquire(keys, deadline=30.0)
        done = await player.lease_done(lease)
        assert done.blocks == world.space.host_blocks == 4
        assert answer.growing
        slots = player.leased_slots(lease)
        assert player.reads_right(keys, slots)
        player.release(lease)
        await world.settle()
        check(world.engine, quiet=True)

    make_world().run(story)


def test_gpu_copies_keep_to_the_quota(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        player.sees_gpus()
        await _limit(world, gpu=3)
        chains = [chain(f"g{n}", 2) for n in range(4)]
        for keys in chains:
            await player.put(keys)
            for _ in range(2):
                lease, _ = player.acquire(keys)
                player.release(lease)
            await world.settle()
            assert world.space.gpu_blocks <= 3
        await until(lambda: world.space.gpu_blocks > 0)
        await _limit(world, gpu=1)
        await until(lambda: world.space.gpu_blocks <= 1)
        await _limit(world, gpu=0)
        await until(lambda: not world.space.gpu_blocks)
        assert all(_there(world.space, keys) == 2 for keys in chains)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(gpu_blocks=8).run(story)


@pytest.mark.parametrize("policy", ["reused", "evict"])
def test_quotas_under_the_other_write_policies(make_world: Make, policy: str) -> None:
    async def story(world: World) -> None:
        player = world.player()
        await _limit(world, host=4, disk=6)
        for n in range(8):
            assert await player.put(chain(f"c{n}", 2), deadline=60.0) == 2
            lease, _ = player.acquire(chain(f"c{n}", 2))
            player.release(lease)
        await world.settle()
        assert world.space.host_blocks <= 4
        assert world.space.disk_blocks <= 6
        last = world.tiers([*chain("c6", 2), *chain("c7", 2)])
        assert "-" not in last
        check(world.engine, quiet=True)

    make_world(flush_on_commit=False, flush_on_reuse=policy == "reused").run(story)


def test_defaults_stand_in_for_what_is_not_set(make_world: Make) -> None:
    defaults = SpaceLimits(host_bytes=2 * SLOT_BYTES)

    async def story(world: World) -> None:
        player = world.player()
        await player.put(chain("a", 2))
        await player.put(chain("b", 2))
        assert world.space.host_blocks == 2
        in_force = await world.engine.limits.change(world.space, {"host_bytes": NO_LIMIT})
        assert in_force.quota_bytes(TierName.HOST) is None
        await player.put(chain("c", 6))
        assert world.space.host_blocks == 8
        await world.engine.limits.change(world.space, {}, ["host_bytes"])
        await until(lambda: world.space.host_blocks == 2)

    make_world(disk_blocks=0, default_limits=defaults).run(story)


class Fragile(MetaStore):
    """Fails to store limits."""

    def put_limits(self, space_id: bytes, limits: SpaceLimits) -> None:
        raise StoreDamaged("here", "input/output error", 5)


def test_limits_that_cannot_be_stored_are_not_in_force(make_world: Make) -> None:
    async def story(world: World) -> None:
        player: Any = world.player()
        with pytest.raises(StoreDamaged):
            await _limit(world, host=1)
        assert not world.space.in_force
        assert await player.put(chain("all", 4)) == 4

    make_world(store_class=Fragile).run(story)


def test_setting_goes_on_without_its_caller(make_world: Make) -> None:
    async def story(world: World) -> None:
        caller = asyncio.create_task(_limit(world, host=2))
        await asyncio.sleep(0)
        caller.cancel()
        await until(lambda: world.space.limits.host_bytes == 2 * SLOT_BYTES)
        assert world.store.limits()[world.space.id] == world.space.limits

    make_world().run(story)
