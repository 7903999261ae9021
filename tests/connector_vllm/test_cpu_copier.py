"""Stores on a CPU whose slab is not there yet: the engine does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.connectors.vllm.copier import CpuCopier, SlotRun
from kvstore.connectors.vllm.geometry import Geometry
from kvstore.errors import AttachmentLost

BOOT, BLOCKS, SLOTS, LENGTH = b"boot", 8, 6, 4096
Until = Callable[..., None]


@dataclass
class World:
    """A KV cache of one piece a block, slots of one block each, and who may use them.

    Slots below `late` lie in a slab that is not announced before `announced` is set.
    """

    late: int = 1
    alive: bool = True
    boot_id: bytes = BOOT
    announced: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    patience: float = 60.0

    def __post_init__(self) -> None:
        self.entered.set()
        self.cache = np.zeros((BLOCKS, LENGTH), np.uint8)
        self.memory = np.zeros((SLOTS, LENGTH), np.uint8)
        self.results: list[bool] = []
        one = np.ones(1, np.uint64)
        geometry = Geometry(
            bases=one * np.uint64(self.cache.ctypes.data),
            strides=one * np.uint64(LENGTH),
            lengths=one * np.uint64(LENGTH),
            offsets=np.zeros(1, np.uint64),
            block_bytes=LENGTH,
            blocks=BLOCKS,
            layout="test",
        )
        self.copier = CpuCopier(geometry, self, 0, 1)  # type: ignore[arg-type]

    def using(self, slots: Any, *, boot_id: bytes, writer_id: int = 0) -> Held:
        assert self.entered.wait(60)
        return Held(self, slots["index"])

    def store(self, block: int, slot: int) -> None:
        kind = [("group", "<u4"), ("index", "<u4"), ("generation", "<u8")]
        run = SlotRun(np.array([(1, slot, 0)], kind), BOOT, 7)
        self.copier.store(np.array([[block]], np.int32), run, self.results.append)

    def reuse(self, *blocks: int) -> None:
        """New owners write to blocks, as soon as the engine may go on."""

        def engine() -> None:
            self.copier.reuse(np.array(blocks, np.int32))
            self.cache[list(blocks)] = 99

        thread = threading.Thread(target=engine, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


@dataclass
class Held:
    world: World
    index: NDArray[np.uint32]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *what: object) -> None:
        pass

    def map(self, shard: int, timeout_s: float) -> None:
        if (self.index >= self.world.late).all():
            return
        # What is short is over at once, and what is long takes as long as the test.
        if not self.world.announced.wait(0 if timeout_s < 0.5 else self.world.patience):
            raise AttachmentLost("slab group 1 was never announced")

    def addresses(self, shard: int) -> NDArray[np.uint64]:
        base = np.uint64(self.world.memory.ctypes.data)
        return base + self.index.astype(np.uint64) * np.uint64(LENGTH)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.cache[:] = np.arange(1, BLOCKS + 1, dtype=np.uint8)[:, None]
    yield world
    world.announced.set()
    world.copier.close()


def test_stores_behind_one_that_waits_for_its_slab_are_given_up_where_blocks_are_needed(
    world: World, until: Until
) -> None:
    world.store(0, 0)
    for block in (1, 2, 3):
        world.store(block, block)
    world.reuse(1, 3)
    world.announced.set()
    until(lambda: len(world.results) == 4)
    assert world.results == [True, False, True, False]
    assert world.memory[:4, 0].tolist() == [1, 0, 3, 0]


def test_an_engine_that_waits_already_goes_on_when_a_store_gets_stuck(
    world: World, until: Until
) -> None:
    world.entered.clear()
    world.store(0, 0)
    world.store(1, 1)
    waiting = threading.Thread(target=world.reuse, args=(0, 1))
    waiting.start()
    until(lambda: len(world.copier._needed) == 2)
    assert not world.results
    world.entered.set()
    waiting.join(60)
    assert not waiting.is_alive()
    world.announced.set()
    until(lambda: len(world.results) == 2)
    assert world.results == [False, False]
    assert not world.memory.any()


def test_no_store_of_a_block_reads_what_its_new_owner_has_written(
    world: World, until: Until
) -> None:
    """A block may be on its way to several slots: the daemon restarted."""
    world.store(0, 0)
    for slot in (1, 2, 3):
        world.store(5, slot)
    world.reuse(5)
    world.announced.set()
    until(lambda: len(world.results) == 4)
    assert world.results == [True, False, False, False]
    assert world.memory[:4, 0].tolist() == [1, 0, 0, 0]
    # What is stored from here on is not affected.
    world.store(5, 4)
    world.reuse(5)
    until(lambda: len(world.results) == 5)
    assert world.results[-1]
    assert (world.memory[4] == 99).all()


def test_a_slab_that_is_never_announced_fails_its_store(world: World, until: Until) -> None:
    world.patience = 0.0
    world.store(0, 0)
    world.store(1, 1)
    until(lambda: len(world.results) == 2)
    assert world.results == [False, True]
