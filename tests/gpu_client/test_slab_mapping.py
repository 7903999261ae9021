"""Mapping a slab takes long, and nobody but those who need that slab may notice."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slab_world import SLOT, World, slab_world

from kvstore.attach.mapped import DEVICE, PAGEABLE, PINNED
from kvstore.cudart import CudaError
from kvstore.errors import AttachmentLost
from kvstore.memory import Mapping

__all__ = ["slab_world"]

Until = Callable[..., None]


class Opening:
    """Holds up whoever opens device memory, until it is let go."""

    def __init__(self, world: World, problem: str = "") -> None:
        self.begun, self.free = threading.Event(), threading.Event()
        self.problem = problem
        self._open = world.runtime.ipc_open
        world.runtime.ipc_open = self._held_up  # type: ignore[method-assign]
        self.calls = 0

    def _held_up(self, handle: bytes) -> int:
        self.calls += 1
        self.begun.set()
        assert self.free.wait(60)
        if self.problem:
            raise CudaError(1, self.problem)
        return self._open(handle)


class Reader:
    """A thread that looks up where a slot of a group lies, and then keeps it a little."""

    def __init__(self, world: World, group: int) -> None:
        self.found: list[Any] = []
        self.let_go = threading.Event()
        self._held = world.held((group, 0, 10))
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._held as held:
            try:
                self.found.append(int(held.places(0)[0][0]))
            except AttachmentLost as error:
                self.found.append(str(error))
            assert self.let_go.wait(60)

    def end(self) -> Any:
        self.let_go.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        [found] = self.found
        return found


def within_a_minute(call: Callable[[], object]) -> None:
    """See that a call is not held up by what the test holds up."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def mapped(world: World, name: str) -> bool:
    return str(world.directory / name) in Path("/proc/self/maps").read_text()


def test_who_needs_other_slabs_does_not_wait_for_one_that_is_being_mapped(
    world: World, until: Until
) -> None:
    world.host(1)
    world.host(2)
    assert world.reach(1) == PAGEABLE
    opening = Opening(world)
    world.gpu(3, 0)
    reader = Reader(world, 3)
    assert opening.begun.wait(60)

    def others() -> None:
        assert world.reach(1) == PAGEABLE
        world.host(4)
        assert world.reach(4) == PAGEABLE
        world.table.retire([2])
        with world.held((3, 0, 10)) as held:
            # Who cannot wait is told so.
            assert not held.mapped(0)

    within_a_minute(others)
    # The thread that fills page tables may be at work on it.
    until(lambda: world.acknowledged == [2])
    opening.free.set()
    assert reader.end() == world.runtime.allocation.ctypes.data
    with world.held((3, 0, 10)) as held:
        assert held.mapped(0)
        assert held.places(0)[1].tolist() == [DEVICE]


def test_two_that_need_one_slab_share_what_it_comes_to(world: World, until: Until) -> None:
    opening = Opening(world)
    world.gpu(1, 2 * SLOT)
    readers = [Reader(world, 1) for _ in range(3)]
    assert opening.begun.wait(60)
    opening.free.set()
    until(lambda: all(reader.found for reader in readers))
    assert {reader.end() for reader in readers} == {world.runtime.allocation.ctypes.data + 2 * SLOT}
    assert opening.calls == 1
    table = Path("/proc/self/maps").read_text()
    assert table.count(str(world.directory / "generations1")) == 1


def test_a_slab_that_cannot_be_mapped_fails_for_those_who_wait_and_is_tried_again_later(
    world: World, until: Until
) -> None:
    opening = Opening(world, "invalid device context")
    world.gpu(1, 0)
    first = Reader(world, 1)
    assert opening.begun.wait(60)
    waiting = threading.Event()
    wait_for = world.table._changed.wait_for

    def told(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        if timeout is None:
            waiting.set()
        return wait_for(predicate, timeout)

    world.table._changed.wait_for = told  # type: ignore[method-assign, assignment]
    second = Reader(world, 1)
    assert waiting.wait(60)
    opening.free.set()
    problem = "slab group 1 cannot be mapped: invalid device context"
    assert first.end() == second.end() == problem
    assert opening.calls == 1
    assert not mapped(world, "generations1")
    opening.problem = ""
    assert world.reach(1) == DEVICE
    assert opening.calls == 2


def test_a_slab_retired_while_it_is_being_mapped_goes_with_its_last_user(
    world: World, until: Until
) -> None:
    opening = Opening(world)
    world.gpu(1, 0)
    reader = Reader(world, 1)
    assert opening.begun.wait(60)
    within_a_minute(lambda: world.table.retire([1]))
    with pytest.raises(AttachmentLost, match="group 1 was given back"):
        world.held((1, 0, 10))
    assert not world.acknowledged
    opening.free.set()
    until(lambda: reader.found)
    # Whoever had begun may end.
    assert mapped(world, "generations1")
    assert not world.acknowledged
    assert reader.end() == world.runtime.allocation.ctypes.data
    assert world.acknowledged == [1]
    assert not mapped(world, "generations1")


@pytest.mark.parametrize("problem", ["", "the exporter is gone"])
def test_a_table_that_ends_while_a_slab_is_being_mapped_leaves_nothing(
    world: World, until: Until, problem: str
) -> None:
    ended = threading.Event()
    opening = Opening(world, problem)
    world.gpu(1, 0)
    reader = Reader(world, 1)
    assert opening.begun.wait(60)
    within_a_minute(lambda: world.table.end("it broke", ended.set))
    assert not ended.is_set()
    opening.free.set()
    until(lambda: reader.found)
    assert not ended.is_set()
    assert not world.runtime.closed
    reader.end()
    assert ended.is_set()
    assert not mapped(world, "generations1")
    assert len(world.runtime.closed) == (not problem)


def test_what_is_announced_is_mapped_although_another_slab_is_not(world: World) -> None:
    world.host(1)
    with world.held((1, 0, 10), (2, 0, 10)) as held:
        assert not held.mapped(0)
        with pytest.raises(AttachmentLost, match="group 2 was never announced"):
            held.map(0, 0.0)
        assert mapped(world, "slab1")
        world.host(2)
        held.map(0, 0.0)
        assert held.mapped(0)


@pytest.mark.parametrize("pinning", [False, True])
def test_memory_that_cannot_be_faulted_in_is_said_once_counted_and_used_nevertheless(
    world: World,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pinning: bool,
) -> None:
    def short(self: Mapping, *_: Any) -> None:
        raise OSError(errno.ENOMEM, f"populating memory: {os.strerror(errno.ENOMEM)}")

    monkeypatch.setattr(Mapping, "fault_in", short)
    monkeypatch.setattr(Mapping, "populate", short)
    if pinning:
        world.table.pin_with(world.pins)
    with caplog.at_level(logging.WARNING, "kvstore.attach.slabs"):
        for group in (1, 2, 3):
            world.host(group)
        assert world.table.wait_filled(60.0)
    assert world.table.unfilled == 3
    [line] = [one.message for one in caplog.records if one.name == "kvstore.attach.slabs"]
    assert line.endswith("populating memory: Cannot allocate memory")
    for group in (1, 2, 3):
        assert world.reach(group) == (PINNED if pinning else PAGEABLE)
    with world.held((1, 0, 0)) as held:
        assert held.current(0).tolist() == [True]
        assert np.uint64(held.addresses(0)[0]) % np.uint64(SLOT) == 0
