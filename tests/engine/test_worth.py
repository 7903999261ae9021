"""Waiting ends where computing is faster: before it begins, or in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from engine_invariants import check
from engine_world import Gate, World, chain, spec_of, until

from kvstore.engine import worth
from kvstore.miss import MissReason
from kvstore.tiers.throttled import Throttled

Make = Callable[..., World]

BLOCK = 4096
BIG = 16 << 20  # one block a batch, so that every block's read can be let through on its own
TOKENS = 16  # of a block
# Rates with nothing in between: whatever else the machine does, one is far from the other.
FAST, SLOW = 1e9, 4096.0  # bytes a second: microseconds a block, one second a block


def throttled(world: World, rate: float) -> None:
    world.disk.bytes_per_second = rate


def as_if_measured(world: World, rate: float) -> None:
    """Let the path be known to be as slow or fast as its device."""
    path = world.engine.promoter.path  # type: ignore[union-attr]
    now = asyncio.get_running_loop().time()
    for _ in range(50):
        number = path.begin(BLOCK, now)
        now += BLOCK / rate
        path.end(number, BLOCK, now)


async def stored(world: World, name: str, blocks: int, in_host: int = 0) -> list[bytes]:
    """Store a chain, and leave its tail on disk only."""
    keys = chain(name, blocks)
    assert await world.player("storer").put(keys) == blocks
    await world.evict_host(keys[in_host:])
    return keys


def make(make_world: Make, rate: float = FAST) -> World:
    return make_world(wrap=lambda disk: Throttled(disk, rate))


def test_a_disk_slower_than_computing_is_not_waited_for(make_world: Make) -> None:
    """What is in memory is used; the rest is computed, and asked for by nobody."""

    async def story(world: World) -> None:
        keys = await stored(world, "slow", 8, in_host=3)
        as_if_measured(world, SLOW)
        throttled(world, SLOW)
        player = world.player()
        _, answer = player.acquire(keys, deadline=30, rate=TOKENS / 0.001)
        assert (answer.blocks, answer.growing) == (3, False)
        assert answer.miss.reason is MissReason.NOT_WORTH_WAITING
        assert world.counts("waits_declined") == 1
        # Without a rate nobody knows better than the deadline.
        _, answer = player.acquire(keys, deadline=0.02)
        assert answer.growing

    make(make_world).run(story)


def test_who_has_not_measured_yet_is_served_by_what_others_measured(make_world: Make) -> None:
    """Also after a restart: neither a new engine nor a new daemon waits for a slow disk."""

    async def before(world: World) -> None:
        keys = await stored(world, "slow", 8, in_host=3)
        player = world.player()
        throttled(world, SLOW)
        _, answer = player.acquire(keys, deadline=0.02, rate=None)
        assert answer.growing  # nobody knows anything
        as_if_measured(world, SLOW)
        player.acquire(keys, deadline=30, rate=TOKENS / 0.001)
        _, answer = player.acquire(keys, deadline=30, rate=None)
        assert (answer.blocks, answer.growing) == (3, False)

    async def after(world: World) -> None:
        throttled(world, SLOW)
        assert world.engine.promoter is not None
        assert world.engine.promoter.path.bytes_per_second < 10 * SLOW
        _, answer = world.player().acquire(chain("slow", 8), deadline=30, rate=None)
        assert (answer.blocks, answer.growing) == (0, False)
        assert answer.miss.reason is MissReason.NOT_WORTH_WAITING

    make(make_world).run(before, after)


def test_a_disk_faster_than_computing_is_waited_for(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await stored(world, "fast", 8, in_host=3)
        player = world.player()
        lease, answer = player.acquire(keys, deadline=60, rate=TOKENS / 5.0)
        assert (answer.blocks, answer.growing) == (3, True)
        assert (await player.lease_done(lease)).blocks == 8
        player.release(lease)
        assert world.counts("waits_ended") == 1
        check(world.engine, quiet=True)

    make(make_world).run(story)


def test_who_is_served_later_anyway_waits_for_a_slow_disk(make_world: Make) -> None:
    """And not once its turn has come: then the run ends with what has arrived."""

    async def story(world: World) -> None:
        keys = await stored(world, "queued", 8, in_host=3)
        as_if_measured(world, SLOW)
        world.disk.closed = True
        player = world.player()
        rate = TOKENS / 0.001
        _, answer = player.acquire(keys, deadline=600, rate=rate)
        assert not answer.growing
        patient, answer = player.acquire(keys, deadline=600, rate=rate, queued=3600)
        assert answer.growing
        short, answer = player.acquire(keys, deadline=600, rate=rate, queued=5.5)
        assert answer.growing
        lease = player.attachment.leases[short]
        assert lease.pending is not None
        # As if its turn had come, and nothing had arrived by then.
        lease.pending.turn_at = lease.pending.predicted_seconds = 0.0
        done = await player.lease_done(short)
        assert (done.blocks, done.miss.reason) == (3, MissReason.NOT_WORTH_WAITING)
        assert player.attachment.leases[patient].growing
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        assert (await player.lease_done(patient)).blocks == 8

    make_world(wrap=Gate).run(story)


def test_a_disk_that_becomes_slow_is_given_up_in_the_middle(make_world: Make) -> None:
    """What has arrived by then is used."""

    async def story(world: World) -> None:
        world.space = await world.engine.open_space(spec_of("big", (BIG,)))
        keys = await stored(world, "fading", 8, in_host=2)
        world.disk.closed = True
        player = world.player()
        lease, answer = player.acquire(keys, deadline=600, rate=TOKENS / 0.05)
        assert answer.growing
        await until(lambda: world.disk.reads)
        # The first read comes back, the others take for ever.
        world.disk.let(0)
        done = await player.lease_done(lease)
        assert 2 <= done.blocks < 8
        assert done.miss.reason is MissReason.NOT_WORTH_WAITING
        assert world.counts("waits_cut") == 1
        player.release(lease)
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=8, disk_blocks=8, block_bytes=BIG, wrap=Gate).run(story)


def test_what_is_left_of_a_shortened_wait_is_not_waited_for_without_end(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is shortened, what it still waits for does not come either: it ends all the same."""

    async def story(world: World) -> None:
        world.space = await world.engine.open_space(spec_of("big", (BIG,)))
        keys = await stored(world, "fading", 8)
        world.disk.closed = True
        player = world.player()
        # First all but one block is given up; half a second would compute that one too.
        judge, shortened = world.engine.worth.still, iter([1])
        monkeypatch.setattr(world.engine.worth, "as_predicted", lambda _: False)
        monkeypatch.setattr(
            world.engine.worth, "still", lambda *asked: next(shortened, None) or judge(*asked)
        )
        lease, answer = player.acquire(keys, deadline=3600, rate=TOKENS / 0.06)
        assert answer.growing
        done = await player.lease_done(lease)
        assert (done.blocks, done.miss.reason) == (0, MissReason.NOT_WORTH_WAITING)
        assert world.counts("waits_cut") == 1
        assert world.counts("waits_ended") == 0
        player.release(lease)
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=8, disk_blocks=8, block_bytes=BIG, wrap=Gate).run(story)


