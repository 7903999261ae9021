"""Promotion: moving blocks from a slower tier into memory, one read per block.

Whoever wants blocks names them in chain order with a waiter. A block that is already on its way
gets one more waiter, not one more read. Requests are served by priority, then in order of
arrival, a batch at a time; several batches are under way at once.

A move holds its source copy and its destination slot until the last system call has returned:
cancelling takes a waiter away, and drops moves that nobody waits for only if they have not begun.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.errors import TierError
from kvstore.miss import MissReason
from kvstore.tiers.base import Outcome, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.index import Block, BlockIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.base import Slot, Tier

__all__ = ["Promoter", "PromotionHost", "Waiter"]

log = logging.getLogger(__name__)

_BATCH_BYTES: Final = 16 << 20
_BATCHES_AT_ONCE: Final = 3
_ROOM_POLL_SECONDS: Final = 0.05


class Waiter(Protocol):
    """Who waits for promotions. Called on the event loop; must not block or raise."""

    def landed(self, block: Block) -> None:
        """The block has a host copy now; hold it at once or it may be evicted again."""

    def failed(self, block: Block, reason: MissReason) -> None:
        """The block is not coming."""


class PromotionHost(Protocol):
    """What the promoter needs of the memory tier."""

    def take(self, shape: BlockShape, count: int) -> list[Slot]:
        """Take up to `count` slots now."""

    def free(self, slot: Slot) -> None:
        """Give a slot back unused."""

    def views(self, slot: Slot) -> tuple[memoryview, ...]:
        """Return the slot's memory, one buffer per shard."""

    async def room(self, timeout: float) -> bool:
        """Wait until something was freed."""

    def may_come(self, shape: BlockShape) -> bool:
        """Return whether waiting for room can help."""


@dataclass(eq=False, slots=True)
class _Move:
    block: Block
    waiters: list[Waiter] = field(default_factory=list)
    started: bool = False


class Promoter:
    """Moves blocks from one tier into host memory."""

    def __init__(
        self,
        index: BlockIndex,
        source: Tier,
        host: PromotionHost,
        *,
        on_corrupt: Callable[[Block], None],
        on_read: Callable[[int, float], None],
    ) -> None:
        """Compose.

        Args:
            index: gets the new copies.
            source: tier to read from.
            host: gives slots and their memory.
            on_corrupt: called for a block whose bytes do not match their digest.
            on_read: called with blocks and seconds of each batch.
        """
        self._index = index
        self._source = source
        self._host = host
        self._on_corrupt = on_corrupt
        self._on_read = on_read
        self._moves: dict[Block, _Move] = {}
        self._queue: list[tuple[int, int, _Move]] = []
        self._order = itertools.count()
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to serve requests."""
        self._tasks = [
            asyncio.create_task(self._serve(), name=f"promoter-{i}")
            for i in range(_BATCHES_AT_ONCE)
        ]

    async def stop(self) -> None:
        """Stop; moves under way finish their system calls first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        """Return the number of blocks queued or on their way."""
        return len(self._moves)

    def request(self, blocks: Iterable[Block], waiter: Waiter, priority: int = 0) -> None:
        """Promote blocks, given in chain order, and tell the waiter about each."""
        for block in blocks:
            move = self._moves.get(block)
            if move is None:
                move = self._moves[block] = _Move(block)
                self._index.hold_disk(block)
                heapq.heappush(self._queue, (-priority, next(self._order), move))
            move.waiters.append(waiter)
        self._work.set()

    def cancel(self, blocks: Iterable[Block], waiter: Waiter) -> None:
        """Take a waiter away; moves that have begun run to their end."""
        for block in blocks:
            move = self._moves.get(block)
            if move is not None and waiter in move.waiters:
                move.waiters.remove(waiter)
                if not move.waiters and not move.started:
                    self._end(move)

    def _end(self, move: _Move) -> None:
        del self._moves[move.block]
        move.started = True  # a queue entry that is still there is skipped
        self._index.release_disk(move.block)

    async def _serve(self) -> None:
        while True:
            batch = self._next_batch()
            if not batch:
                self._work.clear()
                await self._work.wait()
                continue
            slots = self._host.take(batch[0].block.space.shape, len(batch))
            self._put_back(batch[len(slots) :])
            if slots:
                await self._move(batch[: len(slots)], slots)
            elif self._host.may_come(batch[0].block.space.shape):
                await self._host.room(_ROOM_POLL_SECONDS)
            else:
                for move in batch:
                    self._fail(move, MissReason.NO_ROOM)

    def _next_batch(self) -> list[_Move]:
        """Take queued moves of one shape, up to a batch."""
        batch: list[_Move] = []
        others: list[tuple[int, int, _Move]] = []
        while self._queue:
            entry = heapq.heappop(self._queue)
            move = entry[2]
            if move.started:
                continue
            if move.block.dead or move.block.disk is None:
                self._fail(move, MissReason.EVICTED)
                continue
            shape = move.block.space.shape
            if batch and shape != batch[0].block.space.shape:
                others.append(entry)
                break
            batch.append(move)
            if len(batch) * shape.block_bytes >= _BATCH_BYTES:
                break
        for entry in others:
            heapq.heappush(self._queue, entry)
        return batch

    def _put_back(self, moves: Sequence[_Move]) -> None:
        # Before everything that came later: the lowest order numbers are long used up, so
        # negative ones keep the moves' order among themselves.
        for i, move in enumerate(moves):
            if not move.started:
                heapq.heappush(self._queue, (-(1 << 30), i - len(moves), move))

    async def _move(self, moves: Sequence[_Move], slots: Sequence[Slot]) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        transfers = []
        for move, slot in zip(moves, slots, strict=True):
            move.started = True
            block = move.block
            assert block.disk is not None
            transfers.append(
                Transfer(
                    block.disk, self._host.views(slot), block.space.spec.shard_bytes, block.digests
                )
            )
        outcomes = [Outcome.IO_ERROR] * len(moves)
        try:
            outcomes = await self._source.read(transfers)
        except TierError as error:
            log.warning("promotion failed: %s", error)
        finally:
            # Also when cancelled: by then the last system call has returned.
            for move, slot, outcome in zip(moves, slots, outcomes, strict=True):
                self._land(move, slot, outcome)
        self._on_read(len(moves), loop.time() - begun)

    def _land(self, move: _Move, slot: Slot, outcome: Outcome) -> None:
        block = move.block
        if outcome is Outcome.OK and not block.dead and block.host is None:
            self._index.hold_host(block)
            self._index.put_host(block, slot)
            waiters = list(move.waiters)
            self._end(move)
            for waiter in waiters:
                waiter.landed(block)
            self._index.release_host(block)
            return
        self._host.free(slot)
        if outcome is Outcome.OK and block.host is not None and not block.dead:
            waiters = list(move.waiters)
            self._end(move)
            for waiter in waiters:
                waiter.landed(block)
            return
        if outcome is Outcome.CORRUPT:
            self._on_corrupt(block)
            self._fail(move, MissReason.CORRUPT)
        elif block.dead:
            self._fail(move, MissReason.EVICTED)
        else:
            self._fail(move, MissReason.IO_ERROR)

    def _fail(self, move: _Move, reason: MissReason) -> None:
        waiters = list(move.waiters)
        self._end(move)
        for waiter in waiters:
            waiter.failed(move.block, reason)
