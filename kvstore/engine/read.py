"""Reads by the daemon itself: a run whose bytes are streamed to a client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.engine.waiting import RunWaiter
from kvstore.miss import Miss, MissReason
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine.arrivals import Arrivals
    from kvstore.index import Block, BlockIndex

__all__ = ["Read"]


class Read:
    """One leading run. Copies that can be read in host are held until let go; the others brought.

    Attributes:
        run: the blocks.
        miss: why the run ends after them.
        closed: it holds nothing any more.
    """

    def __init__(
        self,
        index: BlockIndex,
        arrivals: Arrivals,
        run: Sequence[Block],
        miss: Miss,
        on_released: Callable[[Read], None],
    ) -> None:
        """Hold what is in host and ask for the rest. `close` must follow."""
        self._index = index
        self._arrivals = arrivals
        self._on_released = on_released
        self._waiting = False
        self.closed = False
        self.run = run
        self.miss = miss
        self._on_disk = {b for b in run if b.host is None}
        cold = list(dict.fromkeys(b for b in run if not b.readable))
        self._cold = set(cold)
        self._warm = {b for b in run if b.readable}
        for block in self._warm:
            index.hold_host(block)
        self._waiter = RunWaiter(index, cold, hold=True)
        arrivals.request(cold, self._waiter)

    async def wait(self, at: int, seconds: float) -> Miss:
        """Wait for one block's host copy; a true `Miss` says why it is not there in time."""
        block = self.run[at]
        if block in self._cold:
            deadline = asyncio.get_running_loop().time() + seconds
            self._waiting = True
            try:
                await self._waiter.wait_for(block, deadline)
            finally:
                self._waiting = False
            if block in self._waiter.pending or block in self._waiter.failures:
                reason = self._waiter.failures.get(block, MissReason.DEADLINE)
                return Miss(reason, self.tier(at).name.lower())
        if block.host is None or block.dead:
            return Miss(MissReason.LEASE_LOST, "host")
        return Miss()

    @property
    def held_waiting(self) -> int:
        """References that it holds while it waits for a block; 0 while it does not wait."""
        return len(self._warm) + self._waiter.held if self._waiting else 0

    def tier(self, at: int) -> TierName:
        """Return the tier that held a block when the read began."""
        return TierName.DISK if self.run[at] in self._on_disk else TierName.HOST

    def let_go(self, at: int) -> None:
        """Let go of a block that was read: it may make room for those to come."""
        block = self.run[at]
        if block in self._warm:
            self._warm.discard(block)
            self._index.release_host(block)
            self._on_released(self)
        elif self._waiter.let_go(block):
            self._on_released(self)

    def close(self) -> None:
        """Stop waiting and let go of everything."""
        if self._waiter.pending:
            self._arrivals.cancel(list(self._waiter.pending), self._waiter)
        self._waiter.close()
        warm, self._warm = self._warm, set()
        for block in warm:
            self._index.release_host(block)
        self.closed = True
        self._on_released(self)
