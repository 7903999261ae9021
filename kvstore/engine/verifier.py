"""The verifier: adopted bytes are compared with their digests before anybody reads them.

Everything is checked in the background, hottest first, at no more than half of one thread's time.
What somebody waits for is checked at once. A block is held in place while it is waited for or
read; otherwise it may be evicted unchecked, and nothing is lost by that.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore.engine.waiting import RunWaiter
from kvstore.miss import MissReason
from kvstore.tiers.digests import digest_shards
from kvstore.tiers.pool_copy import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor

    from kvstore.engine.counters import Counters
    from kvstore.index import Block, BlockIndex
    from kvstore.prefetch.move import Waiter
    from kvstore.tiers.host import HostTier

    Work = tuple[tuple[memoryview, ...], tuple[int, ...], tuple[int, ...] | None]

__all__ = ["Verifier"]

log = logging.getLogger(__name__)

_BATCH_BYTES: Final = 16 << 20
_BATCH_BLOCKS: Final = 256
_FAILURE_PAUSE_SECONDS: Final = 1.0
# Blocks looked at in one go; most of them may be gone, or checked.
_LOOKED_AT: Final = 10_000


def _compare(work: Sequence[Work]) -> list[bool]:
    return [digest_shards(views, lengths) == digests for views, lengths, digests in work]


class Verifier:
    """Checks the blocks that were adopted.

    Attributes:
        on_damaged: takes a damaged copy, and what hangs on it, out of the index.
        on_disk_only: told that a block lost its damaged copy while somebody waits; returns
            whether it is brought from elsewhere.
    """

    def __init__(
        self,
        index: BlockIndex,
        host: HostTier,
        executor: Executor,
        counters: Counters,
        on_released: Callable[[], None],
    ) -> None:
        """Compose; the executor's threads do the hashing. `on_released`: blocks may leave again."""
        self.on_damaged: Callable[[Block], None] = lambda _: None
        self.on_disk_only: Callable[[Block, Waiter], bool] = lambda _, __: False
        self._index = index
        self._host = host
        self._executor = executor
        self._counters = counters
        self._on_released = on_released
        self._coldest_first: list[Block] = []
        self._asked: deque[Block] = deque()
        self._waiters: dict[Block, list[Waiter]] = {}
        self._reading: set[Block] = set()
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, blocks: Iterable[Block]) -> None:
        """Queue what was adopted; before `start`."""
        self._coldest_first = sorted(blocks, key=lambda b: b.sequence)

    def start(self) -> None:
        """Begin to check."""
        if self._coldest_first:
            self._tasks = [
                asyncio.create_task(self._sweep(), name="verifier-sweep"),
                asyncio.create_task(self._serve(), name="verifier"),
            ]

    async def stop(self) -> None:
        """Stop after the batches under way. Whoever waits, waits for ever: end those first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def request(self, blocks: Iterable[Block], waiter: Waiter) -> None:
        """Check unchecked blocks soon, and tell the waiter about each."""
        for block in blocks:
            waiters = self._waiters.get(block)
            if waiters is None:
                self._index.hold_host(block)
                self._waiters[block] = [waiter]
                self._asked.append(block)
            else:
                waiters.append(waiter)
        self._work.set()

    def cancel(self, blocks: Iterable[Block], waiter: Waiter) -> None:
        """Take a waiter away."""
        for block in blocks:
            waiters = self._waiters.get(block)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[block]
                    self._index.release_host(block)
                    self._on_released()

    def hurry(self, blocks: Iterable[Block]) -> None:
        """Check what is unchecked among these next."""
        unchecked = [b for b in blocks if b.unchecked]
        if unchecked:
            self._asked.extend(unchecked)
            self._work.set()

    async def wait_for(self, blocks: Sequence[Block]) -> None:
        """Return when none of the blocks, which the caller holds, is unchecked any more."""
        unchecked = [b for b in blocks if b.unchecked]
        if not unchecked:
            return
        waiter = RunWaiter(self._index, unchecked, hold=False)
        self.request(unchecked, waiter)
        try:
            await waiter.wait(math.inf)
        finally:
            self.cancel(list(waiter.pending), waiter)

    async def _sweep(self) -> None:
        """Check everything once."""
        loop = asyncio.get_running_loop()
        while self._coldest_first:
            begun = loop.time()
            await self._check(self._next(self._coldest_first.pop, self._coldest_first))
            await asyncio.sleep(loop.time() - begun)
        log.info("adopted blocks are checked")

    async def _serve(self) -> None:
        """Check what is asked for."""
        while True:
            if not self._asked:
                self._work.clear()
                await self._work.wait()
            await self._check(self._next(self._asked.popleft, self._asked))
            await asyncio.sleep(0)

    def _next(self, take: Callable[[], Block], queue: Sequence[Block]) -> list[Block]:
        """Take blocks that need a check off a queue, up to a batch."""
        batch: list[Block] = []
        size = 0
        for _ in range(_LOOKED_AT):
            if not queue or size >= _BATCH_BYTES or len(batch) >= _BATCH_BLOCKS:
                break
            block = take()
            if block in self._reading:
                continue  # whoever reads it tells those who wait
            if block.dead:
                self._gone(block)
            elif block.unchecked:
                batch.append(block)
                self._reading.add(block)
                size += block.space.shape.block_bytes
        return batch

    async def _check(self, batch: Sequence[Block]) -> None:
        if not batch:
            return
        work: list[Work] = []
        for block in batch:
            self._index.hold_host(block)
            assert block.host is not None
            work.append((self._host.views(block.host), block.space.spec.shard_bytes, block.digests))
        right: list[bool] | None = None
        again = False
        try:
            loop = asyncio.get_running_loop()
            right = await undisturbed(loop.run_in_executor(self._executor, _compare, work))
        except Exception:
            # The boundary of a batch: it is checked again, and nobody reads it before.
            log.exception("checking adopted blocks failed; it is tried again")
            await asyncio.sleep(_FAILURE_PAUSE_SECONDS)
            again = True
        finally:
            self._reading.difference_update(batch)
            if again:
                # Only now: whoever serves the queue passes over what is being read.
                self._asked.extend(batch)
                self._work.set()
            for i, block in enumerate(batch):
                if right is not None:
                    self._done(block, right=right[i])
                self._index.release_host(block)
            self._on_released()

    def _done(self, block: Block, *, right: bool) -> None:
        """Act on the result; the caller still holds the copy."""
        if block.dead:
            self._gone(block)
            return
        block.unchecked = False
        waiters = self._forget(block)
        if right:
            self._counters.counts["adopted_checked_blocks"] += 1
            for waiter in waiters:
                waiter.landed(block)
            return
        self._counters.counts["adopted_damaged_blocks"] += 1
        self.on_damaged(block)
        for waiter in waiters:
            if not self.on_disk_only(block, waiter):
                waiter.failed(block, MissReason.CORRUPT)

    def _gone(self, block: Block) -> None:
        """Tell who waits for a block that was discarded meanwhile."""
        ghost = self._index.ghosts.get(block.space.id, block.key)
        corrupt = ghost is not None and ghost.cause == "corrupt"
        for waiter in self._forget(block):
            waiter.failed(block, MissReason.CORRUPT if corrupt else MissReason.OTHER_EPOCH)

    def _forget(self, block: Block) -> list[Waiter]:
        """Forget who waits for a block, and let go of it; return them."""
        waiters = self._waiters.pop(block, None)
        if waiters is None:
            return []
        self._index.release_host(block)
        return waiters
