"""A clock that goes on over restarts, whatever is done to the wall clock.

It counts with the kernel's clock since boot, so that no change of the wall clock moves it. Over a
restart of the daemon it goes on by that clock; only over a reboot the wall clock is asked, and then
it never runs backwards. What it said last is saved with what needs it (`Reading`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Reading", "SteadyClock"]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def _since_boot() -> float:
    # Goes on while the machine sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Reading:
    """What all clocks said at one moment.

    Attributes:
        seconds: this clock.
        clock: seconds since the machine's boot.
        wall: Unix time.
        boot: names the boot.
    """

    seconds: float
    clock: float
    wall: float
    boot: str


class SteadyClock:
    """Seconds since the first start, or what `resume` was told last and since then. Any thread."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = _since_boot,
        wall: Callable[[], float] = time.time,
        boot: str | None = None,
        start: float = 0.0,
    ) -> None:
        """Start.

        Args:
            clock: seconds, never backwards.
            wall: Unix time.
            boot: names the boot of the machine that `clock` counts from; None: this one.
            start: what it says first.
        """
        self._clock = clock
        self._wall = wall
        self._boot = _BOOT_ID.read_text().strip() if boot is None else boot
        self._offset = start - clock()

    def now(self) -> float:
        """Return the time, seconds."""
        return self._clock() + self._offset

    def read(self) -> Reading:
        """Return what to save, for `resume` after a restart."""
        clock = self._clock()
        return Reading(clock + self._offset, clock, self._wall(), self._boot)

    def resume(self, last: Reading) -> None:
        """Go on from an earlier daemon's last reading."""
        same_boot = last.boot == self._boot
        away = self._clock() - last.clock if same_boot else self._wall() - last.wall
        self._offset = last.seconds + max(0.0, away) - self._clock()
