"""Random stories of an engine on a GPU that runs everything as late as it may, and fails once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from cuda_failures import UNDER_WAY, Failing
from cuda_world import BLOCKS, GROUP_BLOCKS, SLOTS, Make, Result, World, pattern
from numpy.typing import NDArray

from kvstore.attach.mapped import DEVICE, PAGEABLE, PINNED
from kvstore.connectors.vllm.cuda.routes import Route
from kvstore.cudart import CudaError

SPOILED = 0xAA
# More calls than most stories make: some meet no failure.
CALLS = 400


@dataclass
class Copy:
    """A load, or a store, that has not been heard of yet.

    Attributes:
        values: what each block is to hold, or holds.
    """

    loads: bool
    blocks: list[int]
    slots: list[int]
    values: list[int]
    result: Result


class Story:
    """Knows what every block and slot must hold: a byte, as `pattern` makes them."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random = world, random.Random(seed)
        self.value = 0
        self.blocks = dict.fromkeys(range(BLOCKS), 0)
        self.slots = {slot: [0] * GROUP_BLOCKS for slot in range(SLOTS)}
        self.copies: list[Copy] = []
        # What steps have read of loads that were reported early.
        self.read: list[tuple[Copy, list[NDArray[np.uint8]]]] = []
        world.copier.reuse(None)
        self.write(list(range(BLOCKS)))

    def write(self, blocks: list[int]) -> None:
        """Have a step fill blocks."""
        self.value += 1
        self.world.compute(blocks, self.value)
        self.blocks.update((block, pattern(self.value, block)) for block in blocks)

    def hand_out(self, blocks: Sequence[int]) -> None:
        """As the hook does: the engine goes on whatever becomes of it."""
        with contextlib.suppress(CudaError):
            self.world.copier.reuse(np.array(blocks, np.int32))

    def free_blocks(self) -> list[int]:
        """Return blocks that no load fills; the engine owns them."""
        filled = {block for copy in self.copies if copy.loads for block in copy.blocks}
        return [block for block in range(BLOCKS) if block not in filled]

    def free_slots(self, *, to_write: bool) -> list[int]:
        """Return slots that nobody writes, nor reads if they are to be written."""
        taken = {s for copy in self.copies if to_write or not copy.loads for s in copy.slots}
        return [slot for slot in range(SLOTS) if slot not in taken]

    def compute(self) -> None:
        free = self.free_blocks()
        if free:
            blocks = self.random.sample(free, self.random.randint(1, len(free)))
            self.hand_out(blocks)
            self.write(blocks)

    def store(self) -> None:
        count = self.random.randint(1, 3)
        blocks, slots = self.free_blocks(), self.free_slots(to_write=True)
        if len(slots) >= count and len(blocks) >= count * GROUP_BLOCKS:
            self.world.reach = self.random.choice([PINNED, PINNED, PAGEABLE])
            blocks = self.random.sample(blocks, count * GROUP_BLOCKS)
            slots = self.random.sample(slots, count)
            values = [self.blocks[block] for block in blocks]
            self.copies.append(Copy(False, blocks, slots, values, self.world.store(blocks, *slots)))

    def load(self) -> None:
        count, skip = self.random.randint(1, 3), self.random.randrange(GROUP_BLOCKS)
        blocks, slots = self.free_blocks(), self.free_slots(to_write=False)
        wanted = count * GROUP_BLOCKS - skip
        if len(slots) >= count and len(blocks) >= wanted:
            self.world.reach = self.random.choice([PINNED, PINNED, PAGEABLE, DEVICE])
            blocks = self.random.sample(blocks, wanted)
            slots = self.random.sample(slots, count)
            self.hand_out(blocks)
            values = [value for slot in slots for value in self.slots[slot]][skip:]
            idle = self.random.random() < 0.5
            result = self.world.load(blocks, *slots, skip=skip, idle=idle)
            copy = Copy(True, blocks, slots, values, result)
            self.copies.append(copy)
            if result.early:
                self.read.append((copy, self.world.seen(blocks)))

    def map_or_not(self) -> None:
        mapped = self.world.mapped
        (mapped.clear if mapped.is_set() else mapped.set)()

    def hear(self) -> None:
        """Hear of a copy, and do at once what one may then."""
        if not self.copies:
            return
        self.world.mapped.set()
        copy = self.copies[self.random.randrange(len(self.copies))]
        said = copy.result.wait()
        if copy.result.early:
            self.world.copier.settle()
        self.copies.remove(copy)
        if copy.loads:
            right = said & (copy.result.landed != [False])
            self.blocks.update(zip(copy.blocks, copy.values, strict=True))
            failed = [b for b, good in zip(copy.blocks, right, strict=True) if not good]
            if failed:
                self.write(failed)
            return
        rows = np.array(copy.values).reshape(-1, GROUP_BLOCKS).tolist()
        for slot, values in zip(copy.slots, rows, strict=True):
            if not said:
                # It is somebody else's.
                self.world.memory[slot] = SPOILED
            self.slots[slot] = values if said else [SPOILED] * GROUP_BLOCKS
            self.check_slot(slot)

    def check_slot(self, slot: int) -> None:
        rows = self.world.memory[slot].reshape(GROUP_BLOCKS, -1)
        for row, value in zip(rows, self.slots[slot], strict=True):
            assert (row == value).all(), slot

    def tell(self) -> None:
        steps = [self.store, self.store, self.load, self.load, self.compute, self.hear]
        for _ in range(self.random.randint(5, 40)):
            self.random.choice([*steps, self.map_or_not])()
        while self.copies:
            self.hear()
        self.world.copier.settle()

    def check(self) -> None:
        self.world.cuda.drain()
        for block, value in self.blocks.items():
            assert (self.world.cache[:, block] == value).all(), block
        for slot in self.slots:
            self.check_slot(slot)
        for copy, found in self.read:
            for got, value in zip(found, copy.values, strict=True):
                assert copy.result.landed == [False] or (got == value).all()


@pytest.mark.parametrize("route", list(Route))
@pytest.mark.parametrize("inbound_blocks", [4, 1 << 20])
def test_what_is_told_is_so_and_what_is_over_is_over(
    make: Make, route: Route, inbound_blocks: int
) -> None:
    world = make(route, inbound_blocks=inbound_blocks)
    failing = Failing(world.cuda, UNDER_WAY)
    for seed in range(12):
        world.memory[:] = 0
        story = Story(world, seed)
        failing.arm(story.random.randrange(CALLS))
        story.tell()
        failing.disarm()
        story.check()
        assert not world.users
