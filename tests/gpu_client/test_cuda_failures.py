"""Every single call of the CUDA runtime fails once; whatever was told then must be so."""

from __future__ import annotations

import contextlib
import itertools
import threading

import numpy as np
import pytest
from cuda_failures import GIVEN_BACK, MADE, UNDER_WAY, Failing
from cuda_world import GROUP_BLOCKS, Make, Result, World, pattern
from fake_cuda import COMPUTE, FakeCuda

from kvstore.attach.mapped import DEVICE, PAGEABLE, PINNED
from kvstore.connectors.vllm.copier import Lane
from kvstore.connectors.vllm.cuda.routes import Route
from kvstore.cudart import CudaError

SPOILED = 0xAA
STORES, LOADS = 4, 5


class Story:
    """Copies of every kind, and what was said about them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stored: list[tuple[list[int], list[int], Result]] = []
        self.loaded: list[tuple[list[int], int, Result]] = []
        world.compute(list(range(40)), 1)
        for slot in range(6, 11):
            world.fill(slot, slot)

    def lanes(self) -> list[Lane]:
        copier = self.world.copier
        mine = [copier._loads, copier._near_loads, copier._slow_loads, copier._late_loads]
        return [*mine, copier._stores, *copier._detour.lanes.values()]

    def settle_in(self) -> None:
        """Wait until every thread has begun."""
        for lane in self.lanes():
            begun = threading.Event()
            lane.submit(begun.set)
            assert begun.wait(60)

    def store(self, at: int, *slots: int, reach: int = PINNED) -> None:
        blocks = list(range(at, at + GROUP_BLOCKS * len(slots)))
        self.world.reach = reach
        self.stored.append((blocks, list(slots), self.world.store(blocks, *slots)))

    def load(self, at: int, slot: int, reach: int = PINNED, *, idle: bool = False) -> None:
        blocks = list(range(at, at + GROUP_BLOCKS))
        self.world.reach = reach
        self.loaded.append((blocks, slot, self.world.load(blocks, slot, idle=idle)))

    def hand_out(self, blocks: list[int]) -> None:
        """The engine goes on whatever becomes of the hook, and writes to them."""
        with contextlib.suppress(CudaError):
            self.world.copier.reuse(np.array(blocks, np.int32))
        self.world.compute(blocks, 2)

    def tell(self) -> None:
        world = self.world
        self.store(0, 0)
        self.store(4, 1, reach=PAGEABLE)
        self.load(20, 6, idle=True)
        self.load(24, 7)
        self.load(28, 8, DEVICE)
        self.load(32, 9, PAGEABLE)
        self.hand_out([0, 1, 4, 5])
        world.mapped.clear()
        self.load(36, 10)
        self.store(8, 2)
        world.mapped.set()
        self.store(12, 3, 4)

    def end(self) -> tuple[int, int]:
        """Wait until all was said; do at once what one may then. Return how many went well."""
        world, stored, loaded = self.world, 0, 0
        for _, slots, store in self.stored:
            if store.wait():
                stored += 1
            else:
                world.memory[slots] = SPOILED
        world.copier.settle()
        for blocks, _, load in self.loaded:
            right = load.wait() if load.landed != [False] else np.zeros(len(blocks), np.bool_)
            loaded += bool(right.all())
            self.world.compute(
                [block for block, good in zip(blocks, right, strict=True) if not good], 3
            )
        return stored, loaded

    def check(self) -> None:
        world = self.world
        world.cuda.drain()
        for blocks, slots, store in self.stored:
            rows = world.memory[slots].reshape(len(blocks), -1)
            for row, block in zip(rows, blocks, strict=True):
                assert (row == (pattern(1, block) if store.wait() else SPOILED)).all(), block
        for blocks, slot, load in self.loaded:
            for i, block in enumerate(blocks):
                good = load.landed != [False] and load.wait()[i]
                wanted = pattern(slot, i) if good else pattern(3, block)
                assert (world.cache[:, block] == wanted).all(), (block, good)
        for block in (0, 1, 4, 5):
            assert (world.cache[:, block] == pattern(2, block)).all()


@pytest.mark.parametrize("route", list(Route))
def test_a_call_that_fails_costs_the_copies_that_need_it_and_nothing_else(
    make: Make, route: Route
) -> None:
    world = make(route)
    failing = Failing(world.cuda, UNDER_WAY)
    for nth in itertools.count():
        story = Story(world)
        story.settle_in()
        failing.arm(nth)
        story.tell()
        stored, loaded = story.end()
        failed = failing.disarm()
        story.check()
        assert not world.users
        # The slow store may have been given up, too.
        assert stored >= STORES - 1 - bool(failed)
        assert loaded >= LOADS - bool(failed)
        if not failed:
            break


@pytest.mark.parametrize("route", list(Route))
def test_a_copier_that_cannot_be_made_leaves_nothing(route: Route) -> None:
    threads = threading.active_count()
    # Events are many, and all alike.
    for nth in itertools.chain(range(32), range(32, 1000, 23)):
        cuda = FakeCuda()
        failing = Failing(cuda, MADE)
        failing.arm(nth)
        try:
            world = World(route, 0, gpu=cuda)
        except CudaError:
            assert not cuda.memory
            assert list(cuda.streams) == [COMPUTE]
            assert set(cuda.events) == cuda.destroyed
            assert threading.active_count() == threads
        else:
            # A ring that does not fit is made smaller.
            world.close()
            if not failing.disarm():
                break


@pytest.mark.parametrize("route", list(Route))
def test_what_cannot_be_given_back_keeps_nothing_else(route: Route) -> None:
    threads = threading.active_count()
    for nth in itertools.chain(range(64), range(64, 1000, 23)):
        cuda = FakeCuda()
        world = World(route, 0, gpu=cuda)
        world.reach = PAGEABLE
        assert world.load([1, 2, 3, 4], 0).wait().all()
        failing = Failing(cuda, GIVEN_BACK)
        failing.arm(nth)
        with contextlib.suppress(CudaError):
            world.copier.close()
        failed = failing.disarm()
        left = len(cuda.memory) + len(cuda.streams) - 1 + len(set(cuda.events) - cuda.destroyed)
        assert left == (failed not in ("", "stream_synchronize")), failed
        assert threading.active_count() == threads
        if not failed:
            break
