"""What cells of a frame are made of. Text from clients is cleaned: it must not steer a terminal."""

from __future__ import annotations

from rich.text import Text

from kvstore.cli.output import count

__all__ = ["heading", "per_second", "percent"]


def percent(part: float, whole: float) -> str:
    """Return a part in percent; a dash of nothing."""
    return f"{part / whole:.1%}" if whole > 0 else "-"


def per_second(rate: float | None) -> str:
    """Return a rate without its unit; a dash while it is not known."""
    if rate is None:
        return "-"
    return f"{rate:.1f}" if 0 < rate < 10 else count(round(rate))


def heading(text: str) -> Text:
    """Return a line that names what is below it."""
    return Text(text, style="bold cyan", no_wrap=True)
