"""Warm-up: after a start, what was used last goes from disk to host before anybody asks.

The flow: choose the most recently used chains of all spaces, up to a budget and to the room that is
free; promote them a little at a time, hottest first, below every other job. Nothing is evicted for
it that was used more recently, nothing is held, and a real request for one of its blocks takes the
block over at its own priority. It ends when it has what it chose, at a stop, or when the disk fails
it; whatever has arrived stays. As a side effect the path from disk is measured early.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from typing import TYPE_CHECKING, Final

from kvstore.engine.waiting import RunWaiter
from kvstore.prefetch.admission import GUESS_PRIORITY
from kvstore.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from kvstore.engine.counters import Counters
    from kvstore.index import Block, BlockIndex
    from kvstore.prefetch.promoter import Promoter
    from kvstore.tiers.host import HostTier

__all__ = ["PRIORITY", "WarmUp"]

log = logging.getLogger(__name__)

# Below every request and hint.
PRIORITY: Final = GUESS_PRIORITY
_STEP_BYTES: Final = 64 * MIB
# Blocks looked at between two turns of the loop.
_CHUNK: Final = 2000
# Of the sorted ones; each is compared with the next of other parts.
_MERGE_CHUNK: Final = 500
# Of the pool, what is left free for those who come meanwhile.
_LEAVE_FREE: Final = 0.1
# A step that takes longer meets a disk that does not work, or a pool without room.
_STEP_SECONDS: Final = 600.0


def _coldness(block: Block) -> int:
    return -block.sequence


class WarmUp:
    """One warm-up."""

    def __init__(
        self,
        index: BlockIndex,
        host: HostTier,
        promoter: Promoter,
        counters: Counters,
        budget_bytes: int,
    ) -> None:
        """Compose; `start` begins."""
        self._index = index
        self._host = host
        self._promoter = promoter
        self._counters = counters
        self._budget = budget_bytes
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin in the background."""
        self._task = asyncio.create_task(self._run(), name="warm-up")

    async def stop(self) -> None:
        """End. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            chosen = await self._choose()
            arrived = 0
            for step in self._steps(chosen):
                arrived += await self._promote(step)
            if chosen:
                size = sum(b.space.shape.block_bytes for b in chosen)
                log.info(
                    "warm-up: %d of %d blocks (%s) came from disk",
                    arrived,
                    len(chosen),
                    format_bytes(size),
                )
        except Exception:
            # The boundary of a convenience: its failure must not end the daemon.
            log.exception("warm-up failed")

    async def _choose(self) -> list[Block]:
        """Return the hottest blocks that are only on disk, parents before children.

        Looks at every block there is, so it does so in small steps; what changes meanwhile is seen
        when its turn to be promoted comes.
        """
        parts = [part async for part in self._sorted_parts()]
        usage = self._host.usage()
        room = int(usage.capacity_bytes * (1 - _LEAVE_FREE)) - usage.used_bytes
        left = min(self._budget, room)
        chosen: list[Block] = []
        taken: set[Block] = set()
        # A chain's head is used last, so that this puts parents first as well.
        for at, block in enumerate(heapq.merge(*parts, key=_coldness)):
            size = block.space.shape.block_bytes
            if size > left:
                break
            parent = block.parent
            if parent is None or parent.host is not None or parent in taken:
                chosen.append(block)
                taken.add(block)
                left -= size
            if at % _MERGE_CHUNK == _MERGE_CHUNK - 1:
                await asyncio.sleep(0)
        return chosen

    async def _sorted_parts(self) -> AsyncIterator[list[Block]]:
        """Yield the blocks that are only on disk, a part at a time, each part hottest first."""
        for space in list(self._index.spaces.values()):
            blocks = list(space.blocks.values())
            for at in range(0, len(blocks), _CHUNK):
                part = [
                    block
                    for block in blocks[at : at + _CHUNK]
                    if block.host is None and block.disk is not None
                ]
                part.sort(key=_coldness)
                yield part
                await asyncio.sleep(0)

    @staticmethod
    def _steps(blocks: list[Block]) -> Iterator[list[Block]]:
        """Yield runs of one shape, of a limited size each."""
        step: list[Block] = []
        for block in blocks:
            shape = block.space.shape
            full = (len(step) + 1) * shape.block_bytes > _STEP_BYTES
            if step and (full or step[0].space.shape != shape):
                yield step
                step = []
            step.append(block)
        if step:
            yield step

    async def _promote(self, blocks: list[Block]) -> int:
        """Promote what is still on disk only; return how many blocks came."""
        wanted = [b for b in blocks if b.host is None and b.disk is not None and not b.dead]
        waiter = RunWaiter(self._index, wanted, hold=False)
        self._promoter.request(wanted, waiter, PRIORITY)
        try:
            await waiter.wait(asyncio.get_running_loop().time() + _STEP_SECONDS)
        finally:
            self._promoter.cancel(wanted, waiter)
        came = len(wanted) - len(waiter.failures) - len(waiter.pending)
        self._counters.counts["warm_up_blocks"] += came
        return came
