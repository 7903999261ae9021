"""Short jobs beside one that takes minutes, on a serial device of known speed, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from promoter_world import PromoterWorld
from virtual_time import run_in_virtual_time

from kvstore.units import KIB, MIB

RATE = 256 * MIB
BLOCK = 256 * KIB
SMALL = 16
JOBS = 300
OWN = SMALL * BLOCK / RATE


def p95(waits: list[float]) -> float:
    return sorted(waits)[int(0.95 * len(waits))]


async def waits_beside_a_big_one(gap: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Return what small jobs waited, and what they would have if nothing else used the device."""
    world = PromoterWorld(RATE, BLOCK)
    world.promoter.start()
    await world.measured()
    big_blocks = world.chain(int(2 * JOBS * OWN * RATE / BLOCK))
    big = world.ask(big_blocks)
    smalls, alone, free = [], [], 0.0
    loop = asyncio.get_running_loop()
    for _ in range(JOBS):
        await asyncio.sleep(gap())
        free = max(loop.time(), free) + OWN
        alone.append(free - loop.time())
        smalls.append(world.ask(world.chain(SMALL)))
    waits = [await small.done for small in smalls]
    assert not big.done.done()
    theirs = {block.disk for block in big_blocks}
    since = 0
    for call in world.device.calls:
        since = 0 if theirs.intersection(call) else since + 1
        assert since <= 3
    await big.done
    await world.promoter.stop()
    return waits, alone


def test_small_jobs_in_a_steady_stream_wait_twice_their_read_and_a_quantum() -> None:
    """Half of the device's time is theirs. The quantum is less than a small job: 3 ms."""
    dice = random.Random(5)
    waits, _ = run_in_virtual_time(waits_beside_a_big_one(lambda: 2 * OWN * dice.uniform(0.5, 1.5)))
    assert p95(waits) <= 2 * OWN + 0.003


def test_small_jobs_that_come_at_random_wait_little_longer_than_without_the_big_one() -> None:
    """They wait for each other: without anything else on the device, p95 is above twice their read."""
    dice = random.Random(5)
    waits, alone = run_in_virtual_time(waits_beside_a_big_one(lambda: dice.expovariate(0.5 / OWN)))
    assert p95(alone) > 3 * OWN
    assert p95(waits) <= 1.6 * p95(alone)


def test_single_blocks_of_which_two_do_not_fit_a_batch_do_not_starve_the_big_one() -> None:
    """Its turn is not spent on what others leave of a batch."""

    async def story() -> None:
        block = 2 * BLOCK
        world = PromoterWorld(RATE, block)
        world.promoter.start()
        await world.measured()
        big = world.ask(world.chain(20))
        asked = 0

        async def keep_asking() -> None:
            nonlocal asked
            while not big.done.done() and asked < 1000:
                asked += 1
                await world.ask(world.chain(1)).done

        await asyncio.gather(*(keep_asking() for _ in range(16)))
        assert asked < 200
        await big.done
        await world.promoter.stop()

    run_in_virtual_time(story())
