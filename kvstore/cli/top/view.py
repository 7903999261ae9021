"""What the viewer has chosen: which list comes first, its order, how often, whether it stands still."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_INTERVAL_S", "MIN_INTERVAL_S", "PREFIX_SORTS", "SORTS", "View"]

# By what spaces are sorted, in the order in which `s` goes through it.
SORTS: Final = ("tokens/s", "blocks", "hit rate", "pinned", "model")
# The same for prefixes; hot: used most lately, as the daemon sees it.
PREFIX_SORTS: Final = ("hot", "requests/s", "requests", "hit tokens", "shared")
# The daemon's answer costs it about a millisecond: nobody reads ten a second.
MIN_INTERVAL_S: Final = 0.1
MAX_INTERVAL_S: Final = 3600.0


@dataclass(slots=True)
class View:
    """One viewer's choices."""

    interval_s: float = 1.0
    sort: str = "blocks"
    prefix_sort: str = "hot"
    prefixes: bool = False
    reverse: bool = False
    paused: bool = False
    done: bool = False

    @property
    def order(self) -> str:
        """By what the list that comes first is sorted."""
        return self.prefix_sort if self.prefixes else self.sort

    def press(self, keys: str) -> None:
        """Do what keys say; others do nothing."""
        for key in keys:
            match key:
                case "q" | "Q" | "\x04":
                    self.done = True
                case "p" | " ":
                    self.paused = not self.paused
                case "s":
                    self._sort_next()
                case "v":
                    self.prefixes = not self.prefixes
                case "r":
                    self.reverse = not self.reverse
                case "+":
                    self.interval_s = max(MIN_INTERVAL_S, self.interval_s / 2)
                case "-":
                    self.interval_s = min(MAX_INTERVAL_S, self.interval_s * 2)
                case _:
                    pass

    def _sort_next(self) -> None:
        if self.prefixes:
            at = PREFIX_SORTS.index(self.prefix_sort)
            self.prefix_sort = PREFIX_SORTS[(at + 1) % len(PREFIX_SORTS)]
        else:
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
