"""What the viewer has chosen: how spaces are sorted, how often, whether it stands still."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_INTERVAL_S", "MIN_INTERVAL_S", "SORTS", "View"]

# By what spaces are sorted, in the order in which `s` goes through it.
SORTS: Final = ("tokens/s", "blocks", "hit rate", "pinned", "model")
# The daemon's answer costs it about a millisecond: nobody reads ten a second.
MIN_INTERVAL_S: Final = 0.1
MAX_INTERVAL_S: Final = 3600.0


@dataclass(slots=True)
class View:
    """One viewer's choices."""

    interval_s: float = 1.0
    sort: str = "blocks"
    reverse: bool = False
    paused: bool = False
    done: bool = False

    def press(self, keys: str) -> None:
        """Do what keys say; others do nothing."""
        for key in keys:
            match key:
                case "q" | "Q" | "\x04":
                    self.done = True
                case "p" | " ":
                    self.paused = not self.paused
                case "s":
                    self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
                case "r":
                    self.reverse = not self.reverse
                case "+":
                    self.interval_s = max(MIN_INTERVAL_S, self.interval_s / 2)
                case "-":
                    self.interval_s = min(MAX_INTERVAL_S, self.interval_s * 2)
                case _:
                    pass
