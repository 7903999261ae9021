"""Load or compute: what is waited for is predicted to pay, and belief follows what is measured."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.prefetch.estimate import PathEstimate, Prior
from kvstore.prefetch.planner import Want, plan
from kvstore.units import MIB


def path_of(rate: float, latency: float = 0.0) -> PathEstimate:
    """A path that has moved a lot at this rate."""
    path = PathEstimate(Prior(rate, latency))
    now = 0.0
    for _ in range(20):
        number = path.begin(MIB, now)
        now += MIB / rate + latency
        path.end(number, MIB, now)
    return path


def want(ready: str, block_seconds: float, deadline: float = 60, ahead: int = 0) -> Want:
    return Want([c == "+" for c in ready], MIB, block_seconds, ahead, deadline)


def test_the_rate_is_that_of_the_device_however_many_transfers_share_it() -> None:
    path, now = PathEstimate(Prior(1e6)), 0.0
    for _ in range(50):
        numbers = [path.begin(MIB, now) for _ in range(4)]
        now += 4 * MIB / 2e9
        for number in numbers:  # all end in one burst
            path.end(number, MIB, now)
    assert path.bytes_per_second == pytest.approx(2e9, rel=0.05)
    assert path.in_flight == 0


def test_idle_time_is_not_slowness() -> None:
    path, now = path_of(1e9), 100.0
    for _ in range(30):
        number = path.begin(MIB, now)
        path.end(number, MIB, now + MIB / 1e9)
        now += 30
    assert path.bytes_per_second == pytest.approx(1e9, rel=0.05)


def test_one_hiccup_is_forgotten_and_a_slower_device_is_believed() -> None:
    path, now = path_of(1e9), 100.0
    number = path.begin(MIB, now)
    now += 30.0
    path.end(number, MIB, now)
    assert path.bytes_per_second > 0.4e9
    for _ in range(200):
        number = path.begin(MIB, now)
        now += MIB / 1e8
        path.end(number, MIB, now)
    assert path.bytes_per_second == pytest.approx(1e8, rel=0.1)


def test_a_transfer_that_should_have_ended_says_so_before_it_ends() -> None:
    path = path_of(1e9)
    assert path.pace(100.0) == pytest.approx(1e9, rel=0.05)
    path.begin(10 * MIB, 100.0)
    assert path.pace(100.01) == pytest.approx(1e9, rel=0.05)
    assert path.pace(110.0) == pytest.approx(MIB, rel=0.05)


def test_a_hiccup_under_way_is_not_taken_for_a_slow_device() -> None:
    """Late by four times its length, which is 20 ms: a wait that has 100 ms to go is not given up."""
    path = path_of(8e6)
    path.begin(48_000, 100.0)
    paces = [path.pace(100.0 + age) for age in (0.01, 0.025, 0.1, 0.3, 1.0, 10.0)]
    assert paces == sorted(paces, reverse=True)
    assert paces[0] == path.bytes_per_second
    assert paces[1] > 0.75 * path.bytes_per_second
    assert paces[3] < 0.3 * path.bytes_per_second
    assert paces[5] == pytest.approx(4800, rel=0.01)


def test_who_began_behind_others_is_not_late_by_their_time() -> None:
    """Three transfers share a device; the last one ends after three times its own time."""
    path, now = path_of(1e6), 100.0
    numbers = [path.begin(MIB, now) for _ in range(3)]
    for number in numbers:
        now += MIB / 1e6
        assert path.pace(now) == path.bytes_per_second
        path.end(number, MIB, now)
    path.begin(MIB, now)
    assert path.pace(now + 3 * MIB / 1e6) < path.bytes_per_second


def test_a_path_that_is_only_tried_now_and_then_is_believed_what_it_shows_then() -> None:
    """A bad minute, after which nobody waits for it any more."""
    path, now = path_of(2e6), 100.0
    for _ in range(8):
        now += 2.0
        for number in [path.begin(MIB // 16, now) for _ in range(3)]:
            now += MIB // 16 / 8e6
            path.end(number, MIB // 16, now)
    assert path.bytes_per_second == pytest.approx(8e6, rel=0.1)


def test_what_waits_behind_others_has_no_latency_by_that() -> None:
    path, now = path_of(1e8), 100.0
    before = path.latency_seconds
    for _ in range(20):
        for number in [path.begin(MIB, now) for _ in range(3)]:
            now += MIB / 1e8
            path.end(number, MIB, now)
    assert path.latency_seconds == before


def test_a_failed_transfer_says_nothing_about_speed() -> None:
    path = path_of(1e9)
    before = path.bytes_per_second
    path.end(path.begin(MIB, 50.0), 0, 50.1)
    assert path.bytes_per_second == before


@pytest.mark.parametrize(
    ("rate", "block_seconds", "blocks"),
    [
        (1000 * MIB, 0.1, 8),  # 1 ms to load, 100 to compute
        (5 * MIB, 0.1, 3),  # 200 to load: only what is there
        (10.5 * MIB, 0.1, 3),  # about even: a load that may not pay is not waited for
        (20 * MIB, 0.1, 8),
    ],
)
def test_loading_must_beat_computing(rate: float, block_seconds: float, blocks: int) -> None:
    assert plan(want("+++-----", block_seconds), path_of(rate), 9e9).blocks == blocks


def test_what_lies_behind_in_memory_makes_a_short_wait_worth_it() -> None:
    """One slow block unlocks four that are in memory already."""
    path = path_of(4 * MIB)
    assert plan(want("--", 0.1), path, 9e9).blocks == 0
    assert plan(want("-++++-", 0.1), path, 9e9).blocks == 5


def test_a_queue_ahead_counts() -> None:
    path = path_of(100 * MIB)
    assert plan(want("----", 0.1), path, 9e9).blocks == 4
    assert plan(want("----", 0.1, ahead=100 * MIB), path, 9e9).blocks == 0


@pytest.mark.parametrize(
    ("queued", "blocks", "saved"),
    [
        (0.0, 0, 0.0),  # a second a block to load, a tenth of it to compute
        (2.5, 2, 0.2),  # what arrives before the turn comes costs nothing
        (20.0, 8, 0.8),
    ],
)
def test_until_its_turn_comes_a_request_waits_for_nothing(
    queued: float, blocks: int, saved: float
) -> None:
    it = dataclasses.replace(want("-" * 8, 0.1), queued_seconds=queued)
    chosen = plan(it, path_of(MIB), 9e9)
    assert chosen.blocks == blocks
    assert chosen.saved_seconds == pytest.approx(saved)


def test_without_a_prefill_rate_the_deadline_decides() -> None:
    chosen = plan(want("+---", 0.0, deadline=0.5), path_of(MIB), 9e9)
    assert (chosen.blocks, chosen.saved_seconds) == (4, 0.0)


def test_the_deadline_cuts_what_cannot_come_in_time() -> None:
    assert plan(want("-" * 20, 10.0, deadline=5.5), path_of(MIB), 9e9).blocks == 5


@given(
    st.text("+-", max_size=30),
    st.floats(1e-4, 10),
    st.floats(1e5, 1e10),
    st.integers(0, 1 << 30),
    st.floats(0.01, 10),
)
def test_no_other_choice_is_predicted_to_be_better(
    ready: str, block_seconds: float, rate: float, ahead: int, deadline: float
) -> None:
    path = path_of(rate)
    it = want(ready, block_seconds, deadline, ahead)
    chosen = plan(it, path, 9e9, margin=0.0)

    def cost(k: int) -> float:
        coming = ready[:k].count("-")
        wait = path.seconds(coming * MIB, ahead, 9e9) if coming else 0.0
        return wait + (len(ready) - k) * block_seconds if wait <= deadline else math.inf

    best = min(cost(k) for k in range(len(ready) + 1))
    assert cost(chosen.blocks) <= best * (1 + 1e-9) + 1e-9


def test_what_an_earlier_run_saw_is_believed_until_this_one_sees_something() -> None:
    path = PathEstimate()
    path.recall(1e9, 0.0)
    assert (path.measured, path.observed) == (True, False)
    assert path.bytes_per_second == pytest.approx(1e9)
    path.end(path.begin(MIB, 0.0), MIB, 1.0)
    assert path.observed
    assert path.bytes_per_second == pytest.approx(MIB, rel=0.01)


def test_a_path_does_not_look_slower_when_one_transfer_at_a_time_is_under_way() -> None:
    path, now = PathEstimate(), 0.0
    # Three at a time: 20 ms each, one after the other.
    numbers = [path.begin(MIB, now) for _ in range(3)]
    for _ in range(100):
        now += 0.02
        path.end(numbers.pop(0), MIB, now)
        numbers.append(path.begin(MIB, now))
    for number in numbers:
        now += 0.02
        path.end(number, MIB, now)
    assert path.bytes_per_second == pytest.approx(50 * MIB, rel=0.005)
    # Alone each takes half a millisecond more.
    for _ in range(1000):
        number = path.begin(MIB, now)
        now += 0.0205
        path.end(number, MIB, now)
    assert path.bytes_per_second == pytest.approx(50 * MIB, rel=0.005)
    assert path.latency_seconds == pytest.approx(0.0005, rel=0.3)
