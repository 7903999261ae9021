"""Order between compute, loads and stores, on a GPU that runs everything as late as it may."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from cuda_world import BLOCKS, BOOT, GROUP_BLOCKS, SHAPES, Make, Result, failing_once, pattern
from fake_cuda import COMPUTE
from numpy.typing import NDArray

from kvstore.attach.mapped import DEVICE, PAGEABLE, PINNED
from kvstore.connectors.vllm.copier import SlotRun
from kvstore.connectors.vllm.cuda import pipe
from kvstore.connectors.vllm.cuda.routes import Route
from kvstore.cudart import CudaError

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
    whole = [store.wait() for store in stores]
    # One that the CPU must help with is given up rather than waited for.
    assert all(whole) or reach == PAGEABLE
    assert loaded.wait().all()
    for i, block in enumerate(blocks):
        row = world.memory[i // 4].reshape(GROUP_BLOCKS, -1)[i % 4]
        assert not whole[i // 8] or (row == pattern(1, block)).all(), block
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
    assert all(store.wait() for store in fast)
    for slot, store in enumerate([slow, *fast]):
        if not store.wait():
            continue  # the slow one was given up
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
    world.copier._detour.stored_bytes = 1 << 40  # many are on their way
    refused = world.store([1, 2, 3, 4], 0)
    assert refused.wait() is False
    assert not world.users
    world.copier._detour.stored_bytes = 0
    assert world.store([1, 2, 3, 4], 0).wait() is True
    assert world.copier._detour.stored_bytes == 0
    world.reach = PINNED
    world.copier._detour.stored_bytes = 1 << 40
    assert world.store([1, 2, 3, 4], 1).wait() is True


def test_a_slow_store_is_given_up_when_its_blocks_get_new_owners(make: Make) -> None:
    """Nor does the engine wait for the one before it, whose blocks nobody wants."""
    world = make(Route.RING, reach=PAGEABLE)
    world.compute([1, 2, 3, 4], 1)
    free = threading.Event()

    def hold_up() -> None:
        assert free.wait(60)

    world.copier._detour.lanes[False].submit(hold_up)
    store = world.store([1, 2, 3, 4], 0)
    reused = threading.Thread(target=world.copier.reuse, args=(np.array([3], np.int32),))
    reused.start()
    reused.join(60)
    assert not reused.is_alive()
    free.set()
    assert store.wait() is False
    assert not world.memory.any()
    # Those who come after are not affected.
    assert world.store([1, 2, 3, 4], 0).wait() is True
    assert (world.memory[0].reshape(GROUP_BLOCKS, -1)[2] == pattern(1, 3)).all()


@pytest.mark.parametrize("route", [Route.RING, Route.KERNEL])
def test_many_loads_behind_a_long_step_are_submitted_without_waiting_for_it(
    make: Make, route: Route
) -> None:
    """What kernels work from has so many places; they are free again when the step is over."""
    world = make(route)
    world.fill(0, 1)
    engine, over = threading.get_ident(), threading.Event()
    synchronize = world.cuda.event_synchronize

    def wait(event: int) -> None:
        assert threading.get_ident() != engine
        assert over.wait(60)
        synchronize(event)

    world.cuda.event_synchronize = wait  # type: ignore[method-assign]
    loads = [world.load([4, 5, 6, 7], 0) for _ in range(80)]
    over.set()
    assert all(load.wait().all() for load in loads)
    assert (world.cache[:, 6] == pattern(1, 2)).all()


def test_a_slow_store_has_not_begun_before_its_step_is_over(make: Make) -> None:
    """Who prepares the next step, and hands its blocks out, would wait for that one to end."""
    world = make(Route.RING, reach=PAGEABLE)
    waited_for, over = threading.Event(), threading.Event()

    def step() -> None:
        waited_for.set()
        assert over.wait(60)

    world.cuda.launch(COMPUTE, step)
    store = world.store([1, 2, 3, 4], 0)
    assert waited_for.wait(60)
    reused = threading.Thread(target=world.copier.reuse, args=(np.array([3], np.int32),))
    reused.start()
    reused.join(20)
    try:
        assert not reused.is_alive()
    finally:
        over.set()
    assert store.wait() is False
    assert not world.memory.any()


def test_a_slow_store_under_way_is_given_up_between_two_chunks(make: Make) -> None:
    """The engine waits until nothing reads its blocks, and for no more."""
    world = make(Route.RING, reach=PAGEABLE)
    blocks = list(range(24))
    world.compute(blocks, 1)
    begun, batches = threading.Event(), list[int]()

    def held_up(*columns: NDArray[np.uint64]) -> None:
        batches.append(len(columns[0]))
        begun.set()
        [flight] = world.copier._readers.find(None).values()
        while not flight.given_up:
            time.sleep(0.001)

    world.cuda.batch = held_up
    store = world.store(blocks, *range(6))
    assert begun.wait(60)
    world.copier.reuse(np.array([3], np.int32))
    world.compute(blocks, 2)
    assert store.wait() is False
    assert len(batches) == 1
    world.cuda.batch = lambda *_: None
    assert world.store(blocks, *range(6)).wait() is True
    assert (world.memory[0].reshape(GROUP_BLOCKS, -1)[0] == pattern(2, 0)).all()


def test_a_broken_copy_by_the_cpu_has_ended_when_it_says_so(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots may be somebody else's right afterwards."""
    world = make(Route.RING, reach=PAGEABLE)
    calls, copied = itertools.count(), list[bool]()

    def copy(to: NDArray[np.uint64], of: NDArray[np.uint64], length: int) -> None:
        call = next(calls)
        if call == 1:  # one of the two that copy the second chunk
            raise OSError("an address is not mapped")
        time.sleep(0.05 * call)
        copied.append(world.users > 0)

    monkeypatch.setattr(pipe, "copy_batch", copy)
    assert world.store(list(range(8)), 0, 1).wait() is False
    assert copied == [True, True]


