"""Order between compute, loads and stores, on a GPU that runs everything as late as it may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pytest
from fake_cuda import COMPUTE, FakeCuda, FakeMover
from numpy.typing import NDArray

from kvstore.attach.mapped import DEVICE, PAGEABLE, PINNED
from kvstore.connectors.vllm.copier import SlotRun
from kvstore.connectors.vllm.cuda import pipe
from kvstore.connectors.vllm.cuda.copier import CudaCopier
from kvstore.connectors.vllm.cuda.routes import Route, route_of
from kvstore.connectors.vllm.geometry import Geometry
from kvstore.cudart import CudaError
from kvstore.errors import AttachmentLost

BOOT = b"boot"
GROUP_BLOCKS = 4
SLOTS = 12
# Slots that are pinned at a time.
TOGETHER = 3
BLOCKS = 40
# One contiguous piece of 512 KiB; four pieces and large slots; four pieces and small slots.
SHAPES = {Route.DMA: (1, 1 << 19), Route.RING: (4, 1 << 15), Route.KERNEL: (4, 1 << 10)}


@dataclass
class World:
    """A KV cache, slots, and who may read them."""

    route: Route
    seed: int
    reach: int = PINNED
    boot_id: bytes = BOOT
    alive: bool = True
    found_late: bool = False
    waits: int = 0
    users: int = 0
    inbound_blocks: int = 1 << 20
    room: int = 1 << 40

    def __post_init__(self) -> None:
        segments, length = SHAPES[self.route]
        self.cache = np.zeros((segments, BLOCKS, length), np.uint8)
        one = np.ones(segments, np.uint64)
        self.geometry = Geometry(
            bases=np.uint64(self.cache.ctypes.data)
            + np.arange(segments, dtype=np.uint64) * np.uint64(BLOCKS * length),
            strides=one * np.uint64(length),
            lengths=one * np.uint64(length),
            offsets=np.arange(segments, dtype=np.uint64) * np.uint64(length),
            block_bytes=segments * length,
            blocks=BLOCKS,
            layout="test",
        )
        assert route_of(self.geometry, GROUP_BLOCKS) is self.route
        self.memory = np.zeros((SLOTS, GROUP_BLOCKS * self.geometry.block_bytes), np.uint8)
        self.generations = np.zeros(SLOTS, np.uint64)
        self.pieces: list[int] = []
        self.cuda = FakeCuda(self.seed, room=self.room)
        self.cuda.batch = self.batch
        self.copier = CudaCopier(
            self.cuda,
            lambda rows: FakeMover(self.cuda, self.geometry, rows),
            self.geometry,
            self,  # type: ignore[arg-type]
            0,
            GROUP_BLOCKS,
            device_number=0,
            multiprocessors=2,
            chunk_bytes=3 * self.geometry.block_bytes,
            bounce_chunk_bytes=2 * self.geometry.block_bytes,
            inbound_bytes=self.inbound_blocks * self.geometry.block_bytes,
        )

    def batch(self, *columns: NDArray[np.uint64]) -> None:
        """See that no piece of DMA crosses from one range of pinned memory to another."""
        begin, range_bytes = self.memory.ctypes.data, TOGETHER * self.memory.shape[1]
        for address, other, length in zip(*(c.tolist() for c in columns), strict=True):
            self.pieces.append(length)
            for at in (address, other):
                if begin <= at < begin + self.memory.nbytes:
                    assert (at - begin) // range_bytes == (at + length - 1 - begin) // range_bytes

    def slots(self, *indices: int) -> Any:
        kind = [("group", "<u4"), ("index", "<u4"), ("generation", "<u8")]
        return np.array([(1, i, self.generations[i]) for i in indices], kind)

    def using(self, slots: Any, *, boot_id: bytes, writer_id: int = 0) -> Held:
        if boot_id != self.boot_id:
            raise AttachmentLost("another run")
        self.users += 1
        return Held(self, slots)

    def wait_run(self, boot_id: bytes, timeout_s: float) -> bool:
        self.waits += 1
        if self.found_late:
            self.boot_id, self.alive = boot_id, True
        return self.alive and self.boot_id == boot_id

    def compute(self, blocks: list[int], value: int) -> None:
        """A step that fills blocks; each gets bytes of its own."""

        def kernel() -> None:
            for block in blocks:
                self.cache[:, block] = pattern(value, block)

        self.cuda.launch(COMPUTE, kernel)

    def seen(self, blocks: list[int]) -> list[NDArray[np.uint8]]:
        """A step that reads blocks; filled in when it runs."""
        into: list[NDArray[np.uint8]] = []
        self.cuda.launch(
            COMPUTE, lambda: into.extend(self.cache[:, block].copy() for block in blocks)
        )
        return into

    def fill(self, slot: int, value: int) -> None:
        for i, row in enumerate(self.memory[slot].reshape(GROUP_BLOCKS, -1)):
            row[:] = pattern(value, i)

    def store(self, blocks: list[int], *slots: int) -> Result:
        result = Result()
        run = SlotRun(self.slots(*slots), BOOT, 7)
        table = np.array(blocks, np.int32).reshape(-1, GROUP_BLOCKS)
        self.copier.store(table, run, result.take)
        return result

    def load(self, blocks: list[int], *slots: int, skip: int = 0, **options: Any) -> Result:
        result = Result()
        run = SlotRun(self.slots(*slots), BOOT)
        result.early = self.copier.load(
            np.array(blocks, np.int32), run, skip, result.take, result.land, **options
        )
        return result

    def close(self) -> None:
        self.copier.close()
        self.cuda.drain()
        assert not self.users
        assert not self.cuda.memory
        assert set(self.cuda.events) == self.cuda.destroyed


class Held:
    def __init__(self, world: World, slots: Any) -> None:
        self.world, self.named = world, slots

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *what: object) -> None:
        self.done()

    def done(self) -> None:
        self.world.users -= 1

    def places(self, shard: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        memory = self.world.memory
        base, stride = np.uint64(memory.ctypes.data), np.uint64(memory.shape[1])
        addresses = base + self.named["index"].astype(np.uint64) * stride
        return addresses, np.full(len(addresses), self.world.reach, np.uint8)

    def stretches(self, shard: int) -> NDArray[np.int64]:
        together: NDArray[np.int64] = self.named["index"].astype(np.int64) // TOGETHER
        return together

    def current(self, shard: int) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = (
            self.world.generations[self.named["index"]] == self.named["generation"]
        )
        return same


@dataclass
class Result:
    said: list[Any] = field(default_factory=list)
    landed: list[bool] = field(default_factory=list)
    early: bool = False
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, what: Any) -> None:
        self.said.append(what)
        if not self.early:
            self.over.set()

    def land(self, right: bool) -> None:
        self.landed.append(right)
        self.over.set()

    def wait(self) -> Any:
        assert self.over.wait(60)
        (what,) = self.said
        return what


def pattern(value: int, salt: int) -> int:
    return (31 * value + 7 * salt) % 251 + 1


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def one(route: Route, seed: int = 0, **options: Any) -> World:
        worlds.append(World(route, seed, **options))
        return worlds[-1]

    yield one
    for world in worlds:
        world.close()


@pytest.fixture(autouse=True)
def small_first_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "_FIRST_CHUNK_BYTES", 1)
    monkeypatch.setattr(pipe, "_FIRST_BATCH", 2)


ways = pytest.mark.parametrize("route", list(Route))
reaches = pytest.mark.parametrize("reach", [PINNED, PAGEABLE])


@ways
@reaches
def test_a_store_takes_what_the_compute_stream_has_written_by_then(
    make: Make, route: Route, reach: int
) -> None:
    world = make(route, reach=reach)
    blocks = [3, 4, 5, 6, 30, 2, 9, 1]
    world.compute(blocks, 1)
    first = world.store(blocks, 5, 6)
    # The next step's blocks are others; it must not matter that it is queued already.
    world.compute([20, 21], 2)
    assert first.wait() is True
    for i, block in enumerate(blocks):
        row = world.memory[5 + i // 4].reshape(GROUP_BLOCKS, -1)[i % 4]
        assert (row == pattern(1, block)).all()


@ways
@reaches
@pytest.mark.parametrize("seed", range(6))
def test_blocks_with_new_owners_are_written_only_when_stores_have_read_them(
    make: Make, route: Route, reach: int, seed: int
) -> None:
    world = make(route, seed, reach=reach)
    blocks = list(range(8, 32))
    world.compute(blocks, 1)
    stores = [world.store(blocks[at : at + 8], at // 4, at // 4 + 1) for at in (0, 8, 16)]
    world.fill(10, 9)
    # Half of the blocks go to a new request, half are loaded into; nobody waits in between.
    world.copier.reuse(np.array([8, 9, 10, 11, 24, 25, 26, 27], np.int32))
    world.compute([8, 9, 10, 11], 2)
    loaded = world.load([24, 25, 26, 27], 10)
    world.copier.reuse(None)
    world.compute([16, 17], 3)
    for store in stores:
        assert store.wait() is True
    assert loaded.wait().all()
    for i, block in enumerate(blocks):
        row = world.memory[i // 4].reshape(GROUP_BLOCKS, -1)[i % 4]
        assert (row == pattern(1, block)).all(), block
    for i, block in enumerate([24, 25, 26, 27]):
        assert (world.cache[:, block] == pattern(9, i)).all()


@ways
@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_several_stores_read_are_written_when_all_have_read_them(
    make: Make, route: Route, seed: int
) -> None:
    world = make(route, seed)
    world.compute([1, 2, 3, 4], 1)
    world.reach = PAGEABLE
    slow = world.store([1, 2, 3, 4], 0)
    world.reach = PINNED
    fast = [world.store([1, 2, 3, 4], slot) for slot in (1, 2)]
    world.copier.reuse(np.array([3], np.int32))
    world.compute([1, 2, 3, 4], 2)
    for slot, store in enumerate([slow, *fast]):
        assert store.wait() is True
        for i, row in enumerate(world.memory[slot].reshape(GROUP_BLOCKS, -1)):
            assert (row == pattern(1, i + 1)).all(), (slot, i)


@ways
@pytest.mark.parametrize("reach", [PINNED, PAGEABLE, DEVICE])
@pytest.mark.parametrize("seed", range(4))
def test_a_load_comes_after_steps_under_way_and_before_those_that_use_it(
    make: Make, route: Route, reach: int, seed: int
) -> None:
    world = make(route, seed, reach=reach)
    for slot in range(4):
        world.fill(slot, slot)
    # A step of the blocks' last owner is still to run.
    world.compute(list(range(20)), 77)
    blocks = [12, 0, 19, 7, 3, 5, 6, 11, 15, 2]
    result = world.load(blocks, 0, 1, 2, skip=1)
    assert result.wait().all()
    found = world.seen(blocks)
    world.cuda.drain()
    for i, got in enumerate(found):
        slot, inside = divmod(i + 1, GROUP_BLOCKS)
        assert (got == pattern(slot, inside)).all(), i
    assert result.early == (reach == DEVICE)


@pytest.mark.parametrize("seed", range(4))
def test_slots_that_lie_together_go_at_once_and_small_ones_apart_by_kernel(
    make: Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(Route.RING, seed)
    block = world.geometry.block_bytes
    blocks = np.random.default_rng(seed).permutation(BLOCKS)[:24].tolist()
    world.compute(blocks, 1)
    together = world.store(blocks[:12], 4, 5, 6)
    assert sum(world.pieces) == 12 * block
    # Chunks of 1, 2, 3, 3, 3 blocks, and a range that ends behind the eighth.
    assert [length // block for length in world.pieces] == [1, 2, 3, 2, 1, 3]
    world.pieces.clear()
    with monkeypatch.context() as patch:
        patch.setattr(pipe, "LEAST_DMA_BYTES", 1 << 30)
        apart = world.store(blocks[12:], 9, 0, 7)
        assert not world.pieces
        assert together.wait() is True
        assert apart.wait() is True
        world.compute(blocks, 2)
        loads = [world.load(blocks[12:], 9, 0, 7)]
    loads.append(world.load(blocks[:12], 4, 5, 6))
    assert all(load.wait().all() for load in loads)
    for block in blocks:
        assert (world.cache[:, block] == pattern(1, block)).all()


@ways
@pytest.mark.parametrize("seed", range(4))
def test_an_early_load_is_there_for_the_next_step_though_nobody_has_waited(
    make: Make, route: Route, seed: int
) -> None:
    world = make(route, seed)
    world.fill(3, 5)
    world.compute([1, 2, 3, 4], 77)
    result = world.load([4, 3, 2, 1], 3, idle=True)
    assert result.early
    assert result.said[0].all()
    found = world.seen([4, 3, 2, 1])
    world.copier.settle()
    assert result.landed == [True]
    world.cuda.drain()
    assert all((got == pattern(5, i)).all() for i, got in enumerate(found))


def test_a_busy_engine_waits_for_host_slots_but_not_for_slots_on_its_gpu(make: Make) -> None:
    host, device = make(Route.RING), make(Route.RING, reach=DEVICE)
    assert not host.load([1, 2, 3, 4], 0).early
    assert device.load([1, 2, 3, 4], 0).early
    unpinned = make(Route.RING, reach=PAGEABLE)
    assert not unpinned.load([1, 2, 3, 4], 0, idle=True).early


@ways
@pytest.mark.parametrize("seed", range(3))
def test_loads_beyond_what_the_gpu_takes_are_submitted_as_others_end(
    make: Make, route: Route, seed: int
) -> None:
    world = make(route, seed, inbound_blocks=6)
    for slot in range(8):
        world.fill(slot, slot)
    blocks = np.random.default_rng(seed).permutation(32).reshape(8, 4).tolist()
    world.compute(list(range(32)), 77)
    results = [world.load(blocks[i], i, idle=True) for i in range(8)]
    # One alone may be early; which others are depends on how far the threads are.
    assert results[0].early
    world.copier.settle()
    for i, result in enumerate(results):
        assert result.wait().all()
        for j, block in enumerate(blocks[i]):
            assert (world.cache[:, block] == pattern(i, j)).all()


def test_a_load_within_the_gpu_does_not_wait_for_the_bus(make: Make) -> None:
    world = make(Route.RING)
    world.fill(0, 3)
    world.fill(1, 4)
    slow = world.load([1, 2, 3, 4], 0)
    world.reach = DEVICE
    near = world.load([5, 6, 7, 8], 1)
    assert near.early
    world.copier.settle()
    assert near.landed == [True]
    assert (world.cache[:, 5] == pattern(4, 0)).all()
    assert slow.wait().all()


@ways
def test_a_slot_taken_back_meanwhile_fails_its_blocks_alone(make: Make, route: Route) -> None:
    world = make(route)
    result = world.load([1, 2, 3, 4, 5, 6], 0, 1, skip=2)
    world.generations[1] += 1
    assert result.wait().tolist() == [True, True, False, False, False, False]


def test_an_early_load_whose_slot_is_taken_back_says_so_before_settling(make: Make) -> None:
    world = make(Route.RING)
    gone = world.load([1, 2, 3, 4], 0, idle=True)
    world.generations[0] += 1
    world.copier.settle()
    assert gone.landed == [False]
    # Taken back before everything was submitted, it is an ordinary failure.
    run = SlotRun(world.slots(1), BOOT)
    world.generations[1] += 1
    late = Result()
    late.early = world.copier.load(
        np.array([5, 6, 7, 8], np.int32), run, 0, late.take, late.land, idle=True
    )
    assert not late.early
    assert not late.wait().any()


def test_a_daemon_that_is_gone_fails_loads(make: Make) -> None:
    world = make(Route.RING)
    world.alive = False
    assert not world.load([1, 2, 3, 4], 0, idle=True).wait().any()
    world.boot_id = b"another"
    assert not world.load([1, 2, 3, 4], 0).wait().any()
    assert world.store([1, 2, 3, 4], 0).wait() is False


@ways
@reaches
def test_a_load_waits_for_a_restarted_daemon_while_the_engine_goes_on(
    make: Make, route: Route, reach: int
) -> None:
    """The scheduler found the new run first; blocks may still be written by an earlier step."""
    world = make(route, 3, reach=reach)
    for slot in range(2):
        world.fill(slot, slot)
    world.boot_id, world.alive, world.found_late = b"earlier", False, True
    blocks = list(range(8, 16))
    world.compute(blocks, 77)
    result = world.load(blocks, 0, 1, idle=True)
    assert result.early is False
    assert result.wait().all()
    assert world.waits == 1
    found = world.seen(blocks)
    world.cuda.drain()
    for i, got in enumerate(found):
        assert (got == pattern(*divmod(i, GROUP_BLOCKS))).all(), i


@ways
@reaches
@pytest.mark.parametrize("operations", [0, 1, 2, 5])
def test_a_copy_that_breaks_off_is_reported_when_nothing_of_it_is_under_way(
    make: Make, route: Route, reach: int, operations: int
) -> None:
    world = make(route, reach=reach)
    world.cuda.fail_after = operations
    blocks = list(range(24))
    store = world.store(blocks, *range(6))
    whole = store.wait()
    world.cuda.fail_after = -1
    # Whatever was submitted has run: its blocks may be used, its slots given back.
    world.copier.reuse(np.array(blocks, np.int32))
    world.cuda.fail_after = operations
    load = world.load(blocks, *range(6))
    right = load.wait()
    assert not world.users
    assert whole is True or not right.all() or operations == 5
    world.cuda.fail_after = -1
    world.compute(blocks, 4)
    assert world.store(blocks, *range(6)).wait() is True
    assert (world.memory[0].reshape(GROUP_BLOCKS, -1)[0] == pattern(4, 0)).all()


def test_a_gpu_with_little_memory_left_gets_a_smaller_ring(make: Make) -> None:
    one = 4 * SHAPES[Route.RING][1]
    world = make(Route.RING, room=3 * one)
    world.fill(0, 1)
    world.fill(1, 2)
    assert world.load(list(range(8)), 0, 1).wait().all()
    assert (world.cache[:, 7] == pattern(2, 3)).all()
    with pytest.raises(CudaError, match="out of memory"):
        make(Route.RING, room=3 * one - 1)


def test_stores_that_would_hold_up_the_engine_are_given_up_at_once(make: Make) -> None:
    world = make(Route.RING, reach=PAGEABLE)
    world.compute([1, 2, 3, 4], 1)
    world.copier._slow_bytes = 1 << 40  # many are on their way
    refused = world.store([1, 2, 3, 4], 0)
    assert refused.said == [False]
    assert not world.users
    world.copier._slow_bytes = 0
    assert world.store([1, 2, 3, 4], 0).wait() is True
    assert world.copier._slow_bytes == 0
    world.reach = PINNED
    world.copier._slow_bytes = 1 << 40
    assert world.store([1, 2, 3, 4], 1).wait() is True


def test_blocks_outside_the_cache_are_refused(make: Make) -> None:
    world = make(Route.RING)
    assert not world.load([1, 2, 3, BLOCKS], 0).wait().any()
    assert world.store([-1, 1, 2, 3], 0).wait() is False
