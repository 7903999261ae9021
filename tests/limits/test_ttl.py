"""What nobody used for as long as its space says leaves every tier; the clock is the test's own."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest
from engine_invariants import check
from engine_world import World, chain, spec_of, until

from kvstore.engine import limits as limits_module
from kvstore.engine.explainer import explain_keys
from kvstore.engine.steady_clock import SteadyClock
from kvstore.engine.use_times import UseTimes
from kvstore.index import BlockIndex, SpaceLimits
from kvstore.index.lmdb_store import MetaStore
from kvstore.index.records import UsesRecord
from kvstore.miss import MissReason
from kvstore.server.limits import unix_ms

Make = Callable[..., World]

HOUR = 3600.0
_BOOT = "8d7c5b9e-0000-4000-8000-00000000000"


class Machine:
    """Clocks that go as a test wants, over restarts and reboots."""

    def __init__(self) -> None:
        self.up, self.unix, self.boots = 1000.0, 1.7e9, 1

    def clock(self) -> SteadyClock:
        return SteadyClock(
            clock=lambda: self.up,
            wall=lambda: self.unix,
            boot=f"{_BOOT}{self.boots}",
            start=self.unix,
        )

    def passes(self, seconds: float) -> None:
        self.up += seconds
        self.unix += seconds

    def reboots(self, away: float) -> None:
        self.boots += 1
        self.up = 3.0
        self.unix += away


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(limits_module, "_INTERVAL_SECONDS", 0.02)
    return Machine()


async def _live_for(world: World, seconds: float) -> None:
    await world.engine.limits.change(world.space, {"ttl_ms": round(seconds * 1e3)})


def _use(world: World, keys: list[bytes]) -> None:
    player = world.player()
    lease, answer = player.acquire(keys)
    assert answer.blocks == len(keys)
    player.release(lease)


def test_what_is_not_used_leaves_every_tier_and_explain_says_so(
    make_world: Make, machine: Machine
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        other = await world.engine.open_space(spec_of("other"))
        theirs, old, used = chain("theirs", 3), chain("old", 4), chain("used", 4)
        await player.put(theirs, space=other)
        await player.put(old)
        await player.put(used)
        await world.settle()
        await _live_for(world, 3 * HOUR)
        world.engine.limits.times.mark(apart=0.0)
        machine.passes(2 * HOUR)
        _use(world, used)
        world.engine.limits.times.mark(apart=0.0)
        machine.passes(1.1 * HOUR)
        await until(lambda: not world.space.run(old))
        assert world.tiers(used) == "bbbb"
        assert len(other.run(theirs)) == 3
        explanation = explain_keys(world.engine, world.space, world.space.epoch, old)
        assert explanation.miss.reason is MissReason.EXPIRED
        assert "expired in disk" in explanation.lines[1]
        assert "not used for 3h" in explanation.lines[1]
        counts = world.engine.counters.counts
        assert counts["expired_blocks_host"] == counts["expired_blocks_disk"] == 4
        # It may come back, and lives as long again.
        await player.put(old)
        world.engine.limits.times.mark(apart=0.0)
        machine.passes(2 * HOUR)
        await until(lambda: not world.space.run(used))
        assert len(world.space.run(old)) == 4
        await world.settle()
        check(world.engine, quiet=True)

    make_world(clock=machine.clock).run(story)


def test_leased_and_pinned_blocks_stay_until_they_are_not(
    make_world: Make, machine: Machine
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        leased, pinned, loose = chain("leased", 2), chain("pinned", 2), chain("loose", 2)
        for keys in (leased, pinned, loose):
            await player.put(keys)
        await world.settle()
        await _live_for(world, 60.0)
        lease, _ = player.acquire(leased)
        await world.engine.pin(world.space, pinned, 0)
        world.engine.limits.times.mark(apart=0.0)
        machine.passes(1000.0)
        await until(lambda: not world.space.run(loose))
        await until(lambda: world.tiers(pinned) == "dd")
        assert player.reads_right(leased, player.leased_slots(lease))
        player.release(lease)
        await until(lambda: not world.space.run(leased))
        assert len(world.space.run(pinned)) == 2
        await world.engine.pins.unpin(world.space, pinned)
        await until(lambda: not world.space.blocks)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(clock=machine.clock).run(story)


def test_the_time_of_a_use_survives_restarts_and_steps_of_the_wall_clock(
    make_world: Make, machine: Machine
) -> None:
    world = make_world(clock=machine.clock)
    early, late = chain("early", 3), chain("late", 3)

    async def fill(world: World) -> None:
        player = world.player()
        await _live_for(world, 10 * HOUR)
        await player.put(early)
        await world.settle()
        world.engine.limits.times.mark(apart=0.0)
        machine.passes(4 * HOUR)
        await player.put(late)
        world.engine.limits.times.mark(apart=0.0)
        await world.settle()
        machine.unix -= 1e8  # somebody sets the clock back by three years

    async def next_boot(world: World) -> None:
        assert world.tiers(early) == world.tiers(late) == "ddd"
        machine.unix += 2e8  # and forward by more
        machine.passes(5 * HOUR)
        world.engine.limits.times.mark(apart=0.0)

    async def after_a_reboot(world: World) -> None:
        # The wall clock was set back meanwhile: no time has passed, none was won.
        assert world.tiers(early) == world.tiers(late) == "ddd"
        machine.passes(1.5 * HOUR)
        await until(lambda: not world.space.run(early))
        assert world.tiers(late) == "ddd"

    async def at_last(world: World) -> None:
        machine.passes(4 * HOUR)
        await until(lambda: not world.space.blocks)

    world.run(fill, next_boot)
    machine.reboots(away=-HOUR)
    world.run(after_a_reboot)
    machine.reboots(away=0.0)
    world.run(at_last)


def test_pins_end_in_time_whatever_is_done_to_the_wall_clock(
    make_world: Make, machine: Machine
) -> None:
    world = make_world(clock=machine.clock)
    keys = chain("pinned", 2)

    def ends_in(world: World) -> float:
        return (
            unix_ms(world.engine, world.engine.pins.first_end(world.space.id)) / 1e3 - machine.unix
        )

    async def pin(world: World) -> None:
        await world.player().put(keys)
        await world.settle()
        await world.engine.pin(world.space, keys, 10 * HOUR, "session")
        machine.passes(HOUR)
        machine.unix += 1e8
        await world.engine.pins.expire()
        assert world.engine.pins.counts() == {world.space.id: 2}
        # What people are told is a time of the clock as it is now.
        assert ends_in(world) == pytest.approx(9 * HOUR, abs=1.0)

    async def after_a_crash(world: World) -> None:
        assert ends_in(world) == pytest.approx(9 * HOUR, abs=1.0)
        machine.unix -= 3e8
        machine.passes(HOUR)
        await world.engine.pins.expire()
        assert ends_in(world) == pytest.approx(8 * HOUR, abs=1.0)
        # Known before a reboot, which takes no step for time that has passed.
        await world.engine.limits.save_times()

    async def after_a_reboot(world: World) -> None:
        assert ends_in(world) == pytest.approx(6 * HOUR, abs=1.0)
        machine.passes(6.1 * HOUR)
        machine.unix -= 1e8
        await world.engine.pins.expire()
        assert world.engine.pins.counts() == {}

    async def forgotten(world: World) -> None:
        assert not world.store.pins()

    world.run(pin, after_a_crash)
    machine.reboots(away=2 * HOUR)
    world.run(after_a_reboot, forgotten)


def test_a_time_that_began_at_0_goes_on_as_unix_time(machine: Machine) -> None:
    index = BlockIndex(lambda _: None, lambda _, __: None)
    boot = UUID(f"{_BOOT}{machine.boots}").bytes
    times = UseTimes(index, machine.clock())
    times.restore(UsesRecord(500.0, machine.up, machine.unix, boot, ((7, 400.0),)))
    assert times.now() == pytest.approx(machine.unix)
    assert times.unused_for(99.0) == 7
    assert times.unused_for(101.0) == -1


@pytest.mark.parametrize("disk_blocks", [0, 64])
def test_uses_of_blocks_in_kept_memory_are_known_to_the_next_start(
    make_world: Make, machine: Machine, disk_blocks: int
) -> None:
    keys = chain("kept", 3)

    async def fill(world: World) -> None:
        await _live_for(world, 10 * HOUR)
        await world.player().put(keys)
        world.engine.limits.times.mark(apart=0.0)
        await world.settle()
        machine.passes(4 * HOUR)
        await world.save()

    async def next_boot(world: World) -> None:
        assert world.tiers(keys) in ("hhh", "bbb")
        machine.passes(5.9 * HOUR)
        await world.player().put(chain("other", 1))
        assert len(world.space.run(keys)) == 3
        machine.passes(0.2 * HOUR)
        await until(lambda: not world.space.run(keys))

    make_world(clock=machine.clock, disk_blocks=disk_blocks).run(fill, next_boot)


def test_blocks_without_a_mark_count_as_used_at_the_start(
    make_world: Make, machine: Machine
) -> None:
    world = make_world(clock=machine.clock)
    keys = chain("unmarked", 3)

    async def fill(world: World) -> None:
        await world.player().put(keys)
        await world.settle()

    async def later(world: World) -> None:
        await _live_for(world, HOUR)
        machine.passes(0.9 * HOUR)
        assert await world.player().load(keys[:1]) == 1
        world.engine.limits.times.mark(apart=0.0)
        machine.passes(0.2 * HOUR)
        await until(lambda: len(world.space.run(keys)) == 1)

    world.run(fill)
    machine.passes(100 * HOUR)
    world.run(later)


def test_a_default_holds_for_new_spaces_and_old_ones(make_world: Make, machine: Machine) -> None:
    async def story(world: World) -> None:
        player = world.player()
        other = await world.engine.open_space(spec_of("other"))
        await player.put(chain("a", 2))
        await player.put(chain("b", 2), space=other)
        await world.engine.limits.change(other, {"ttl_ms": round(100 * HOUR * 1e3)})
        world.engine.limits.times.mark(apart=0.0)
        machine.passes(2 * HOUR)
        await until(lambda: not world.space.blocks)
        assert len(other.blocks) == 2

    defaults = SpaceLimits(ttl_ms=round(HOUR * 1e3))
    make_world(clock=machine.clock, default_limits=defaults).run(story)


def test_marks_are_few_and_never_early(machine: Machine) -> None:
    index = BlockIndex(lambda _: None, lambda _, __: None)
    times = UseTimes(index, machine.clock())
    times.restore(None)
    used: list[tuple[int, float]] = []
    for n in range(60_000):
        index.sequence += 1
        used.append((index.sequence, machine.up))
        machine.passes(1.5 if n % 100 else 500.0)
        times.mark()
    assert len(times) < 2_400
    now = machine.up
    for sequence, at in used[::97]:
        age = now - at
        # Not before its time, and not much later.
        assert times.unused_for(age + 1e-6) < sequence
        assert times.unused_for(age * (1 - 1 / 60) - 1005.0) >= sequence


def test_marks_read_back_and_numbers_go_on_above_them(machine: Machine, make_world: Make) -> None:
    async def story(world: World) -> None:
        times, store = world.engine.limits.times, world.store
        world.engine.index.sequence = 1_000_000
        machine.passes(10.0)
        record = times.record()
        assert record is not None
        assert times.record() is None
        store.put_uses(record)
        machine.passes(5.0)
        index = BlockIndex(lambda _: None, lambda _, __: None)
        again = UseTimes(index, machine.clock())
        again.restore(store.uses())
        assert index.sequence == 1_000_000
        assert again.unused_for(4.9) == 1_000_000
        assert again.unused_for(5.1) < 1_000_000

    make_world(clock=machine.clock).run(story)


class NoTimes(MetaStore):
    """Cannot save when blocks were used."""

    def uses(self) -> None:
        self.damaged += 1


def test_lost_times_let_nothing_expire_early(make_world: Make, machine: Machine) -> None:
    keys = chain("lost", 2)

    async def fill(world: World) -> None:
        await _live_for(world, HOUR)
        await world.player().put(keys)
        await world.settle()

    async def later(world: World) -> None:
        machine.passes(0.5 * HOUR)
        await world.player().put(chain("other", 1))
        assert world.tiers(keys) == "dd"
        machine.passes(0.6 * HOUR)
        await until(lambda: not world.space.run(keys))

    make_world(clock=machine.clock).run(fill)
    machine.passes(0.8 * HOUR)
    make_world(clock=machine.clock, store_class=NoTimes).run(later)
