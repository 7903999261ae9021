"""Who was told that waiting pays gets it in time, whoever comes later; who cannot is told so at once."""

from __future__ import annotations

import asyncio

import pytest
from lease_world import LeaseWorld
from virtual_time import run_in_virtual_time

from kvstore.cli.bench.prefetch_trace import Question
from kvstore.units import KIB

BLOCK = 16 * KIB
COMPUTE = 0.05


def alone(question: Question) -> float:
    """Return the seconds to a first token without kvstore."""
    return len(question.keys) * COMPUTE


async def world_of(load: float, *, believed: float = 0.0) -> LeaseWorld:
    """A disk that needs `load` times as long for a block as computing it does.

    `believed`: bytes a second that an earlier run saw, and nothing was measured since.
    """
    world = LeaseWorld(BLOCK / (load * COMPUTE), BLOCK, COMPUTE)
    if believed:
        world.promoter.path.recall(believed, 0.0)
    world.promoter.start()
    if not believed:
        await world.measured()
    return world


async def ended(world: LeaseWorld) -> None:
    while not all(question.ended for question in world.asked):
        await asyncio.sleep(0.1)
    await world.promoter.stop()


async def _overload(believed: float = 0.0) -> tuple[Question, list[Question]]:
    """Ask for a long chain, and then for twice as much as the disk can read in short ones."""
    world = await world_of(0.6, believed=believed)
    long = world.load(world.chain(100))
    shorts = []
    for _ in range(60):
        await asyncio.sleep(0.15)
        shorts.append(world.load(world.chain(10)))
    await ended(world)
    return long, shorts


def test_a_long_wait_that_shorter_ones_keep_overtaking_ends_before_computing_would() -> None:
    """It takes 3 s and 5 s to compute: of the 2 s won the shorter ones may take one."""
    long, shorts = run_in_virtual_time(_overload())
    assert long.loaded == 100
    took = long.ended - long.begun
    assert 3.8 < took < 4.0
    overtook = [q for q in shorts if q.loaded and q.ended < long.ended]
    assert len(overtook) == 3
    assert all(q.first_token(COMPUTE) <= alone(q) * 1.001 for q in shorts)


def test_who_would_come_too_late_is_told_so_at_once() -> None:
    _, shorts = run_in_virtual_time(_overload())
    declined = [q for q in shorts if not q.loaded]
    assert len(declined) > 20
    assert all(q.ended == q.begun for q in declined)


async def _one_by_one() -> list[Question]:
    world = await world_of(0.6)
    asked = [world.load(world.chain(blocks)) for blocks in (100, 40, 30, 3)]
    await ended(world)
    return asked


def test_a_newcomer_counts_those_that_it_cannot_overtake() -> None:
    """The first can spare 33 blocks: the second has more, the third takes nearly all of that."""
    first, too_long, passes, late = run_in_virtual_time(_one_by_one())
    assert (too_long.loaded, too_long.ended) == (0, too_long.begun)
    assert passes.loaded == 30
    assert passes.ended < first.ended
    assert first.loaded == 100
    # It may pass both, but not what is in flight already: about as long as it takes to compute.
    assert late.first_token(COMPUTE) <= alone(late) * 1.001


async def _beginnings() -> tuple[Question, list[Question]]:
    world = await world_of(0.6)
    chain = world.chain(100)
    long = world.load(chain)
    beginnings = []
    for _ in range(12):
        beginnings.append(world.load(chain[:20]))
        await asyncio.sleep(0)
    await ended(world)
    return long, beginnings


def test_who_wants_the_beginning_of_what_another_waits_for_takes_nothing_from_it() -> None:
    long, beginnings = run_in_virtual_time(_beginnings())
    assert long.ended - long.begun == pytest.approx(100 * 0.6 * COMPUTE, rel=0.01)
    assert [question.loaded for question in beginnings] == [20] * 12


async def _hinted() -> Question:
    """Ask for short chains at a low priority, then for a long one, and then for the short ones."""
    world = await world_of(0.6)
    shorts = [world.chain(10) for _ in range(30)]
    for chain in shorts:
        world.ask(chain, priority=-5)
    long = world.load(world.chain(100))
    for chain in shorts:
        world.load(chain)
        await asyncio.sleep(0.1)
    await ended(world)
    return long


