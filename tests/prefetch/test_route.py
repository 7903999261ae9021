"""Straight to the GPU, or through host memory: what is clearly slower is left alone, not forgotten."""

from __future__ import annotations

import pytest

from kvstore.prefetch.estimate import PathEstimate
from kvstore.prefetch.route import LEAST_BYTES, Leg, straight_bytes
from kvstore.units import GIB, MIB


def path_of(rate: float) -> PathEstimate:
    """A path that was measured at a rate; its last transfer ended at 1 s."""
    path = PathEstimate()
    path.end(path.begin(MIB, 1.0 - MIB / rate), MIB, 1.0)
    return path


def leg(rate: float, ahead: int = 0) -> Leg:
    return Leg(path_of(rate), ahead)


@pytest.mark.parametrize(
    ("straight", "disk", "bus", "goes_straight"),
    [
        (6e9, 6e9, 20e9, True),
        (5e9, 6e9, 20e9, True),  # a little slower, and host memory is left alone
        (3e9, 6e9, 20e9, False),
        (3e9, 6e9, 2e9, True),  # the slowest stage is what counts
    ],
)
def test_the_faster_way_is_taken(
    straight: float, disk: float, bus: float, goes_straight: bool
) -> None:
    stages = [leg(disk), leg(bus)]
    size = straight_bytes(GIB, leg(straight), stages, 1.1)
    assert size == (GIB if goes_straight else 0)


def test_a_queue_before_it_makes_a_way_slower() -> None:
    assert straight_bytes(GIB, leg(6e9, ahead=4 * GIB), [leg(6e9), leg(20e9)], 1.1) == 0
    assert straight_bytes(GIB, leg(3e9), [leg(6e9, ahead=4 * GIB), leg(20e9)], 1.1) == GIB


def test_what_is_not_measured_is_tried_and_what_lost_is_tried_again_now_and_then() -> None:
    slow, stages = leg(1e9), [leg(6e9), leg(20e9)]
    assert straight_bytes(GIB, Leg(PathEstimate(), 0), stages, 1.1) == GIB
    assert straight_bytes(GIB, slow, [leg(6e9), Leg(PathEstimate(), 0)], 1.1) == GIB
    assert straight_bytes(LEAST_BYTES - 1, slow, stages, 1.1) == LEAST_BYTES - 1
    assert straight_bytes(GIB, slow, stages, 2.9) == 0
    assert straight_bytes(GIB, slow, stages, 3.1) == LEAST_BYTES
    # Once is enough: one that is on its way says how fast it is soon.
    slow.path.begin(MIB, 3.1)
    assert straight_bytes(GIB, slow, stages, 3.1) == 0
