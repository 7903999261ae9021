"""Keys as they are pressed, from a terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

__all__ = ["Keyboard", "keyboard"]


class Keyboard:
    """Reads single keys; without a terminal to read from it only waits."""

    def __init__(self, fd: int | None) -> None:
        """Read from a terminal that is in cbreak mode, or from nothing."""
        self._fd = fd

    def wait(self, seconds: float) -> str:
        """Return what was typed, at the latest after `seconds`; empty when nothing was."""
        if self._fd is None:
            time.sleep(max(0.0, seconds))
            return ""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, seconds))
        if not ready:
            return ""
        typed = os.read(self._fd, 64)
        if not typed:
            # The terminal has hung up: it would be ready to be read for ever.
            raise KeyboardInterrupt
        # Arrow and function keys arrive as escape sequences: none of their letters is a command.
        return "" if typed.startswith(b"\x1b") else typed.decode(errors="replace")


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Take keys from standard input one by one, and leave the terminal as it was."""
    if not sys.stdin.isatty():
        yield Keyboard(None)
        return
    fd = sys.stdin.fileno()
    saved = termios.tcgetattr(fd)
    try:
        # Unlike raw mode, Ctrl-C still interrupts.
        tty.setcbreak(fd)
        yield Keyboard(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, saved)
