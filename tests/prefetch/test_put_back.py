"""What found no room a moment ago is next again, where it stood; and nobody else is the worse for it."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from promoter_world import PromoterWorld, RunOf
from virtual_time import run_in_virtual_time

from kvstore.index import Block, SpaceIndex
from kvstore.prefetch.host_room import HostRoom
from kvstore.prefetch.promoter import Promoter
from kvstore.space import BlockShape, SpaceSpec
from kvstore.tiers.base import Slot
from kvstore.units import KIB, MIB

BLOCK = 16 * KIB


class _Full:
    """Gives as many slots as it is told to.

    Attributes:
        left: how many.
        for_holders: gives those who hold what lands as many as they want.
    """

    def __init__(self, promoter: Promoter) -> None:
        self._host = promoter._host
        promoter._host = promoter._passed_over._host = cast("HostRoom", self)
        self.left = 0
        self.for_holders = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._host, name)

    def take(
        self, shape: BlockShape, count: int, older_than: int | None, *, lossless: bool
    ) -> list[Slot]:
        if self.for_holders and older_than is None:
            return list(self._host.take(shape, count, older_than, lossless=lossless))
        taken = min(count, self.left)
        self.left -= taken
        return list(self._host.take(shape, taken, older_than, lossless=lossless))

    async def room(self, timeout: float) -> bool:
        await asyncio.sleep(timeout)
        return True


def _line(world: PromoterWorld) -> list[tuple[int, float]]:
    """Return the jobs in line, by the bytes that they have left, and their slack."""
    return [(job.left // BLOCK, job.slack) for job in world.promoter._queue.jobs()]


def test_jobs_without_room_keep_their_places_and_their_slack() -> None:
    async def story() -> tuple[list[tuple[int, float]], list[tuple[int, float]], list[int]]:
        world = PromoterWorld(1e6, BLOCK)
        full = _Full(world.promoter)
        chains = [world.chain(n) for n in (4, 2, 3, 9)]
        waiters = [RunOf(chain) for chain in chains]
        # The first two were told that nobody comes before them, the third that a block may.
        for chain, waiter, slack in zip(chains, waiters, (0, 0, BLOCK, 20 * BLOCK), strict=True):
            world.promoter.request(chain, waiter, 0, slack=slack)
        before = _line(world)
        world.promoter.start()
        await asyncio.sleep(1)
        after = _line(world)
        # Room comes a block at a time.
        order: list[int] = []
        while not all(waiter.done.done() for waiter in waiters):
            full.left = 1
            await asyncio.sleep(0.1)
            order += [i for i, w in enumerate(waiters) if w.done.done() and i not in order]
        await world.promoter.stop()
        return before, after, order

    before, after, order = run_in_virtual_time(story())
    assert after == before
    assert [left for left, _ in before] == [4, 2, 3, 9]
    assert order == [0, 1, 2, 3]


def test_a_block_that_two_wait_for_stands_once_with_each_however_long_there_is_no_room() -> None:
    async def story() -> tuple[list[list[Block]], list[list[Block]]]:
        world = PromoterWorld(1e6, BLOCK)
        _Full(world.promoter)
        chain = world.chain(6)
        world.ask(chain[3:])
        world.ask(chain)
        stood = [[move.block for move in job.items] for job in world.promoter._queue.jobs()]
        world.promoter.start()
        await asyncio.sleep(10)
        stand = [[move.block for move in job.items] for job in world.promoter._queue.jobs()]
        await world.promoter.stop()
        return stood, stand

    stood, stand = run_in_virtual_time(story())
    assert [len(items) for items in stood] == [3, 6]
    assert stand == stood


class _Holder(RunOf):
    holding = True


async def _lease(world: PromoterWorld) -> float:
    """Ask for 20 blocks as a lease does that can spare nothing; return how long they took."""
    chain = world.chain(20)
    lease = _Holder(chain)
    world.promoter.request(chain, lease, slack=0)
    took = await asyncio.wait_for(lease.done, 60)
    await world.promoter.stop()
    return took


@pytest.mark.parametrize("priority", [0, -5])
@pytest.mark.parametrize("hinted", [4, 40])
def test_who_may_push_others_out_does_not_wait_for_who_may_not(hinted: int, priority: int) -> None:
    """A hint in front, for what was used less recently than all that is in memory, kept a lease for ever."""

    async def story() -> float:
        world = PromoterWorld(1e9, 2 * MIB)
        world.promoter.start()
        await world.measured()
        _Full(world.promoter).for_holders = True
        world.ask(world.chain(hinted), priority)
        await asyncio.sleep(0.123)
        return await _lease(world)

    assert run_in_virtual_time(story()) == pytest.approx(20 * 2 * MIB / 1e9, rel=0.01)


def test_hints_of_several_shapes_without_room_keep_nobody_waiting() -> None:
    async def story() -> float:
        world = PromoterWorld(1e9, 2 * MIB)
        world.promoter.start()
        await world.measured()
        _Full(world.promoter).for_holders = True
        shapes = [world.space]
        for shards in (2, 3, 4):
            size = (MIB,) * shards
            spec = SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=size)
            shapes.append(SpaceIndex(spec.fingerprint, spec, 1))
        for space in shapes[1:]:
            world.space = space
            world.ask(world.chain(4))
        world.space = shapes[0]
        await asyncio.sleep(0.123)
        return await _lease(world)

    assert run_in_virtual_time(story()) == pytest.approx(20 * 2 * MIB / 1e9, rel=0.01)
