"""What pinning may cost an engine that serves, whatever the driver's calls take."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvstore.attach.prefault import Prefaulter
from kvstore.connectors.vllm.cuda.pins import SlabPins
from kvstore.units import GIB, MIB

STEP = 16 * MIB


class Driver:
    """Each call takes `seconds` by its own clock, and may be held up."""

    def __init__(self) -> None:
        self.now = 100.0
        self.seconds = 0.003
        self.registered: list[int] = []
        self.unregistered: list[int] = []
        self.rests: list[float] = []
        self.guard = threading.Lock()
        self.inside = self.most_inside = 0
        self.gate = threading.Event()
        self.gate.set()

    def clock(self) -> float:
        return self.now

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds

    def set_device(self, device: int) -> None:
        pass

    def relax_capture(self) -> None:
        pass

    def host_register(self, address: int, length: int) -> None:
        with self.guard:
            self.inside += 1
            self.most_inside = max(self.inside, self.most_inside)
            self.registered.append(length)
        assert self.gate.wait(60.0)
        with self.guard:
            self.inside -= 1
            self.now += self.seconds

    def host_unregister(self, address: int) -> None:
        self.unregistered.append(address)
        self.now += self.seconds


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def pins(driver: Driver) -> SlabPins:
    return SlabPins(driver, 0, driver.rest, driver.clock)


def pin(pins: SlabPins, length: int) -> int:
    return pins.pin(1 << 40, length, STEP)


def test_ranges_are_large_until_the_engine_serves_and_then_small_with_rests(
    driver: Driver, pins: SlabPins
) -> None:
    assert pins.threads() > 1
    assert pins.range_bytes == pin(pins, pins.range_bytes) == 256 * MIB
    assert not driver.rests
    pins.serving()
    assert pins.threads() == 1
    assert pin(pins, pins.range_bytes) == pins.range_bytes == 64 * MIB
    assert driver.rests == [pytest.approx(2 * driver.seconds)]
    assert pins.settled(0.0)


def test_a_range_that_was_measured_out_while_the_engine_started_is_cut_down(
    driver: Driver, pins: SlabPins
) -> None:
    length = pins.range_bytes
    pins.serving()
    assert pin(pins, length) == 64 * MIB
    # What is left at a slab's end is no multiple of anything.
    assert pin(pins, 3 * MIB) == 3 * MIB
    # A slab whose slots are larger than a range is pinned slot by slot.
    assert pins.pin(1 << 40, 5 * GIB, GIB) == GIB


def test_slow_calls_get_smaller_and_are_rested_from_in_full(driver: Driver, pins: SlabPins) -> None:
    """Two thirds of the time are the engine's at least, and a call is over as soon as it can be."""
    pins.serving()
    # Steps under way are no idleness, however long they take: they may wait for this very call.
    pins.step(under_way=True)
    driver.seconds = 0.4
    lengths = [pin(pins, pins.range_bytes) for _ in range(5)]
    assert lengths == [64 * MIB, 32 * MIB, STEP, STEP, STEP]
    assert driver.rests == [pytest.approx(0.8)] * 5
    driver.seconds = 0.001
    lengths = [pin(pins, pins.range_bytes) for _ in range(4)]
    assert lengths == [STEP, 32 * MIB, 64 * MIB, 64 * MIB]
    assert driver.rests[5:] == [pytest.approx(0.002)] * 4


def test_an_idle_engine_is_not_rested_for(driver: Driver, pins: SlabPins) -> None:
    pins.serving()
    driver.now += 10
    pin(pins, STEP)
    assert not driver.rests
    pins.step(under_way=True)
    pin(pins, STEP)
    pins.step(under_way=False)
    pin(pins, STEP)
    assert len(driver.rests) == 2
    driver.now += 10
    pin(pins, STEP)
    assert len(driver.rests) == 2


def test_no_range_is_begun_while_copies_are_submitted(
    driver: Driver, pins: SlabPins, until: Callable[..., None]
) -> None:
    pins.serving()
    pinned: list[int] = []
    thread = threading.Thread(target=lambda: pinned.append(pin(pins, STEP)))
    with pins.submitting(), pins.submitting():
        thread.start()
        thread.join(0.05)
        assert not driver.registered
    thread.join(60.0)
    assert pinned == [STEP]


def test_an_engine_that_is_ready_waits_for_the_large_ranges_under_way_and_no_others_begin(
    driver: Driver, pins: SlabPins, until: Callable[..., None]
) -> None:
    """Whichever thread it is that says so, and wherever those are that pin."""
    driver.gate.clear()
    left = {(group, 0): GIB for group in range(8)}

    def fill(group: int, shard: int, start: int) -> int:
        done = pin(pins, min(pins.range_bytes, left[group, shard]))
        left[group, shard] -= done
        return int(left[group, shard] > 0)

    filler = Prefaulter(fill)
    filler.pace(pins.threads)
    for group, shard in left:
        filler.used(group, shard, GIB)
    until(lambda: driver.inside == pins.threads() == 4)
    pins.serving()
    assert not pins.settled(0.0)
    begun = len(driver.registered)
    driver.most_inside = 0
    driver.gate.set()
    assert pins.settled(60.0)
    assert filler.wait(60.0)
    assert driver.registered[:begun] == [256 * MIB] * begun
    assert max(driver.registered[begun:]) == 64 * MIB
    # Once those are over there is one at a time.
    assert driver.most_inside == 1
    filler.end()


def test_unpinning_rests_as_pinning_does_once_the_engine_serves(
    driver: Driver, pins: SlabPins
) -> None:
    for range_ in range(6):
        assert pins.pin(range_ << 30, GIB, STEP) == GIB
    pins.unpin(0 << 30)
    # While the engine starts nobody launches anything.
    assert not driver.rests
    pins.serving()
    pins.step(under_way=True)
    driver.seconds = 0.1
    pins.unpin(1 << 30)
    pins.unpin(2 << 30)
    assert driver.rests == [pytest.approx(0.2)] * 2
    pins.step(under_way=False)
    driver.now += 10
    pins.unpin(3 << 30)
    assert len(driver.rests) == 2
    pins.step(under_way=True)
    pins.hurry()
    pins.unpin(4 << 30)
    assert len(driver.rests) == 2
    assert driver.unregistered == [range_ << 30 for range_ in range(5)]
    assert pins.pinned_bytes == GIB


def test_no_range_is_unpinned_while_copies_are_submitted_nor_while_another_is_pinned(
    driver: Driver, pins: SlabPins, until: Callable[..., None]
) -> None:
    pins.serving()
    driver.gate.clear()
    pinning = threading.Thread(target=pin, args=(pins, STEP))
    pinning.start()
    until(lambda: driver.inside == 1)
    unpinning = threading.Thread(target=pins.unpin, args=(1 << 40,))
    unpinning.start()
    with pins.submitting():
        unpinning.join(0.05)
        driver.gate.set()
        pinning.join(60.0)
        unpinning.join(0.05)
        assert not driver.unregistered
    unpinning.join(60.0)
    assert driver.unregistered == [1 << 40]


def test_who_rests_is_woken_when_the_engine_leaves(driver: Driver) -> None:
    pins = SlabPins(driver, 0, clock=driver.clock)
    pins.serving()
    driver.seconds = 1e6
    resting = threading.Thread(target=pins.unpin, args=(1 << 40,), daemon=True)
    resting.start()
    pins.hurry()
    resting.join(60.0)
    assert not resting.is_alive()
    pins.unpin(2 << 40)
    assert len(driver.unregistered) == 2
