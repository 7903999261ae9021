"""What must be there after a crash, from what the child said before it.

The child says what it is about to take away before it does, and what was acknowledged to it after
that; so of anything that was under way at the crash both outcomes are right.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

__all__ = ["Oracle"]

Event = tuple[Any, ...]

YES: Final = "yes"
NO: Final = "no"


class Oracle:
    """Acknowledged state, per space name.

    Attributes:
        durable: keys of blocks that must be served, with the epoch of their bytes.
        epochs: last acknowledged epoch; a space that is not there was never opened.
        bumping: a bump was begun and not acknowledged.
        pins: YES or NO for keys, with a slash and an owner, whose pin is known for sure.
        limits: of spaces whose limits are known for sure, as lists.
        limiting: limits that were begun to be set and not acknowledged.
    """

    def __init__(self) -> None:
        self.durable: dict[str, dict[str, int]] = defaultdict(dict)
        self.epochs: dict[str, int] = {}
        self.bumping: dict[str, int] = defaultdict(int)
        self.pins: dict[str, dict[str, str]] = defaultdict(dict)
        self.limits: dict[str, list[int | None]] = {}
        self.limiting: dict[str, int] = defaultdict(int)

    def apply(self, event: Event) -> None:
        """Take in what the child said."""
        kind, *rest = event
        handler = getattr(self, f"_{kind}", None)
        if handler is not None:
            handler(*rest)

    def forget_blocks(self) -> None:
        """Something was damaged: every block may be gone, no epoch may be."""
        self.durable.clear()
        self.pins.clear()
        self.limits.clear()

    def _opened(self, space: str, epoch: int) -> None:
        """The space is at an epoch, as a start found it."""
        self.epochs[space] = epoch
        self.bumping[space] = 0
        self.limiting[space] = 0

    def _flushed(self, space: str, epoch: int, keys: list[str]) -> None:
        if epoch == self.epochs[space] and not self.bumping[space]:
            self.durable[space].update(dict.fromkeys(keys, epoch))

    def _gone(self, space: str, key: str) -> None:
        """A block is about to leave the disk."""
        self.durable[space].pop(key, None)
        for name in [name for name in self.pins[space] if name.startswith(key)]:
            del self.pins[space][name]

    def _bumping(self, space: str) -> None:
        self.bumping[space] += 1
        self.durable[space].clear()
        self.pins[space].clear()

    def _epoch(self, space: str, epoch: int) -> None:
        self.epochs[space] = epoch
        self.bumping[space] -= 1
        self.durable[space].clear()
        self.pins[space].clear()

    def _limiting(self, space: str) -> None:
        self.limiting[space] += 1
        self.limits.pop(space, None)

    def _limited(self, space: str, limits: list[int | None]) -> None:
        self.limiting[space] -= 1
        if not self.limiting[space]:
            self.limits[space] = limits

    def _pinning(self, space: str, keys: list[str]) -> None:
        for key in keys:
            self.pins[space].pop(key, None)

    def _pinned(self, space: str, keys: list[str]) -> None:
        if not self.bumping[space]:
            self.pins[space].update(dict.fromkeys(keys, YES))

    def _unpinned(self, space: str, keys: list[str]) -> None:
        if not self.bumping[space]:
            self.pins[space].update(dict.fromkeys(keys, NO))
