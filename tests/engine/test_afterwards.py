"""What a request declined and computed comes to memory afterwards, and gets in nobody's way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engine_invariants import check
from engine_world import SLOT_BYTES, Gate, Player, World, chain, spec_of, until

from kvstore.engine import afterwards as afterwards_module
from kvstore.engine import worth
from kvstore.engine.afterwards import Afterwards
from kvstore.engine.events import LeaseDoneEvent
from kvstore.engine.explainer import explain_request
from kvstore.index import SpaceLimits
from kvstore.miss import MissReason
from kvstore.tiers.faulty import Fault, FaultKind, Faulty

Make = Callable[..., World]

BLOCK = 4096
TOKENS = 16
# The path is believed to take an hour a block, and to compute one takes as long as a test likes: the
# disk is always declined.
SLOWEST = BLOCK / 36000.0
AT_ONCE, NEVER = TOKENS / 1e-4, TOKENS / 3600.0


def afterwards(world: World) -> Afterwards:
    found = world.engine.afterwards
    assert found is not None
    return found


async def stored(world: World, name: str, blocks: int, in_host: int = 0) -> list[bytes]:
    """Store a chain, leave its tail on disk only, and let the disk be known to be slow."""
    keys = chain(name, blocks)
    world.engine.worth._probed = 1e18  # no reads of another kind
    assert await world.player("storer").put(keys) == blocks
    await world.evict_host(keys[in_host:])
    forget_speed(world)
    return keys


def forget_speed(world: World) -> None:
    """Let the path be believed to be slower than anybody computes."""
    assert world.engine.promoter is not None
    world.engine.promoter.path.recall(SLOWEST, 0.0)


def declined(player: Player, keys: list[bytes], rate: float = AT_ONCE, there: int = 0) -> None:
    """Ask for a chain whose tail is not worth waiting for."""
    lease, answer = player.acquire(keys, deadline=60, rate=rate)
    assert (answer.blocks, answer.growing) == (there, False)
    assert answer.miss.reason is MissReason.NOT_WORTH_WAITING
    assert answer.present == len(player.engine.lookup(player.world.space, keys)[0])
    player.release(lease)


def now_due(world: World, at: float = 0.0) -> None:
    """Let the time that computing takes be over, or at some time."""
    found = afterwards(world)
    for run in found._runs:
        run.due = at
    found._signal.notify()


async def has_looked(world: World) -> None:
    """Wait until it has looked a few times whether somebody waits."""
    found, looks = afterwards(world), [0]
    ask = found._waiting

    def counting() -> object:
        looks[0] += 1
        return ask()

    found._waiting = counting
    await until(lambda: looks[0] > 2)
    found._waiting = ask


async def let_until(world: World, done: Callable[[], object], keys: list[bytes]) -> None:
    """Let reads of a chain through the gate until something is so."""
    slots = {world.block(key).disk for key in keys}

    def let() -> object:
        for at in reversed(range(len(world.disk.reads))):
            if slots.issuperset(transfer.slot for transfer in world.disk.reads[at][0]):
                world.disk.let(at)
        return done()

    await until(let)


def all_reads(world: World) -> None:
    world.disk.closed = False
    while world.disk.reads:
        world.disk.let(0)


def test_the_second_request_is_served_from_memory(make_world: Make) -> None:
    """Also after a start, when nothing is in memory and the disk was not measured in this life."""

    async def ask_twice(world: World, keys: list[bytes], there: int) -> None:
        player = world.player()
        hits = world.counts("hit_blocks_host")
        declined(player, keys, there=there)
        await until(lambda: world.tiers(keys) == "b" * 8)
        await until(lambda: world.counts("afterwards_blocks") == 8 - there)
        assert world.counts("afterwards_bytes") == (8 - there) * BLOCK
        # Nobody has used them by that, nobody holds them.
        assert world.counts("hit_blocks_host") == hits + there
        lease, answer = player.acquire(keys, deadline=60, rate=AT_ONCE)
        assert (answer.blocks, answer.growing, answer.present) == (8, False, 8)
        assert player.reads_right(keys, player.leased_slots(lease))
        player.release(lease)
        await world.settle()
        assert len(afterwards(world)) == afterwards(world).noted_bytes == 0
        check(world.engine, quiet=True)

    async def first_boot(world: World) -> None:
        await ask_twice(world, await stored(world, "slow", 8, in_host=3), 3)

    async def next_boot(world: World) -> None:
        assert world.tiers(chain("slow", 8)) == "d" * 8
        forget_speed(world)
        await ask_twice(world, chain("slow", 8), 0)

    make_world().run(first_boot, next_boot)


def test_parents_come_first_and_not_before_the_engine_has_computed_them(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await stored(world, "order", 8, in_host=2)
        player = world.player()
        before = len(world.disk.read_slots)
        declined(player, keys, NEVER, there=2)
        assert len(afterwards(world)) == 6
        await has_looked_around(world)
        assert len(world.disk.read_slots) == before
        # Asked for again before that, they do not come later.
        due = afterwards(world)._runs[0].due
        declined(player, keys, NEVER, there=2)
        declined(player, keys[:6], NEVER, there=2)
        assert [len(run.blocks) for run in afterwards(world)._runs] == [2, 4]
        assert all(run.due <= due for run in afterwards(world)._runs)
        now_due(world)
        await until(lambda: world.tiers(keys) == "b" * 8)
        slots = [world.block(key).disk for key in keys[2:]]
        assert world.disk.read_slots[before:] == slots

    async def has_looked_around(world: World) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    make_world(wrap=Gate).run(story)


def test_nothing_is_read_while_a_lease_waits(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes in the middle has what has not begun taken back."""
    monkeypatch.setattr("kvstore.engine.afterwards._STEP_SECONDS", 1e9)  # all at once

    async def story(world: World) -> None:
        slow = await stored(world, "slow", 8)
        asked = await stored(world, "asked", 4)
        other = await stored(world, "other", 4)
        promoter = world.engine.promoter
        assert promoter is not None
        world.disk.closed = True
        player = world.player()
        lease, answer = player.acquire(asked, deadline=600)
        assert answer.growing
        await until(lambda: world.disk.reads)
        declined(player, slow, NEVER)
        now_due(world)
        await has_looked(world)
        wanted = {world.block(key).disk for key in slow}
        assert wanted.isdisjoint(world.disk.read_slots)
        now_due(world, at=1e18)
        await let_until(world, lambda: player.heard_of(LeaseDoneEvent), asked)
        assert (await player.lease_done(lease)).blocks == 4
        # Nobody waits: it begins, three reads of a block each. Then somebody comes.
        forget_speed(world)
        now_due(world)
        await until(lambda: not wanted.isdisjoint(world.disk.read_slots))
        assert len(promoter) == 8
        lease, answer = player.acquire(other, deadline=600)
        assert answer.growing
        await until(lambda: not afterwards(world)._reading)
        assert len(afterwards(world)) == 8  # nothing of it has landed yet
        assert len(promoter) <= 3 + 4
        assert len(wanted & set(world.disk.read_slots)) <= 3
        all_reads(world)
        assert (await player.lease_done(lease)).blocks == 4
        await until(lambda: world.tiers(slow) == "b" * 8)
        await until(lambda: not len(afterwards(world)))
        await world.settle()
        for lease in list(player.attachment.leases):
            player.release(lease)
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


