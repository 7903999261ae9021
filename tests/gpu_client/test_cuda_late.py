"""Copies whose slots cannot be touched yet: the engine's thread never waits for that."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from cuda_world import GROUP_BLOCKS, Make, World, failing_once, pattern
from fake_cuda import COMPUTE

from kvstore.attach.mapped import DEVICE, PAGEABLE, PINNED
from kvstore.connectors.vllm.copier import ATTACH_SECONDS
from kvstore.connectors.vllm.cuda.routes import Route

ways = pytest.mark.parametrize("route", list(Route))
reaches = pytest.mark.parametrize("reach", [PINNED, PAGEABLE])


def on_engine_thread(world: World) -> None:
    """Only there PyTorch knows which stream the engine computes on."""
    engine, compute_stream = threading.get_ident(), world.cuda.compute_stream

    def here() -> int:
        assert threading.get_ident() == engine
        return compute_stream()

    world.cuda.compute_stream = here  # type: ignore[method-assign]


@ways
@pytest.mark.parametrize("reach", [PINNED, PAGEABLE, DEVICE])
@pytest.mark.parametrize("seed", range(3))
def test_a_load_whose_slab_is_not_mapped_waits_while_the_engine_goes_on(
    make: Make, route: Route, reach: int, seed: int
) -> None:
    world = make(route, seed, reach=reach)
    on_engine_thread(world)
    for slot in range(3):
        world.fill(slot, slot)
    blocks = list(range(8, 16))
    # A step of the blocks' last owner is still to run when the load is asked for.
    world.compute(blocks, 77)
    world.mapped.clear()
    result = world.load(blocks, 0, 1, idle=True)
    assert result.early is False
    assert not result.said
    # Its slots may not be given back meanwhile.
    assert world.users == 1
    world.compute([1, 2], 5)
    world.mapped.set()
    assert result.wait().all()
    found = world.seen(blocks)
    world.cuda.drain()
    for i, got in enumerate(found):
        assert (got == pattern(*divmod(i, GROUP_BLOCKS))).all(), i


@ways
@reaches
@pytest.mark.parametrize("seed", range(3))
def test_a_store_whose_slab_is_not_mapped_takes_what_was_there_when_it_was_asked_for(
    make: Make, route: Route, reach: int, seed: int
) -> None:
    world = make(route, seed, reach=reach)
    on_engine_thread(world)
    world.compute([1, 2, 3, 4], 1)
    world.mapped.clear()
    store = world.store([1, 2, 3, 4], 0)
    assert not store.said
    world.compute([5, 6], 2)
    world.mapped.set()
    assert store.wait() is True
    for i, row in enumerate(world.memory[0].reshape(GROUP_BLOCKS, -1)):
        assert (row == pattern(1, i + 1)).all(), i


def test_a_store_that_waits_for_its_slab_is_given_up_when_its_blocks_get_new_owners(
    make: Make,
) -> None:
    world = make(Route.RING)
    world.compute([1, 2, 3, 4], 1)
    world.mapped.clear()
    store = world.store([1, 2, 3, 4], 0)
    reused = threading.Thread(target=world.copier.reuse, args=(np.array([3], np.int32),))
    reused.start()
    reused.join(60)
    assert not reused.is_alive()
    world.compute([1, 2, 3, 4], 2)
    world.mapped.set()
    assert store.wait() is False
    assert not world.memory.any()
    assert world.store([1, 2, 3, 4], 0).wait() is True
    assert (world.memory[0].reshape(GROUP_BLOCKS, -1)[2] == pattern(2, 3)).all()


def test_what_is_never_announced_fails_and_holds_up_nobody_else(make: Make) -> None:
    world = make(Route.RING, announcement_s=0.01)
    world.fill(1, 3)
    world.mapped.clear()
    load, store = world.load([1, 2, 3, 4], 0), world.store([5, 6, 7, 8], 2)
    assert not load.wait().any()
    assert store.wait() is False
    world.mapped.set()
    assert world.load([1, 2, 3, 4], 1, idle=True).early
    world.copier.settle()
    assert (world.cache[:, 1] == pattern(3, 0)).all()


def test_loads_of_mapped_slots_pass_one_that_waits(make: Make) -> None:
    world = make(Route.RING)
    world.fill(0, 1)
    world.fill(1, 2)
    world.mapped.clear()
    waiting = world.load([1, 2, 3, 4], 0)
    ready = world.copier._attachment.using

    def mapped_by_now(*arguments: object, **options: object) -> object:
        held = ready(*arguments, **options)  # type: ignore[arg-type]
        held.mapped = lambda shard: True  # type: ignore[method-assign]
        held.map = lambda shard, timeout_s: None  # type: ignore[method-assign]
        return held

    world.using = mapped_by_now  # type: ignore[method-assign, assignment]
    assert world.load([5, 6, 7, 8], 1).wait().all()
    assert not waiting.said
    world.mapped.set()
    assert waiting.wait().all()


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


def test_a_load_from_a_daemon_found_late_is_reported_though_it_cannot_begin(make: Make) -> None:
    world = make(Route.RING, boot_id=b"another")
    world.cuda.event_record = failing_once(  # type: ignore[method-assign]
        world.cuda.event_record, lambda event, stream: stream == COMPUTE
    )
    assert not world.load([1, 2, 3, 4], 0).wait().any()


def test_loads_from_a_daemon_that_is_not_found_wait_together(make: Make) -> None:
    """Not one after the other: the last of many would wait for minutes."""
    world = make(Route.RING, boot_id=b"another")
    asked, patience = threading.Event(), list[float]()

    def wait_run(boot_id: bytes, timeout_s: float) -> bool:
        patience.append(timeout_s)
        assert asked.wait(60)
        time.sleep(0.05)
        return False

    world.wait_run = wait_run  # type: ignore[method-assign]
    loads = [world.load([1, 2, 3, 4], 0) for _ in range(3)]
    asked.set()
    assert not any(load.wait().any() for load in loads)
    assert patience[1] <= ATTACH_SECONDS - 0.05
    assert patience[2] <= ATTACH_SECONDS - 0.1


def test_a_load_that_gets_no_event_leaves_every_event_with_one_owner(make: Make) -> None:
    world = make(Route.RING, reach=DEVICE)
    world.cuda.event_create = failing_once(  # type: ignore[method-assign]
        world.cuda.event_create, lambda *, timing=False, spin=False: spin
    )
    assert not world.load([1, 2, 3, 4], 0).wait().any()
    events = world.copier._events
    taken = [events.take() for _ in range(4)]
    assert len(set(taken)) == 4
    for event in taken:
        events.give(event)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("late", [False, True])
def test_a_copy_that_gets_no_event_leaks_none(make: Make, which: int, late: bool) -> None:
    """Each one that it had taken is destroyed in the end: `World.close` sees to that."""
    world = make(Route.RING)
    world.boot_id, world.found_late = (b"earlier", True) if late else (world.boot_id, False)
    creations = itertools.count()
    world.cuda.event_create = failing_once(  # type: ignore[method-assign]
        world.cuda.event_create, lambda **_: next(creations) == which
    )
    assert world.load([1, 2, 3, 4], 0).wait().any() == (which == 2)
    for _ in range(2):
        world.store([1, 2, 3, 4], 1).wait()
    assert world.load([1, 2, 3, 4], 0).wait().all()
    assert next(creations) > which
