"""Jobs of all kinds in a pool that is mostly full: each is told about each block once, nothing is left."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import cast

import pytest
from promoter_world import PromoterWorld
from virtual_time import run_in_virtual_time

from kvstore.index import Block, SpaceIndex
from kvstore.miss import MissReason
from kvstore.prefetch.host_room import HostRoom
from kvstore.prefetch.move import MoveState
from kvstore.prefetch.promoter import Promoter
from kvstore.space import BlockShape, SpaceSpec
from kvstore.tiers.base import Outcome, Slot, Transfer
from kvstore.units import KIB

BLOCK = 16 * KIB


class _Pool:
    """A few slots for all, quotas that change their mind, and no promise that room comes."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.taken: set[Slot] = set()
        self.capacity = 24
        self._numbers = itertools.count()
        self._buffer = memoryview(bytearray(4 * BLOCK))

    def take(
        self, shape: BlockShape, count: int, older_than: int | None, *, lossless: bool
    ) -> list[Slot]:
        room = self.capacity - len(self.taken)
        count = min(count, room, self.chance.randrange(0, 5))
        slots = [Slot(0, next(self._numbers)) for _ in range(count)]
        self.taken.update(slots)
        return slots

    def free(self, slot: Slot) -> None:
        self.taken.remove(slot)

    def admit(
        self, space: SpaceIndex, count: int, older_than: int | None, *, lossless: bool
    ) -> int:
        return self.chance.randrange(0, count + 1)

    def views(self, slot: Slot) -> tuple[memoryview, ...]:
        return (self._buffer,)

    async def room(self, timeout: float) -> bool:
        await asyncio.sleep(timeout * self.chance.random())
        return True

    def may_come(self, shape: BlockShape, *, promoting: bool) -> bool:
        return self.chance.random() < 0.9


class _Waiter:
    """Wants some blocks; cancels more of them when it hears of some, as a lease does that is cut."""

    def __init__(self, storm: _Storm, blocks: Sequence[Block], *, holding: bool) -> None:
        self.storm = storm
        self.holding = holding
        self.wanted = dict.fromkeys(blocks)
        self.told: Counter[Block] = Counter()

    def landed(self, block: Block) -> None:
        self._hear(block)

    def failed(self, block: Block, reason: MissReason) -> None:
        self._hear(block)
        if self.holding:
            self.give_up(list(self.wanted))

    def _hear(self, block: Block) -> None:
        assert block in self.wanted, "told of what it does not wait for"
        self.told[block] += 1
        del self.wanted[block]

    def give_up(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.wanted.pop(block, None)
        self.storm.world.promoter.cancel(blocks, self)


class _Storm:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = PromoterWorld(3e6, BLOCK)
        self.pool = _Pool(self.chance)
        self.promoter: Promoter = self.world.promoter
        self.promoter._host = self.promoter._passed_over._host = cast("HostRoom", self.pool)
        self.world.index._free_host = self.pool.free
        spec = SpaceSpec(
            model="wide", dtype="bfloat16", block_tokens=16, shard_bytes=(BLOCK, BLOCK)
        )
        limited = SpaceIndex(spec.fingerprint, spec, 1)
        limited.host_quota = 8
        self.world.index.spaces[limited.id] = limited
        self.spaces = [self.world.space, limited]
        self.chains: list[list[Block]] = []
        self.waiters: list[_Waiter] = []
        device = self.world.device
        read = type(device).read

        async def unsteady(transfers: Sequence[Transfer]) -> list[Outcome]:
            outcomes = await read(device, transfers)
            odd = [Outcome.OK] * 9 + [self.chance.choice([Outcome.IO_ERROR, Outcome.CORRUPT])]
            return [self.chance.choice(odd) for _ in outcomes]

        device.__dict__["read"] = unsteady
        self.promoter._on_corrupt = self.lose

    def lose(self, block: Block) -> None:
        for gone in (*reversed(self.world.index.descendants([block])), block):
            self.world.index.discard(gone, "corrupt", next(iter(type(gone.fastest_tier))))

    def step(self) -> None:
        chance, world = self.chance, self.world
        what = chance.randrange(10)
        if what < 2 or not self.chains:
            world.space = self.spaces[chance.randrange(2)]
            self.chains.append(world.chain(chance.randrange(1, 20)))
        elif what < 6:
            chain = chance.choice(self.chains)
            cold = [b for b in chain if b.host is None and b.disk is not None and not b.dead]
            cold = cold[: chance.randrange(1, 20)]
            waiter = _Waiter(self, cold, holding=chance.random() < 0.5)
            self.waiters.append(waiter)
            now = asyncio.get_running_loop().time()
            self.promoter.request(
                cold,
                waiter,
                chance.choice([-3, 0, 0, 0, 2]),
                chance.choice([math.inf, math.inf, now + chance.random()]),
                chance.choice([math.inf, 0.0, 8 * BLOCK]),
            )
        elif what < 7 and self.waiters:
            waiter = chance.choice(self.waiters)
            waiter.give_up([b for b in waiter.wanted if chance.random() < 0.7])
        elif what < 8:
            chain = chance.choice(self.chains)
            if chance.random() < 0.2:
                self.lose(chance.choice([b for b in chain if not b.dead] or [chain[0]]))
        else:
            for chain in self.chains:
                for block in reversed(chain):
                    if block.host is not None and not block.host_refs and not block.dead:
                        world.index.drop_host(block)

    def check(self) -> None:
        """Every job has what is still to begin once, in order, and stands in line while it has any."""
        promoter = self.promoter
        standing = {id(job) for job in promoter._queue.jobs()}
        for job in promoter._jobs.values():
            moves = [m for m in promoter._moves.values() if job in m.jobs]
            assert job.moves == len(moves)
            size = sum(m.block.space.shape.block_bytes for m in moves)
            assert job.left == size
            queued = [m for m in moves if m.state is MoveState.QUEUED]
            items = [m for m in job.items if m.state is MoveState.QUEUED and job in m.jobs]
            assert len(items) == len(set(items)), "a block stands twice"
            assert set(items) == set(queued), "a block is in nobody's line"
            order = [m.block.sequence for m in items]
            assert order == sorted(order)
            assert not items or id(job) in standing, "a job has lost its place"
            assert len(job.items) <= 40
            assert job.slack >= 0
            assert sum(job.shared.values()) + job.brought >= 0
        assert promoter._bytes == sum(
            m.block.space.shape.block_bytes for m in promoter._moves.values()
        )
        for waiter in self.waiters:
            assert set(waiter.wanted) <= set(promoter._moves)


async def _story(seed: int) -> None:
    storm = _Storm(seed)
    storm.promoter.start()
    for _ in range(300):
        storm.step()
        storm.check()
        await asyncio.sleep(storm.chance.random() * 0.02)
        storm.check()
    storm.pool.capacity = 1 << 30
    async with asyncio.timeout(3600):
        while len(storm.promoter):
            await asyncio.sleep(0.1)
    storm.check()
    await storm.promoter.stop()
    assert all(max(w.told.values(), default=1) == 1 for w in storm.waiters)
    assert not any(w.wanted for w in storm.waiters)
    assert storm.promoter.jobs == storm.promoter.moving == storm.promoter.queued_bytes == 0
    assert storm.world.index.disk_held == storm.world.index.host_held == 0
    assert len(storm.promoter._queue) == 0
    assert all(space.host_arriving == 0 for space in storm.spaces)
    hosted = {b.host for chain in storm.chains for b in chain if b.host is not None}
    assert hosted == storm.pool.taken


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 201])
def test_storm(seed: int) -> None:
    run_in_virtual_time(_story(seed))
