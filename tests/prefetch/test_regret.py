"""What choices cost beside those of an oracle: requests of chats, on a serial device, in virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest
from lease_world import LeaseWorld
from virtual_time import run_in_virtual_time

from kvstore.cli.bench.prefetch_trace import regret
from kvstore.units import KIB

BLOCK = 16 * KIB
COMPUTE = 0.05
CHATS = 40
REQUESTS = 400


async def _chats(load: float, busy: float) -> tuple[float, float, float]:
    """Ask for chats of many lengths.

    Returns:
        seconds that waiting saved; those that better choices would have saved more; the longest time
        to a first token beside the same without kvstore.

    Args:
        load: seconds to read a block, over seconds to compute it.
        busy: of the device's time, what the requests take.
    """
    world = LeaseWorld(BLOCK / (load * COMPUTE), BLOCK, COMPUTE)
    world.promoter.start()
    await world.measured()
    dice = random.Random(11)
    # Lengths as chats have them: most are short, a few very long.
    chats = [world.chain(min(200, int(dice.paretovariate(1.1) * 6))) for _ in range(CHATS)]
    mean = sum(map(len, chats)) / CHATS * world.read_seconds
    for _ in range(REQUESTS):
        await asyncio.sleep(dice.expovariate(busy / mean))
        chat = dice.choice(chats)
        world.evict(chat)
        world.load(chat)
    while not all(question.ended for question in world.asked):
        await asyncio.sleep(1)
    await world.promoter.stop()
    saved = sum(
        len(question.keys) * COMPUTE - question.first_token(COMPUTE) for question in world.asked
    )
    lost = sum(regret(question, COMPUTE, world.read_seconds) for question in world.asked)
    worst = max(
        question.first_token(COMPUTE) / (len(question.keys) * COMPUTE) for question in world.asked
    )
    return saved, lost, worst


@pytest.mark.parametrize(
    ("load", "busy", "least"), [(0.2, 0.5, 380), (0.4, 0.5, 250), (0.6, 0.7, 130), (0.8, 0.9, 75)]
)
def test_little_is_lost_against_the_best_choices(load: float, busy: float, least: float) -> None:
    """Disks at 5 to 1.25 times the engine's speed: nobody is slower than without, either."""
    saved, lost, worst = run_in_virtual_time(_chats(load, busy))
    assert saved > least
    assert 0 <= lost <= 0.05 * saved
    assert worst <= 1.001


def test_a_disk_that_is_slower_than_the_engine_costs_nothing() -> None:
    saved, lost, _ = run_in_virtual_time(_chats(load=1.2, busy=0.5))
    assert abs(saved) < 1
    assert lost < 1


async def _own_wait() -> None:
    world = LeaseWorld(BLOCK / 0.02, BLOCK, COMPUTE)
    world.promoter.start()
    await world.measured()
    mine, other = world.chain(20), world.chain(40)
    alone = world.load(mine)
    await asyncio.sleep(0.1)
    world.load(other)
    cold = [block for block in mine if block.host is None]
    lease = world.leases._growing
    [waiter] = [one for one in lease if one.run == mine]
    in_flight = world.promoter.path.in_flight
    # Nothing goes before what is left of it but what is in flight, and that is its own.
    assert world.promoter.ahead_bytes(cold, 0, waiter) == -in_flight
    # Whoever asks for the other one waits for what is left of this one and not in flight.
    assert world.promoter.ahead_bytes(other, 0) >= len(cold) * BLOCK - in_flight
    while not alone.ended:
        await asyncio.sleep(0.01)
    assert alone.loaded == 20
    await world.promoter.stop()


def test_nobody_waits_for_himself() -> None:
    run_in_virtual_time(_own_wait())
