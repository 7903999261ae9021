"""Digests of committed blocks, computed by threads soon after the commit."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore.tiers.digests import digest_shards
from kvstore.tiers.pool_copy import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from kvstore.index import Block, BlockIndex
    from kvstore.tiers.host import HostTier

__all__ = ["Digester"]

log = logging.getLogger(__name__)

_BATCH: Final = 16
_LULL_SECONDS: Final = 0.02
_LULL_TRIES: Final = 5

Views = tuple[tuple[memoryview, ...], tuple[int, ...]]


def _digest_all(views: Sequence[Views]) -> list[tuple[int, ...]]:
    return [digest_shards(buffers, lengths) for buffers, lengths in views]


class Digester:
    """Gives every block its digests while its host copy is held in place."""

    def __init__(
        self,
        index: BlockIndex,
        host: HostTier,
        executor: Executor,
        on_released: Callable[[], None],
    ) -> None:
        """Compose; the executor's threads do the hashing. `on_released`: blocks may leave again."""
        self._index = index
        self._on_released = on_released
        self._host = host
        self._executor = executor
        self._queue: deque[Block] = deque()
        self._added = 0
        # What is hashed just now: held in place so long.
        self.held: list[Block] = []
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to serve the queue."""
        self._task = asyncio.create_task(self._run(), name="digester")

    async def stop(self) -> None:
        """Stop after the batch under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def busy(self) -> bool:
        """Whether blocks wait for their digests."""
        return bool(self._queue or self.held)

    def add(self, block: Block) -> None:
        """Queue a freshly committed block."""
        self._queue.append(block)
        self._added += 1
        self._work.set()

    async def _lull(self) -> None:
        """Wait until commits pause, though not for long.

        Whoever commits is probably copying its next blocks: hashing at the same time takes memory
        bandwidth from somebody who waits, and nobody waits for digests but the flusher, which
        computes what it misses.
        """
        for _ in range(_LULL_TRIES):
            before = self._added
            await asyncio.sleep(_LULL_SECONDS)
            if self._added == before:
                return

    async def digest(self, blocks: Sequence[Block]) -> None:
        """Compute the digests that are missing; the caller holds the host copies.

        Cancelled, it waits for the thread first: the caller then lets go of what that reads.
        """
        todo = [b for b in blocks if b.digests is None and b.host is not None]
        if not todo:
            return
        views = [
            (self._host.views(b.host), b.space.spec.shard_bytes) for b in todo if b.host is not None
        ]
        loop = asyncio.get_running_loop()
        digests = await undisturbed(loop.run_in_executor(self._executor, _digest_all, views))
        for block, digest in zip(todo, digests, strict=True):
            block.digests = digest

    async def complete(self, blocks: Sequence[Block], timeout: float) -> None:
        """Compute what is missing, as far as there is time: `timeout` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        for at in range(0, len(blocks), _BATCH):
            batch = [b for b in blocks[at : at + _BATCH] if b.host is not None and not b.dead]
            if loop.time() >= deadline:
                break
            self._hold(batch)
            try:
                await self.digest(batch)
            except Exception:
                # The boundary of a batch, as in `_run`.
                log.exception("digests failed")
            finally:
                self._release(batch)
        self._on_released()

    async def _run(self) -> None:
        while True:
            if not self._queue:
                self._work.clear()
                await self._work.wait()
                await self._lull()
            batch: list[Block] = []
            while self._queue and len(batch) < _BATCH:
                block = self._queue.popleft()
                if block.host is not None and not block.dead and block.digests is None:
                    batch.append(block)
            self._hold(batch)
            try:
                await self.digest(batch)
            except Exception:
                # The boundary of a batch: its blocks get their digests before they are flushed.
                log.exception("digests failed")
            finally:
                self._release(batch)
                self._on_released()

    def _hold(self, batch: Sequence[Block]) -> None:
        self.held += batch
        for block in batch:
            self._index.hold_host(block)

    def _release(self, batch: Sequence[Block]) -> None:
        for block in batch:
            self.held.remove(block)
            self._index.release_host(block)
