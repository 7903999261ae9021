"""Slabs that are pinned, cannot be pinned, or lie in another process's device memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slab_world import SLOT, SLOTS, World, slab_world

from kvstore.attach import mapped
from kvstore.attach.mapped import DEVICE, PAGEABLE, PINNED
from kvstore.connectors.vllm.guard import failures
from kvstore.cudart import CudaError
from kvstore.errors import AttachmentLost

__all__ = ["slab_world"]

Until = Callable[..., None]


def test_slabs_are_pinned_from_their_announcement_on_and_unpinned_before_they_go(
    world: World, until: Until
) -> None:
    world.host(1)
    assert world.reach(1) == PAGEABLE
    # One was there before the GPU was, one comes after.
    world.table.pin_with(world.pins)
    world.host(2)
    until(lambda: len(world.runtime.registered) == 2)
    until(lambda: world.reach(1) == world.reach(2) == PINNED)
    assert world.pins.pinned_bytes == 2 * SLOT * SLOTS
    busy = world.held((1, 0, 0))
    world.table.retire([1, 2])
    until(lambda: world.acknowledged == [2])
    assert len(world.runtime.registered) == 1
    busy.done()
    until(lambda: world.acknowledged == [2, 1])
    assert not world.runtime.registered
    assert not world.pins.pinned_bytes


def test_slabs_beside_a_serving_engine_are_given_up_one_by_one_while_nobody_waits(
    world: World, until: Until
) -> None:
    """Those who hear of it, or finish a copy, go on at once; memory stays until it is unpinned."""
    world.table.pin_with(world.pins)
    for group in (1, 2, 3, 4):
        world.host(group)
    assert world.table.wait_filled(60.0)
    steps, rests, ended = threading.Semaphore(0), list[int](), threading.Event()

    def rest(seconds: float) -> None:
        rests.append(len(world.runtime.registered))
        assert steps.acquire(timeout=60.0)

    world.pins._pause = rest
    world.pins.serving()
    world.pins.step(under_way=True)
    busy = world.held((1, 0, 0), (2, 0, 0))
    world.table.retire([1])
    world.table.end("the daemon is gone", ended.set)
    busy.done()
    # It rests from the first one: of the others every byte is there, and pinned.
    until(lambda: rests == [3])
    assert not ended.is_set()
    assert not world.acknowledged
    maps = Path("/proc/self/maps").read_text()
    assert all(f"{world.directory}/slab{group}" in maps for group in (2, 3, 4))
    for left in (2, 1, 0):
        steps.release()
        until(lambda left=left: rests[-1] == left)
        assert not ended.is_set()
    steps.release()
    assert ended.wait(60.0)
    assert world.acknowledged == [1]
    assert not world.pins.pinned_bytes
    assert str(world.directory) not in Path("/proc/self/maps").read_text()


def test_a_process_that_leaves_unpins_at_once_and_starts_no_thread(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.table.pin_with(world.pins)
    for group in (1, 2, 3):
        world.host(group)
    assert world.table.wait_filled(60.0)
    world.pins.serving()
    world.pins.step(under_way=True)
    monkeypatch.setattr(threading.Thread, "start", None)
    ended = list[int]()
    world.pins.hurry()
    world.table.end("bye", lambda: ended.append(len(world.runtime.registered)), leaving=True)
    assert ended == [0]
    assert world.table.wait_idle(0.0)


@pytest.mark.parametrize("failing", [1, 99])
def test_a_slab_that_cannot_be_pinned_is_used_unpinned_and_counted(
    world: World, until: Until, failing: int
) -> None:
    world.runtime.failing = failing
    world.table.pin_with(world.pins)
    for group in (1, 2):
        world.host(group)
    until(lambda: failures["pin"] + len(world.runtime.registered) == 2)
    # Several threads pin: any of the two may be the one that fails.
    reaches = [PAGEABLE, PINNED if failing == 1 else PAGEABLE]
    until(lambda: sorted(world.reach(group) for group in (1, 2)) == reaches)
    assert world.pins.failed == failures["pin"] == min(failing, 2)


def test_many_slabs_are_pinned_once_each_although_several_threads_pin(world: World) -> None:
    for group in range(1, 17):
        world.host(group)
    # Those announced before come once more, some while they are being filled.
    world.table.pin_with(world.pins)
    # An engine that is about to serve waits until everything is pinned.
    assert world.table.wait_filled(60.0)
    assert world.pins.pinned_bytes == 16 * SLOT * SLOTS
    assert len(world.runtime.registered) == 16
    assert not failures["pin"]
    assert all(world.reach(group) == PINNED for group in range(1, 17))


def test_who_waits_for_pins_stops_when_the_attachment_ends(world: World) -> None:
    free, gone = threading.Event(), list[bool]()
    pin = world.pins.pin

    def held_up(address: int, length: int, step: int) -> int:
        free.wait(60.0)
        return pin(address, length, step)

    world.pins.pin = held_up  # type: ignore[method-assign]
    world.table.pin_with(world.pins)
    world.host(1)
    assert not world.table.wait_filled(0.0)
    waiter = threading.Thread(target=lambda: gone.append(world.table.wait_filled(60.0)))
    waiter.start()
    world.table.end("over", lambda: None)
    waiter.join(60.0)
    assert gone == [True]
    free.set()


def test_slots_pinned_together_say_so_and_others_do_not(
    world: World, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "_PIN_BYTES", 3 * SLOT)
    for group in (1, 2):
        world.host(group)
    named = [(group, index, 0) for group in (2, 1) for index in range(SLOTS)]
    with world.held(*named) as held:
        assert set(held.places(0)[1].tolist()) == {PAGEABLE}
        stretches = held.stretches(0).tolist()
    world.pins.range_bytes = 6 * SLOT
    world.table.pin_with(world.pins)
    until(lambda: world.pins.pinned_bytes == 2 * SLOTS * SLOT)
    with world.held(*named) as held:
        addresses, reach = held.places(0)
        assert set(reach.tolist()) == {PINNED}
        assert held.stretches(0).tolist() == stretches
    assert len(set(stretches)) == 2 * 3
    for a, one in zip(addresses.tolist(), stretches, strict=True):
        for b, other in zip(addresses.tolist(), stretches, strict=True):
            begin = max(at for at in world.runtime.registered if at <= min(a, b))
            together = max(a, b) + SLOT <= begin + world.runtime.registered[begin]
            assert together or one != other


def test_gpu_slabs_lie_at_their_offset_in_an_allocation_that_is_opened_once(world: World) -> None:
    world.gpu(1, 4 * SLOT)
    world.gpu(2, 12 * SLOT)
    base = int(world.runtime.allocation.ctypes.data)
    with world.held((2, 3, 13), (1, 1, 11), (1, 2, 99)) as held:
        addresses, reach = held.places(0)
        assert (addresses - np.uint64(base)).tolist() == [15 * SLOT, 5 * SLOT, 6 * SLOT]
        assert set(reach.tolist()) == {DEVICE}
        assert held.current(0).tolist() == [True, True, False]
        world.table.end("the daemon is gone", lambda: None)
        # A copy is under way: nothing goes away under it.
        assert not world.runtime.closed
    assert world.runtime.opened == [b"h" * 64]
    assert world.runtime.closed == [base]


def test_threads_that_open_and_close_gpu_slabs_use_that_gpu_alone(
    world: World, until: Until
) -> None:
    """Or they would make a context on the first one, and break the capture of a graph."""
    opened = list[int]()
    runtime = world.runtime
    open_memory, close_memory = runtime.ipc_open, runtime.ipc_close

    def opening(handle: bytes) -> int:
        runtime.check_thread()
        opened.append(threading.get_ident())
        return open_memory(handle)

    def closing(address: int) -> None:
        runtime.check_thread()
        close_memory(address)

    runtime.ipc_open, runtime.ipc_close = opening, closing  # type: ignore[method-assign]
    world.table.pin_with(world.pins)
    world.gpu(1, 0)
    assert world.table.wait_filled(60.0)
    assert opened
    assert opened != [threading.get_ident()]
    ender = threading.Thread(target=lambda: world.table.end("over", lambda: None))
    ender.start()
    ender.join()
    until(lambda: len(runtime.closed) == 1)


@pytest.mark.parametrize(
    ("changes", "problem", "opens"),
    [
        ({"device_uuid": "GPU-b"}, "does not see device GPU-b", False),
        ({"allocation_bytes": 5 * SLOT}, "inside its allocation", True),
        # It was taken back before anybody mapped it: others can be opened.
        ({"generations_path": "/nonexistent"}, "No such file", True),
    ],
)
def test_device_memory_that_cannot_be_had_is_lost_in_one_line(
    world: World, changes: dict[str, Any], problem: str, opens: bool
) -> None:
    world.gpu(1, 2 * SLOT, **changes)
    with world.held((1, 0, 10)) as held, pytest.raises(AttachmentLost, match=problem):
        held.places(0)
    assert world.table.opens_devices == opens
    world.gpu(2, 2 * SLOT)
    assert world.reach(2) == DEVICE
    assert world.table.opens_devices


def test_a_process_without_a_gpu_opens_nothing_by_itself(world: World) -> None:
    world.host(1)
    world.gpu(2, 0)
    assert world.reach(1) == PAGEABLE
    assert not world.runtime.opened


CALLS = (
    "set_device",
    "relax_capture",
    "host_register",
    "host_unregister",
    "device_of",
    "ipc_open",
    "ipc_close",
    "go_back",
)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("nth", range(3))
def test_a_call_that_fails_leaves_slabs_usable_and_nothing_behind(
    world: World, name: str, nth: int
) -> None:
    runtime, calls = world.runtime, itertools.count()
    call = getattr(runtime, name)

    def failing(*arguments: Any) -> Any:
        if next(calls) == nth:
            raise CudaError(700, f"{name}: made to fail (700)")
        return call(*arguments)

    setattr(runtime, name, failing)
    world.table.pin_with(world.pins)
    for group in (1, 2):
        world.host(group)
    for group, offset in ((3, 0), (4, 4 * SLOT)):
        world.gpu(group, offset)
    assert world.table.wait_filled(60.0)
    assert {world.reach(group) for group in (1, 2)} <= {PAGEABLE, PINNED}
    # What could not be opened is tried again.
    assert {world.reach(group) for group in (3, 4)} == {DEVICE}
    ended = threading.Event()
    world.table.retire([1])
    world.table.end("over", ended.set)
    assert ended.wait(60.0)
    assert world.table.wait_idle(60.0)
    assert world.acknowledged == [1]
    assert str(world.directory) not in Path("/proc/self/maps").read_text()
    assert len(runtime.opened) == 1
    # A call that failed has done nothing; what went before and came after it has.
    assert len(runtime.closed) == (name != "ipc_close" or nth > 0)
    left = len(runtime.registered)
    assert left <= (name in ("host_unregister", "set_device", "relax_capture"))
    runtime.registered.clear()
