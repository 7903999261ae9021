"""How commands print: tables that fit 80 columns, JSON, progress lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["console", "count", "make_table", "print_json", "printable", "progress", "shorten"]

# Tables fit a terminal of 80 columns; into a pipe or a file there is no terminal to ask.
_PIPE_WIDTH = 100
_UNITS = ("", "k", "M", "G", "T")


def console() -> Console:
    """Return the console for tables."""
    # Imported late, here and below: rich costs more time than most commands take.
    from rich.console import Console

    # No markup: names come from clients, and one such as "[/red]" is a name like any other.
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def make_table(title: str, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return an empty table.

    Args:
        title: above it; may be empty.
        left: names of the first columns, aligned to the left.
        right: names of the columns after them, aligned to the right: numbers.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in left:
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def count(value: int) -> str:
    """Return a number for a table: exact below 100,000, then three digits and k, M, G or T."""
    if value < 100_000:
        return f"{value:,}"
    # Rounded first: 999,600 is 1M, not 1000k.
    digits, exponent = f"{value:.2e}".split("e")
    thousands = min(int(exponent) // 3, len(_UNITS) - 1)
    return f"{float(digits) * 10 ** (int(exponent) - 3 * thousands):g}{_UNITS[thousands]}"


def printable(text: str) -> str:
    """Return text from a client, without what a terminal would obey, or break a line at."""
    return "".join(c if c.isprintable() else "?" for c in text)


def shorten(text: str, width: int) -> str:
    """Return text cut to `width`; of a path, the end is what tells it from others.

    The rest is made `printable`.
    """
    text = printable(text)
    return text if len(text) <= width else f"…{text[1 - width :]}"


def print_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def progress(*, to_stderr: bool) -> Callable[[str], None]:
    """Return a function that prints a line with the seconds since now in front."""
    stream = sys.stderr if to_stderr else sys.stdout
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {line}", file=stream, flush=True)

    return say