def test_an_early_load_that_the_engine_cannot_wait_for_is_reported(make: Make) -> None:
    world = make(Route.RING)
    world.cuda.stream_wait_event = failing_once(  # type: ignore[method-assign]
        world.cuda.stream_wait_event, lambda stream, event: stream == COMPUTE
    )
    failed = world.load([1, 2, 3, 4], 0, idle=True)
    assert failed.early is False
    assert not failed.wait().any()
    world.copier.settle()
    later = world.load([1, 2, 3, 4], 0, idle=True)
    assert later.early
    assert later.wait().all()
    world.copier.settle()


def test_a_store_that_the_engine_cannot_wait_for_is_not_whole(make: Make) -> None:
    """The engine goes on after a hook that failed, and writes to its blocks."""
    world = make(Route.RING)
    world.compute([1, 2, 3, 4], 1)
    free = threading.Event()

    def hold_up() -> None:
        assert free.wait(60)

    world.copier._stores.submit(hold_up)
    store, other = world.store([1, 2, 3, 4], 0), world.store([5, 6, 7, 8], 1)
    world.cuda.stream_wait_event = failing_once(  # type: ignore[method-assign]
        world.cuda.stream_wait_event, lambda stream, event: stream == COMPUTE
    )
    with pytest.raises(CudaError):
        world.copier.reuse(np.array([3], np.int32))
    free.set()
    assert store.wait() is False
    assert other.wait() is True


def test_whoever_fails_to_hear_of_a_load_holds_up_nobody(make: Make) -> None:
    world = make(Route.RING, inbound_blocks=4)
    world.fill(0, 1)
    run = SlotRun(world.slots(0), BOOT)

    def broken(_: object) -> None:
        raise RuntimeError("not listening")

    blocks = np.array([1, 2, 3, 4], np.int32)
    assert world.copier.load(blocks, run, 0, lambda _: None, broken, idle=True)
    assert not world.copier.load(blocks, run, 0, broken)
    settled = threading.Thread(target=world.copier.settle)
    settled.start()
    settled.join(60)
    assert not settled.is_alive()
    assert world.load([1, 2, 3, 4], 0).wait().all()


@pytest.mark.parametrize("seed", range(4))
def test_closing_ends_everything_that_was_begun_and_says_so_once(make: Make, seed: int) -> None:
    world = make(Route.RING, seed, inbound_blocks=4)
    for slot in range(4):
        world.fill(slot, slot)
    world.alive = False
    late = world.load([36, 37, 38, 39], 2)
    world.alive, world.found_late = True, True
    stored, computed = list(range(20, 28)), list(range(28, 36))
    world.compute([*stored, *computed], 1)
    results = [world.load(list(range(at, at + 4)), at // 4) for at in (0, 4, 8)]
    results.append(world.store(computed, 4, 5))
    world.reach = DEVICE
    results.append(world.load([12, 13, 14, 15], 3))
    world.reach = PAGEABLE
    results.append(world.store(stored, 6, 7))
    results.append(world.load([16, 17, 18, 19], 2))
    world.copier.close()
    for result in (*results, late):
        assert np.all(result.wait())
    for at, got in enumerate(world.cache[:, 0:12].swapaxes(0, 1)):
        assert (got == pattern(*divmod(at, GROUP_BLOCKS))).all()
    for i, block in enumerate([*computed, *stored]):
        row = world.memory[4 + i // 4].reshape(GROUP_BLOCKS, -1)[i % 4]
        assert (row == pattern(1, block)).all()


@pytest.mark.parametrize("operations", range(4, 60, 4))
def test_a_slow_store_that_broke_off_writes_nothing_later(make: Make, operations: int) -> None:
    world = make(Route.RING, reach=PAGEABLE)
    blocks = list(range(24))
    world.compute(blocks, 1)
    world.cuda.fail_after = operations
    broken = world.store(blocks, *range(6))
    whole = broken.wait()
    world.cuda.fail_after = -1
    # Its slots are somebody else's now.
    world.memory[:6] = 0xAA
    assert world.store(blocks, *range(6, 12)).wait() is True
    assert whole is True or (world.memory[:6] == 0xAA).all()
    assert (world.memory[6].reshape(GROUP_BLOCKS, -1)[0] == pattern(1, 0)).all()


def test_blocks_outside_the_cache_are_refused(make: Make) -> None:
    world = make(Route.RING)
    assert not world.load([1, 2, 3, BLOCKS], 0).wait().any()
    assert world.store([-1, 1, 2, 3], 0).wait() is False


@ways
def test_loads_that_need_the_cpu_hold_up_no_others(make: Make, route: Route) -> None:
    """Neither who waits for the others, nor an engine that settles those reported early."""
    world = make(route)
    for slot in range(3):
        world.fill(slot, slot)
    free = threading.Event()

    def hold_up() -> None:
        assert free.wait(60)

    world.copier._detour.lanes[True].submit(hold_up)
    world.reach = PAGEABLE
    slow = world.load([1, 2, 3, 4], 0)
    world.reach = PINNED
    try:
        assert world.load([5, 6, 7, 8], 1).wait().all()
        early = world.load([9, 10, 11, 12], 2, idle=True)
        assert early.early
        settled = threading.Thread(target=world.copier.settle)
        settled.start()
        settled.join(60)
        assert not settled.is_alive()
        assert not slow.said
    finally:
        free.set()
    assert slow.wait().all()
    for slot, at in enumerate((1, 5, 9)):
        for i in range(GROUP_BLOCKS):
            assert (world.cache[:, at + i] == pattern(slot, i)).all()
