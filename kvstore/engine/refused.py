"""Blocks that the disk did not take, and when they are worth another try."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from kvstore.index import Flush

if TYPE_CHECKING:
    from kvstore.index import Block

__all__ = ["RefusedBlocks"]

# No sooner than this after the last time; after failures that go on, later and later.
_RETRY_SECONDS: Final = 2.0
_LAST_RETRY_SECONDS: Final = 60.0
# Blocks dealt with in one go of the loop.
_RETRIED_AT_ONCE: Final = 8192
_PRUNE_AT_LEAST: Final = 256


class RefusedBlocks:
    """Refused blocks, the oldest first.

    Attributes:
        retry_at: loop time before which they are not tried again.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._blocks: dict[Block, None] = {}
        self._prune_at = _PRUNE_AT_LEAST
        self._pause_seconds = _RETRY_SECONDS
        self.retry_at = 0.0

    def __len__(self) -> int:
        """Return the number of blocks; some may have left memory since."""
        return len(self._blocks)

    def add(self, block: Block) -> None:
        """Remember a block."""
        if len(self._blocks) >= self._prune_at:
            self._blocks = {b: None for b in self._blocks if b.host is not None and not b.dead}
            self._prune_at = max(_PRUNE_AT_LEAST, 2 * len(self._blocks))
        self._blocks[block] = None

    def discard(self, block: Block) -> None:
        """Forget a block: it is on its way."""
        self._blocks.pop(block, None)

    def first(self) -> Block | None:
        """Return the oldest one."""
        return next(iter(self._blocks), None)

    def take(self) -> list[Block]:
        """Take blocks to try again. Those that are refused again go behind the others."""
        taken = list(itertools.islice(self._blocks, _RETRIED_AT_ONCE))
        for block in taken:
            del self._blocks[block]
        return [b for b in taken if b.flush is Flush.REFUSED and b.host is not None and not b.dead]

    def pause(self, now: float) -> None:
        """Try nothing again for a moment."""
        self.retry_at = now + self._pause_seconds

    def failed(self, now: float) -> None:
        """The device or the store failed: pause, longer each time in a row."""
        self.pause(now)
        self._pause_seconds = min(2 * self._pause_seconds, _LAST_RETRY_SECONDS)

    def worked(self) -> None:
        """A group went through."""
        self._pause_seconds = _RETRY_SECONDS
