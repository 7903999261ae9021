"""Sizes and durations as people write them."""

from __future__ import annotations

import math
import re
from typing import Final

from kvstore.errors import ConfigError

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "PAGE_BYTES",
    "format_bytes",
    "format_duration",
    "format_seconds",
    "format_uptime",
    "parse_bytes",
    "parse_seconds",
    "round_up",
]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

# Alignment of slots in memory, in files and for O_DIRECT.
PAGE_BYTES: Final = 4096

_SIZES: Final = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 1000,
    "m": MIB,
    "mib": MIB,
    "mb": 1000**2,
    "g": GIB,
    "gib": GIB,
    "gb": 1000**3,
    "t": TIB,
    "tib": TIB,
    "tb": 1000**4,
}
_TIMES: Final = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-zA-Z]*)\s*")


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in units:
        names = ", ".join(u for u in units if u)
        raise ConfigError(f"{text!r} is not a {what}: write a number and one of {names}")
    value = float(match[1]) * units[match[2].lower()]
    if value == math.inf:
        raise ConfigError(f"{text[:20]!r}… is more than any {what}")
    return value


def parse_bytes(text: str | int) -> int:
    """Parse a size such as ``8GiB``, ``512 MiB`` or ``1048576`` into bytes.

    Raises:
        ConfigError: the text is not a size.
    """
    return text if isinstance(text, int) else int(_parse(text, _SIZES, "size"))


def parse_seconds(text: str | float) -> float:
    """Parse a duration such as ``10s``, ``250ms``, ``5m`` or ``1.5`` into seconds.

    Raises:
        ConfigError: the text is not a duration.
    """
    return float(text) if isinstance(text, int | float) else _parse(text, _TIMES, "duration")


def format_bytes(value: float) -> str:
    """Format bytes with a binary unit, three significant digits."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(value) >= size:
            number = value / size
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{value:.0f} B"


def format_uptime(value: float) -> str:
    """Format whole seconds in two units: ``3 d 4 h``, ``2 h 5 min``, ``1 min 30 s``, ``12 s``."""
    days, rest = divmod(int(value), 86400)
    hours, minutes, seconds = rest // 3600, rest // 60 % 60, rest % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def format_duration(value: float) -> str:
    """Format a duration as people set one and `parse_seconds` reads it: ``3h``, ``90m``, ``1.5s``."""
    for unit, seconds in (("d", 86400), ("h", 3600), ("m", 60)):
        if value >= seconds and value % seconds == 0:
            return f"{value / seconds:.0f}{unit}"
    return f"{value:.10g}s" if value >= 1 or not value else f"{value * 1e3:.10g}ms"


def format_seconds(value: float) -> str:
    """Format seconds as ``1.2 s``, ``3.4 ms`` or ``56 µs``; from a minute on ``1.5 min``, ``2 d``.

    Three significant digits, and all of them before the point: eight characters at most, below a
    hundred years.
    """
    # What rounds to a whole unit is written in that unit: 1 s, not 1e+03 ms.
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if value >= size * 0.9995:
            number = max(1.0, value / size)
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"