def test_a_request_takes_over_what_it_asks_for(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await stored(world, "both", 8)
        world.disk.closed = True
        player = world.player()
        declined(player, keys)
        await until(lambda: world.disk.reads)
        lease, answer = player.acquire(keys, deadline=600)
        assert answer.growing
        all_reads(world)
        assert (await player.lease_done(lease)).blocks == 8
        player.release(lease)
        await until(lambda: not len(afterwards(world)))
        await world.settle()
        assert len(world.disk.read_slots) == 8
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


def test_what_is_noted_is_bounded_and_the_oldest_goes(make_world: Make) -> None:
    """A quarter of the pool: five blocks here."""

    async def story(world: World) -> None:
        first, second = chain("first", 3), chain("second", 12)
        for keys in (first, second):
            await stored(world, keys[0].hex(), 0)
            await world.player().put(keys)
            await world.evict_host(keys)
        player, found = world.player(), afterwards(world)

        def noted() -> tuple[int, int]:
            assert found.noted_bytes == len(found) * BLOCK
            return tuple(sum(world.block(k) in found for k in c) for c in (first, second))  # type: ignore[return-value]

        declined(player, first, NEVER)
        assert noted() == (3, 0)
        declined(player, second[:3], NEVER)
        assert noted() == (2, 3)
        assert world.block(first[2]) not in found
        declined(player, first, NEVER)
        assert noted() == (3, 2)
        # One that is longer than all of it keeps its head.
        declined(player, second, NEVER)
        assert noted() == (0, 5)
        assert all(world.block(key) in found for key in second[:5])
        for _ in range(100):
            declined(player, second, NEVER)
            declined(player, second[:4], NEVER)
        assert len(found._runs) <= 2
        now_due(world)
        await until(lambda: not len(found) and not found._reading)
        assert world.tiers(second) == "bbbbbddddddd"
        assert world.tiers(first) == "ddd"
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=20).run(story)


