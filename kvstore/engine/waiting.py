"""Waiting for promotions on behalf of the daemon's own streams and of prefetch tickets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.engine.wake import Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.index import Block, BlockIndex
    from kvstore.miss import MissReason

__all__ = ["RunWaiter"]


class RunWaiter:
    """Waits for some blocks; holds those that land, if asked to, until `close`."""

    def __init__(self, index: BlockIndex, blocks: Sequence[Block], *, hold: bool) -> None:
        """Wait for `blocks`; the caller then requests them from the promoter."""
        self._index = index
        self.holding = hold
        self._held: set[Block] = set()
        self._signal = Signal()
        self.pending: set[Block] = set(blocks)
        self.failures: dict[Block, MissReason] = {}

    def landed(self, block: Block) -> None:
        """A block has a host copy."""
        self.pending.discard(block)
        if self.holding and block not in self._held:
            self._index.hold_host(block)
            self._held.add(block)
        self._signal.notify()

    def failed(self, block: Block, reason: MissReason) -> None:
        """A block is not coming."""
        self.pending.discard(block)
        self.failures[block] = reason
        self._signal.notify()

    async def wait_for(self, block: Block, deadline: float) -> None:
        """Return when a block has landed or failed, or at `deadline` (loop time)."""
        while block in self.pending and await self._signal.wait(self._left(deadline)):
            pass

    async def wait(self, deadline: float) -> None:
        """Return when all blocks have landed or failed, or at `deadline` (loop time)."""
        while self.pending and await self._signal.wait(self._left(deadline)):
            pass

    @staticmethod
    def _left(deadline: float) -> float:
        return deadline - asyncio.get_running_loop().time()

    @property
    def held(self) -> int:
        """How many landed blocks it holds."""
        return len(self._held)

    def let_go(self, block: Block) -> bool:
        """Let go of one block that has landed; False when it is not held here."""
        if block not in self._held:
            return False
        self._held.discard(block)
        self._index.release_host(block)
        return True

    def close(self) -> None:
        """Let go of what it holds, and end every wait. The promoter is told by the caller."""
        self.pending.clear()
        self._signal.notify()
        held, self._held = self._held, set()
        for block in held:
            self._index.release_host(block)