def test_a_path_that_everybody_declines_is_measured_again(make_world: Make) -> None:
    """Else a device that has become fast again would never be used."""

    async def story(world: World) -> None:
        keys = await stored(world, "probe", 8)
        as_if_measured(world, SLOW)
        path = world.engine.promoter.path  # type: ignore[union-attr]
        path.observed_at = -1e9  # long ago
        world.engine.worth.afterwards = None  # which would read all of it
        player = world.player()
        rate = TOKENS / 0.01
        for _ in range(200):
            lease, answer = player.acquire(keys, deadline=60, rate=rate)
            if answer.growing:
                break
            player.release(lease)
            await world.settle()
            world.engine.worth._probed = path.observed_at = -1e9
            await world.evict_host(keys)
        assert (await player.lease_done(lease)).blocks == 8

    make(make_world).run(story)


def test_a_stalled_disk_holds_up_those_who_wait_and_nobody_who_comes(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth, "_STALL_SECONDS", 0.05)

    async def story(world: World) -> None:
        keys = await stored(world, "stalled", 8)
        as_if_measured(world, FAST)
        world.disk.closed = True
        first, other = world.player(), world.player()
        waiting, answer = first.acquire(keys, deadline=0.2)
        assert answer.growing
        await until(lambda: world.engine.worth.stalled_seconds())
        _, answer = other.acquire(keys, deadline=600)
        assert (answer.blocks, answer.growing) == (0, False)
        assert answer.miss.reason is MissReason.NOT_WORTH_WAITING
        done = await first.lease_done(waiting)
        assert (done.blocks, done.miss.reason) == (0, MissReason.DEADLINE)
        assert world.counts("path_stalls") == 1
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        await until(lambda: not world.engine.worth.stalled_seconds())
        assert await other.load(keys, deadline=60) == 8
        await world.settle()
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


def test_ten_thousand_prefetches_cancelled_anywhere_leave_nothing(make_world: Make) -> None:
    async def story(world: World) -> None:
        chains = [await stored(world, f"storm{i}", 6) for i in range(8)]
        tickets, promoter = world.engine.tickets, world.engine.promoter
        assert promoter is not None
        asked = []
        for number in range(1, 10_001):
            keys = chains[number % 8][: 1 + number % 6]
            asked.append(
                asyncio.create_task(
                    tickets.prefetch(world.space, keys, number, 60.0, number % 3, 0.0)
                )
            )
            if number % 7 == 0:
                await asyncio.sleep(0)
            if number % 2:
                tickets.cancel(number - number % 5)
            if number % 500 == 0:
                await asyncio.gather(*asked)
                asked.clear()
                await world.engine.removal.evict(world.space, None, None)
                for again in range(8):
                    chains[again] = await stored(world, f"storm{again}/{number}", 6)
        await asyncio.gather(*asked)
        for number in range(1, 10_001):
            tickets.cancel(number)
        await world.settle()
        assert (len(tickets), len(promoter), promoter.jobs, promoter.queued_bytes) == (0, 0, 0, 0)
        check(world.engine, quiet=True)

    make_world(host_blocks=32).run(story)