@pytest.mark.parametrize("used_since", [True, False])
def test_it_makes_room_only_at_the_cost_of_what_was_used_before(
    make_world: Make, used_since: bool
) -> None:
    async def story(world: World) -> None:
        keys, hot = await stored(world, "slow", 3), chain("hot", 12)
        player = world.player()
        assert await player.put(hot) == 12
        await world.settle()
        declined(player, keys, NEVER)
        if used_since:
            assert await player.load(hot) == 12
        in_host = world.tiers(hot).count("b")
        now_due(world)
        await until(lambda: not len(afterwards(world)) and not afterwards(world)._reading)
        await world.settle()
        if used_since:
            assert (world.tiers(keys), world.tiers(hot).count("b")) == ("ddd", in_host)
        else:
            assert world.tiers(keys) == "bbb"
            assert world.tiers(hot).count("b") == in_host - 3
        check(world.engine, quiet=True)

    make_world(host_blocks=12).run(story)


def test_a_space_stays_within_its_quota(make_world: Make) -> None:
    """The head of a chain that is longer comes, and what the space used before makes room."""

    async def story(world: World) -> None:
        player = world.player()
        old, keys = chain("old", 3), await stored(world, "slow", 8)
        assert await player.put(old) == 3
        await world.settle()
        declined(player, keys, NEVER)
        now_due(world)
        await until(lambda: not len(afterwards(world)) and not afterwards(world)._reading)
        assert (world.tiers(old), world.tiers(keys)) == ("ddd", "bbbbdddd")
        await world.settle()
        check(world.engine, quiet=True)

    make_world(default_limits=SpaceLimits(host_bytes=4 * BLOCK)).run(story)


def test_declining_counts_as_a_use_of_the_disk(make_world: Make) -> None:
    """What is asked for all day stays there, though nobody loads it."""

    async def story(world: World) -> None:
        keys = await stored(world, "slow", 4)
        newest = world.engine.index.sequence
        declined(world.player(), keys, NEVER)
        touched = [world.block(key).sequence for key in keys]
        assert min(touched) > newest
        assert touched == sorted(touched, reverse=True)

    make_world().run(story)


def test_a_quota_is_no_reason_to_push_out_what_is_others(make_world: Make) -> None:
    """What the quota does not let in takes no room from anybody."""

    async def story(world: World) -> None:
        keys, theirs = await stored(world, "slow", 6), chain("theirs", 12)
        await world.engine.limits.change(world.space, {"host_bytes": 2 * SLOT_BYTES})
        other, player = await world.engine.open_space(spec_of("other")), world.player()
        assert await player.put(theirs, space=other) == 12
        await world.settle()
        in_host = other.host_blocks
        declined(player, keys, NEVER)
        assert world.engine.promoter is not None
        world.engine.promoter.path.recall(1e9, 0.0)  # all of it in one step
        now_due(world)
        await until(lambda: not len(afterwards(world)) and not afterwards(world)._reading)
        await world.settle()
        assert world.tiers(keys) == "bbdddd"
        assert other.host_blocks >= in_host - 2
        check(world.engine, quiet=True)

    make_world(host_blocks=12).run(story)


