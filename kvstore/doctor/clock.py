"""Clocks: wall-clock time ends pins' times to live, the other one measures everything."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kvstore.doctor.finding import Finding, ok, warning
from kvstore.units import format_seconds

__all__ = ["check_clock", "is_synchronised", "newest_seconds", "read_clock_source"]

_SOURCE: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
# Reading these takes a trip to a slow device.
_SLOW_SOURCES: Final = frozenset(("acpi_pm", "hpet", "jiffies", "refined-jiffies", "pit"))
_AHEAD_SECONDS: Final = 60.0
# Nothing of kvstore was written before.
_OLDEST: Final = datetime(2025, 1, 1, tzinfo=UTC).timestamp()
# struct timex of 64-bit Linux; all zero asks and changes nothing.
_TIMEX_BYTES: Final = 256
_STATUS_OFFSET: Final = 40
_UNSYNCHRONISED: Final = 0x40


def is_synchronised() -> bool | None:
    """Tell whether something keeps the clock right; None when the kernel does not say."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    if ctypes.CDLL(None).adjtimex(timex) < 0:
        return None
    return not ctypes.c_int.from_buffer(timex, _STATUS_OFFSET).value & _UNSYNCHRONISED


def read_clock_source(path: Path = _SOURCE) -> str:
    """Return what the kernel counts time with; empty when it does not say."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def newest_seconds(directory: Path) -> float:
    """Return when a file of a directory was last written, Unix time; 0.0 without files.

    Raises:
        OSError: it cannot be read.
    """
    if not directory.is_dir():
        return 0.0
    return max((path.lstat().st_mtime for path in directory.iterdir()), default=0.0)


def check_clock(
    now: float, newest: float, source: str, synchronised: bool | None
) -> Iterator[Finding]:
    """Judge the clocks.

    Args:
        now: wall-clock time, Unix time.
        newest: when something in the state directory was last written.
        source: what the kernel counts time with.
        synchronised: whether something keeps the clock right.
    """
    subject = "clock"
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < _OLDEST:
        yield warning(subject, f"{text} cannot be right", "set the clock: pins would never end")
    elif newest > now + _AHEAD_SECONDS:
        yield warning(
            subject,
            f"{text}, but the state directory was written {format_seconds(newest - now)} later: "
            "the clock went back",
            "set the clock, and keep it synchronised (chrony)",
        )
    elif source in _SLOW_SOURCES:
        yield warning(
            subject,
            f"{text}; the kernel counts with {source}, which is slow to read",
            "see the kernel's log for why it does not trust tsc",
        )
    else:
        state = {True: ", synchronised", False: ", not synchronised", None: ""}[synchronised]
        yield ok(subject, f"{text}{state}" + f", {source}" * bool(source))
