"""How commands print: tables that fit 80 columns, JSON, progress lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

__all__ = ["console", "print_json", "progress"]

# Into a pipe or a file rich would assume 80 columns and cut; tables are made to fit anyway.
_PIPE_WIDTH = 100


def console() -> Console:
    """Return the console for tables."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


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