def test_what_was_hinted_at_before_costs_a_wait_as_much_as_anything_else() -> None:
    """It would come after the wait: asked for now, it goes before as far as that can be spared."""
    long = run_in_virtual_time(_hinted())
    assert long.first_token(COMPUTE) < 4.05


async def _asked_for_behind(cancelled: bool) -> tuple[Question, list[Question]]:
    """Wait for a long chain; behind it somebody asks for a longer one, others for its beginning."""
    world = await world_of(0.6)
    long = world.load(world.chain(100))
    longer = world.chain(200)
    stream = world.ask(longer)
    asked = []
    for blocks in (90, 60, 30):
        asked.append(world.load(longer[:blocks]))
        await asyncio.sleep(0.1)
        if cancelled:
            world.promoter.cancel(longer, stream)
    await ended(world)
    return long, asked


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_is_asked_for_behind_a_wait_costs_it_as_much_as_anything_else(
    cancelled: bool,
) -> None:
    """Who wants what comes after the wait anyway goes before it as far as that can be spared."""
    long, asked = run_in_virtual_time(_asked_for_behind(cancelled))
    assert long.first_token(COMPUTE) < 4.05
    assert all(q.first_token(COMPUTE) <= alone(q) * 1.001 for q in asked)


async def _before_a_hint(load: float) -> Question:
    world = await world_of(load)
    question = world.load(world.chain(100))
    await asyncio.sleep(0)
    world.ask(world.chain(2000))
    while not question.ended:
        await asyncio.sleep(0.1)
    await world.promoter.stop()
    return question


@pytest.mark.parametrize("load", [0.4, 0.6, 0.8, 0.85])
def test_a_wait_spares_half_of_what_it_wins_for_what_others_read_in_passing(load: float) -> None:
    """Every fourth read, of one who came after it was told how long it waits, made it too long."""
    question = run_in_virtual_time(_before_a_hint(load))
    assert question.first_token(COMPUTE) < alone(question) * (1 + load) / 2 + COMPUTE


async def _beside_a_hint(load: float, blocks: int) -> tuple[float, float]:
    """Return what a wait took beside a hint without end, and what it was predicted to take."""
    world = await world_of(load)
    world.ask(world.chain(2000))
    question = world.load(world.chain(blocks))
    [lease] = world.leases._growing
    assert lease.pending is not None
    predicted = lease.pending.predicted_seconds
    await ended(world)
    assert question.loaded == blocks
    return question.ended - question.begun, predicted


@pytest.mark.parametrize(("load", "blocks"), [(0.1, 40), (0.4, 40), (0.4, 200)])
def test_what_is_read_in_passing_is_counted(load: float, blocks: int) -> None:
    """Every fourth read is the hint's."""
    took, predicted = run_in_virtual_time(_beside_a_hint(load, blocks))
    assert took > 1.2 * blocks * load * COMPUTE
    assert predicted == pytest.approx(took, rel=0.06)


@pytest.mark.parametrize(("load", "loaded"), [(1.2, 16), (0.8, 100)])
def test_a_disk_that_was_another_one_before_the_start_is_found_out_by_the_first_read(
    load: float, loaded: int
) -> None:
    async def story() -> tuple[Question, int]:
        world = await world_of(load, believed=1e9)
        question = world.load(world.chain(100))
        await ended(world)
        return question, max(map(len, world.device.calls))

    question, most = run_in_virtual_time(story())
    # One read of 256 KiB says how slow it is.
    assert most <= 16
    assert question.loaded == loaded
    assert question.first_token(COMPUTE) <= 1.04 * alone(question)


def test_what_a_wrong_belief_promised_to_spare_is_not_taken() -> None:
    """At the rate of before the start it could spare gigabytes: others would take all of its time."""
    long, shorts = run_in_virtual_time(_overload(believed=1e9))
    assert long.loaded == 100
    assert long.ended - long.begun < 4.5
    # Who comes before the first read has ended, half a second after the start, knows no better.
    later = [q for q in shorts if q.begun > 0.5]
    assert all(q.first_token(COMPUTE) <= alone(q) * 1.02 for q in later)
    assert all(q.first_token(COMPUTE) <= alone(q) * 1.5 for q in shorts)
