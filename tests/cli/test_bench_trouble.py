"""The bench's storm and stall, a small one of each."""

from __future__ import annotations

from pathlib import Path

from kvstore.cli.bench.prefetch_trouble import measure_stall, measure_storm


def test_a_storm_of_cancelled_prefetches_leaves_nothing(tmp_path: Path) -> None:
    _, leases, held = measure_storm(tmp_path / "storm", prefetches=160)
    assert (leases.value, held.value) == (0, 0)
    assert leases.met
    assert held.met


def test_a_disk_that_stops_for_a_moment(tmp_path: Path) -> None:
    longest, usual, recovery = measure_stall(tmp_path / "stall", seconds=0.6)
    assert longest.target == 600
    # Nothing came before its deadline, and everything afterwards.
    assert min(longest.value, usual.value, recovery.value) > 0
