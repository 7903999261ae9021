"""Prefetch on disks of known speed: queue, stages, room, trouble.

The daemon's disk is throttled (`--disk-throttle`), so that what a read should take is arithmetic:
each figure is compared with that, and holds on any machine whose disk is faster than the throttle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvstore.cli.bench import prefetch_queue, prefetch_room, prefetch_stages
from kvstore.cli.bench.figure import Figure
from kvstore.cli.bench.prefetch_command import PrefetchLeg
from kvstore.cli.bench.prefetch_trouble import measure_stall, measure_storm

__all__ = ["measure"]


_LEGS: Final[dict[PrefetchLeg, Callable[[Path, int], list[Figure]]]] = {
    PrefetchLeg.QUEUE: prefetch_queue.measure,
    PrefetchLeg.STAGES: prefetch_stages.measure,
    PrefetchLeg.ROOM: prefetch_room.measure,
    PrefetchLeg.STORM: lambda directory, _: measure_storm(directory),
    PrefetchLeg.STALL: lambda directory, _: measure_stall(directory),
}


def measure(
    directory: Path, rounds: int, legs: Sequence[PrefetchLeg], say: Callable[[str], None]
) -> list[Figure]:
    """Measure some parts, or all when none is named.

    Args:
        directory: takes a daemon's directory for each.
        rounds: that medians are taken of.
        legs: which parts.
        say: is told what is measured.

    Raises:
        ChildError: something was not served, or read twice.
    """
    figures = []
    for leg in legs or tuple(PrefetchLeg):
        say(f"measuring: {leg}")
        figures += _LEGS[leg](directory / leg, rounds)
    return figures