def test_a_block_larger_than_a_step_is_a_step(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(afterwards_module, "_STEP_BYTES", BLOCK // 2)

    async def story(world: World) -> None:
        keys = await stored(world, "slow", 4)
        declined(world.player(), keys)
        await until(lambda: world.tiers(keys) == "bbbb")

    make_world().run(story)


def test_what_is_gone_when_its_turn_comes_is_forgotten(make_world: Make) -> None:
    async def story(world: World) -> None:
        removal = world.engine.removal
        for name, there in (("all", ""), ("tail", "bbbb")):
            keys = await stored(world, name, 8)
            declined(world.player(), keys, NEVER)
            await removal.evict(world.space, keys[len(there) :], None)
            assert len(afterwards(world)) == 8
            now_due(world)
            await until(lambda: not len(afterwards(world)) and not afterwards(world)._reading)
            assert world.tiers(keys) == there + "-" * (8 - len(there))
        # What is above them left memory: they could not be reached there.
        keys = await stored(world, "head", 8, in_host=4)
        declined(world.player(), keys, NEVER, there=4)
        await world.evict_host(keys)
        now_due(world)
        await until(lambda: not len(afterwards(world)))
        assert world.tiers(keys) == "d" * 8
        declined(world.player(), keys, NEVER)
        await removal.bump_epoch(world.space)
        now_due(world)
        await until(lambda: not len(afterwards(world)))
        await world.settle()
        check(world.engine, quiet=True)

    make_world().run(story)


def test_a_disk_that_fails_is_left_alone(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys, other = await stored(world, "slow", 4), await stored(world, "other", 4)
        declined(world.player(), keys, NEVER)
        declined(world.player(), other, NEVER)
        world.disk.plan = [Fault(FaultKind.UNAVAILABLE, "read")]
        now_due(world)
        await until(lambda: not len(afterwards(world)) and not afterwards(world)._reading)
        await world.settle()
        assert world.counts("afterwards_blocks") == 0
        check(world.engine, quiet=True)
        world.disk.plan = []
        forget_speed(world)
        declined(world.player(), keys)
        await until(lambda: world.tiers(keys) == "bbbb")
        assert world.tiers(other) == "dddd"

    make_world(wrap=lambda disk: Faulty(disk, [])).run(story)


def test_a_stalled_disk_has_everything_forgotten(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worth, "_STALL_SECONDS", 0.05)
    monkeypatch.setattr(worth, "_STALL_FACTOR", 0.0)

    async def story(world: World) -> None:
        keys, other = await stored(world, "slow", 8), await stored(world, "other", 4)
        world.disk.closed = True
        declined(world.player(), other, NEVER)
        declined(world.player(), keys)
        await until(lambda: world.disk.reads)
        await until(lambda: not len(afterwards(world)) and not afterwards(world)._reading)
        assert world.engine.worth.stalled_seconds() > 0
        declined(world.player(), other)
        assert len(afterwards(world)) == 0
        all_reads(world)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


def test_a_wait_that_was_cut_is_brought_afterwards(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        keys = await stored(world, "cut", 8, in_host=2)
        world.engine.promoter.path.recall(1e9, 0.0)  # type: ignore[union-attr]
        world.disk.closed = True
        monkeypatch.setattr(world.engine.worth, "as_predicted", lambda _: False)
        monkeypatch.setattr(world.engine.worth, "still", lambda *_: 0)
        player = world.player()
        lease, answer = player.acquire(keys, deadline=600, rate=TOKENS / 0.01)
        assert answer.growing
        done = await player.lease_done(lease)
        assert (done.blocks, done.miss.reason) == (2, MissReason.NOT_WORTH_WAITING)
        assert len(afterwards(world)) or afterwards(world)._reading
        all_reads(world)
        await until(lambda: world.tiers(keys) == "b" * 8)
        player.release(lease)
        await until(lambda: not len(afterwards(world)))
        await world.settle()
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


@pytest.mark.parametrize("how", ["stop", "drain", "close"])
def test_a_stop_in_the_middle_leaves_nothing(make_world: Make, how: str) -> None:
    async def story(world: World) -> None:
        keys, other = await stored(world, "slow", 8), await stored(world, "other", 4)
        world.disk.closed = True
        declined(world.player(), other, NEVER)
        declined(world.player(), keys)
        await until(lambda: world.disk.reads)
        if how == "close":
            return  # with reads under way
        await (afterwards(world).stop() if how == "stop" else world.engine.drain(60))
        assert (len(afterwards(world)), afterwards(world).noted_bytes) == (0, 0)
        declined(world.player(), other)
        assert len(afterwards(world)) == 0
        all_reads(world)
        await world.settle()
        promoter = world.engine.promoter
        assert promoter is not None
        assert (len(promoter), promoter.jobs, promoter.queued_bytes, promoter.moving) == (0,) * 4
        assert world.tiers(other) == "dddd"
        check(world.engine, quiet=True)

    make_world(wrap=Gate).run(story)


def test_who_asks_why_hears_that_it_is_coming(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = await stored(world, "slow", 4)
        player = world.player()
        world.engine.acquire(
            player.attachment, world.space, 7, keys, 60, 0, NEVER, None, "request-1"
        )
        player.release(7)
        *_, line = explain_request(world.engine, "request-1").lines
        assert line == "now: block 0 is there, in disk; it is to be brought to memory"
        now_due(world)
        await until(lambda: world.tiers(keys) == "bbbb")
        *_, line = explain_request(world.engine, "request-1").lines
        assert line == "now: block 0 is there, in host"

    make_world().run(story)


def test_runs_that_have_come_otherwise_are_passed_over_one_at_a_time(make_world: Make) -> None:
    """A gigabyte of small ones would hold the loop for as long as looking at all of them takes."""

    async def story(world: World) -> None:
        keys = await stored(world, "a", 12)
        found = afterwards(world)
        for key in keys:
            assert found.note([world.block(key)], 3600.0)
        assert len(found) == 12
        assert await world.player().load(keys) == 12
        now_due(world)
        seen = set()
        while len(found):
            await asyncio.sleep(0)
            seen.add(len(found))
        assert len(seen) > 6

    make_world().run(story)


def test_room_that_others_take_first_is_not_made_at_the_cost_of_what_is_nowhere_else(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        engine = world.engine
        await world.warm(12)
        keys = await stored(world, "a", 3)
        assert engine.flusher is not None
        only = chain("only", 6)
        monkeypatch.setattr(engine.flusher, "committed", lambda block: None)
        assert await world.player("other").put(only) == 6
        assert world.tiers(only) == "h" * 6
        declined(world.player(), keys)
        assert engine.promoter is not None
        request, hog = engine.promoter.request, world.player("hog")

        def others_come_first(*args: Any) -> None:
            request(*args)
            monkeypatch.undo()
            slots = engine.room.take(world.space.shape, world.host.free_blocks(world.space.shape))
            engine.grants.own(
                engine.grants.add(
                    1, hog.attachment.id, world.space, world.space.epoch, [hog.attachment], slots
                ),
                hog.attachment,
            )

        monkeypatch.setattr(engine.promoter, "request", others_come_first)
        now_due(world)
        await until(lambda: engine.promoter is not None and len(engine.promoter._passed_over))
        assert world.tiers(only) == "h" * 6
        assert world.tiers(keys) == "ddd"
        hog.detach()
        await until(lambda: world.tiers(keys) == "bbb")
        assert world.tiers(only) == "h" * 6

    make_world(host_blocks=12).run(story)


def test_a_read_that_measures_the_path_does_not_wait_for_room_for_ever(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it asked for stayed on disk all that time, and with every request there was more of it."""
    monkeypatch.setattr(worth, "_PROBE_SECONDS", 0.05)

    async def story(world: World) -> None:
        engine, player = world.engine, world.player()
        await world.warm(12)
        chains = [await stored(world, f"slow{n}", 2) for n in range(4)]
        assert engine.flusher is not None
        monkeypatch.setattr(engine.flusher, "committed", lambda block: None)
        only = chain("only", 12)
        assert await player.put(only) == 12
        lease, _ = player.acquire(only[:1])  # so that room may come
        engine.worth._probed = 0.0
        for keys in chains:
            declined(player, keys, NEVER)
            await asyncio.sleep(0.06)
        await until(lambda: not engine.index.disk_held, 30)
        assert world.tiers(only) == "h" * 12
        player.release(lease)

    make_world(host_blocks=12, lease_ttl=600.0).run(story)
