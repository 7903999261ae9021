"""What cannot be read in host yet, and who brings it: the promoter from disk, the verifier where it is.

Whoever waits for blocks asks here, and is told by whichever of the two it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.verifier import Verifier
    from kvstore.index import Block
    from kvstore.prefetch.move import Waiter
    from kvstore.prefetch.promoter import Promoter
    from kvstore.space import BlockShape

__all__ = ["Arrivals"]


class Arrivals:
    """Takes requests for blocks that are not readable, in chain order."""

    def __init__(self, verifier: Verifier) -> None:
        """Compose; `promoter` is set afterwards when there is a disk tier."""
        self._verifier = verifier
        self.promoter: Promoter | None = None
        verifier.on_disk_only = self._from_disk

    def request(
        self,
        blocks: Sequence[Block],
        waiter: Waiter,
        priority: int = 0,
        deadline: float = math.inf,
        slack: float = math.inf,
    ) -> None:
        """Bring blocks, and tell the waiter about each; see `Promoter.request`."""
        unchecked = [b for b in blocks if b.host is not None]
        if unchecked:
            self._verifier.request(unchecked, waiter)
        if self.promoter is not None and len(unchecked) < len(blocks):
            cold = [b for b in blocks if b.host is None]
            self.promoter.request(cold, waiter, priority, deadline, slack)

    def spare(self, waiter: Waiter, shape: BlockShape, priority: int, slack: float) -> None:
        """Let others have less before a waiter than he was asked for with; see `Promoter.spare`."""
        if self.promoter is not None:
            self.promoter.spare(waiter, shape, priority, slack)

    def cancel(self, blocks: Sequence[Block], waiter: Waiter) -> None:
        """Take a waiter away."""
        self._verifier.cancel(blocks, waiter)
        if self.promoter is not None:
            self.promoter.cancel(blocks, waiter)

    def hurry(self, blocks: Sequence[Block]) -> None:
        """Nobody waits for these, but they will be asked for again: check the adopted ones next."""
        self._verifier.hurry(blocks)

    def _from_disk(self, block: Block, waiter: Waiter) -> bool:
        """A copy in host was damaged; say whether the one on disk comes in its place."""
        if self.promoter is None or block.disk is None or block.dead:
            return False
        self.promoter.request([block], waiter)
        return True
