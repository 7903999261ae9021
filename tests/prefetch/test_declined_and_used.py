"""Requests for what lies on a disk a little slower than the engine, in virtual time."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

from lease_world import LeaseWorld
from virtual_time import run_in_virtual_time

from kvstore.engine.afterwards import Afterwards
from kvstore.engine.counters import Counters
from kvstore.tiers.base import Slot
from kvstore.units import KIB

BLOCK = 256 * KIB
COMPUTE = 0.005  # of a block; to read it takes a quarter longer
RATE = BLOCK / (1.25 * COMPUTE)
RUN = 64


async def world_with(*, afterwards: bool) -> tuple[LeaseWorld, Afterwards]:
    """Return a world whose disk is measured; without `afterwards` nothing comes by itself."""
    world = LeaseWorld(RATE, BLOCK, COMPUTE)
    world.promoter.start()
    await world.measured()
    room = SimpleNamespace(spare=lambda space, count, older_than: count)
    worth = cast("Any", world.leases)._worth
    after = Afterwards(
        world.index,
        cast("Any", room),
        world.promoter,
        Counters(),
        budget_bytes=lambda: 1024 * BLOCK,
        waiting=lambda: world.leases.waiting,
        stalled=worth.stalled_seconds,
    )
    if afterwards:
        worth.afterwards = after
        after.start()
    return world, after


def in_memory(chain: list[Any]) -> int:
    return sum(block.host is not None for block in chain)


def test_the_first_computes_and_the_next_one_loads() -> None:
    async def story() -> None:
        world, after = await world_with(afterwards=True)
        chain = world.chain(RUN)
        assert world.load(chain).first_token(COMPUTE) == RUN * COMPUTE
        # As long as that takes the disk rests: the engine has its machine for itself.
        await asyncio.sleep(RUN * COMPUTE - 1e-6)
        assert not world.device.calls
        await asyncio.sleep(1.05 * RUN * BLOCK / RATE + 0.02)
        assert in_memory(chain) == RUN
        question = world.load(chain)
        assert question.first_token(COMPUTE) == 0
        assert (len(after), after.noted_bytes) == (0, 0)
        await after.stop()
        await world.promoter.stop()

    run_in_virtual_time(story())


def test_what_hangs_on_a_block_in_the_gpu_pool_only_comes_as_well() -> None:
    async def story() -> None:
        world, after = await world_with(afterwards=True)
        chain = world.chain(8)
        world.index.put_gpu(chain[0], Slot(1 << 31, 0))
        after.note(chain[1:], 0.0)
        await asyncio.sleep(1.05 * 8 * BLOCK / RATE + 0.02)
        assert in_memory(chain) == 7
        await after.stop()
        await world.promoter.stop()

    run_in_virtual_time(story())


async def _served(*, afterwards: bool) -> tuple[list[float], int]:
    """Return how long requests waited that the disk pays for, and how many blocks were computed.

    Now and then somebody asks for a chain of its own twice that is declined the first time.
    """
    world, after = await world_with(afterwards=afterwards)
    dice, loop = random.Random(5), asyncio.get_running_loop()
    waits: list[float] = []
    computed = 0
    for _ in range(60):
        declined = world.chain(RUN)
        world.load(declined)
        await asyncio.sleep(dice.uniform(0.0, 2 * RUN * COMPUTE))
        # The engine is slow for these, or busy with others: they wait.
        wanted = world.chain(16)
        begun = loop.time()
        waits.append(await world.ask(wanted).done)
        assert loop.time() - begun == waits[-1]
        await asyncio.sleep(2 * RUN * COMPUTE)
        computed += RUN - in_memory(declined)
    await after.stop()
    await world.promoter.stop()
    return waits, computed


def test_who_waits_is_hardly_kept_waiting_by_it() -> None:
    """What has begun ends before: at most the batches under way, each of one block here."""
    alone, computed = run_in_virtual_time(_served(afterwards=False))
    beside, left = run_in_virtual_time(_served(afterwards=True))
    assert computed == 60 * RUN
    assert left < computed / 10
    most = 4 * BLOCK / RATE
    assert max(b - a for a, b in zip(alone, beside, strict=True)) <= most
