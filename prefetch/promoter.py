"""Promotion: moving blocks from a slower tier into memory, one read per block.

Whoever wants blocks names them in chain order with a waiter. A block that is already on its way
gets one more waiter, not one more read. Requests are served by priority, then in order of
arrival, a batch at a time; several batches are under way at once. A shape without room for now
lets the others go first and keeps its place.

A move is queued, then moving, then ended. It holds its source copy from the request on, and its
destination slot until the last system call has returned: cancelling takes a waiter away, and
drops moves that nobody waits for only if they have not begun. Telling a waiter may make it cancel
others of its moves, so whoever tells several looks at each move's state again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from dataclasses import dataclass, field
from enum import Enum
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
    """Who waits for promotions. Called on the event loop; must not block or raise.

    Attributes:
        holding: it holds what lands. Room for others is made only at the cost of blocks that
            were used less recently: prefetching a chain longer than the pool keeps its head.
    """

    holding: bool

    def landed(self, block: Block) -> None:
        """The block has a host copy now; hold it at once or it may be evicted again."""

    def failed(self, block: Block, reason: MissReason) -> None:
        """The block is not coming."""


class PromotionHost(Protocol):
    """What the promoter needs of the memory tier."""

    def take(self, shape: BlockShape, count: int, older_than: int | None) -> list[Slot]:
        """Take up to `count` slots now; evict only blocks of lower sequence, if that is given."""

    def free(self, slot: Slot) -> None:
        """Give a slot back unused."""

    def views(self, slot: Slot) -> tuple[memoryview, ...]:
        """Return the slot's memory, one buffer per shard."""

    async def room(self, timeout: float) -> bool:
        """Wait until something was freed."""

    def may_come(self, shape: BlockShape, *, promoting: bool) -> bool:
        """Return whether waiting for room can help.

        `promoting`: what is held only by those who themselves wait for promotions does not count.
        """


class _State(Enum):
    QUEUED = 1
    MOVING = 2
    ENDED = 3


@dataclass(eq=False, slots=True)
class _Move:
    block: Block
    place: tuple[int, int]  # in its queue: minus the priority, order of arrival
    waiters: list[Waiter] = field(default_factory=list)
    state: _State = _State.QUEUED


_Queue = list[tuple[tuple[int, int], _Move]]


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
        self._queues: dict[BlockShape, _Queue] = {}
        # Shapes for which there was no room a moment ago.
        self._stalled: set[BlockShape] = set()
        self._order = itertools.count()
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        # Host slots that are being filled: they will be blocks soon.
        self.moving = 0

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
                move = self._moves[block] = _Move(block, (-priority, next(self._order)))
                self._index.hold_disk(block)
                self._enqueue(move)
            elif move.state is _State.QUEUED and -priority < move.place[0]:
                move.place = (-priority, move.place[1])  # the old entry is void
                self._enqueue(move)
            move.waiters.append(waiter)
        self._work.set()

    def cancel(self, blocks: Iterable[Block], waiter: Waiter) -> None:
        """Take a waiter away; moves that have begun run to their end."""
        for block in blocks:
            move = self._moves.get(block)
            if move is not None and waiter in move.waiters:
                move.waiters.remove(waiter)
                if not move.waiters and move.state is _State.QUEUED:
                    self._end(move)

    def _enqueue(self, move: _Move) -> None:
        queue = self._queues.setdefault(move.block.space.shape, [])
        heapq.heappush(queue, (move.place, move))

    def _end(self, move: _Move) -> list[Waiter]:
        """Forget a move; return who waits for it."""
        del self._moves[move.block]
        move.state = _State.ENDED
        self._index.release_disk(move.block)
        return move.waiters

    async def _serve(self) -> None:
        while True:
            batch = self._next_batch()
            if not batch:
                self._work.clear()
                await self._work.wait()
                continue
            shape = batch[0].block.space.shape
            slots = self._host.take(shape, len(batch), self._older_than(batch))
            for move in batch[len(slots) :]:
                self._enqueue(move)
            if slots:
                await self._move(batch[: len(slots)], slots)
            elif self._host.may_come(shape, promoting=True):
                self._stalled.add(shape)
                await self._host.room(_ROOM_POLL_SECONDS)
                self._stalled.discard(shape)
                self._work.set()
            else:
                for move in batch:
                    if move.state is _State.QUEUED:
                        self._fail(move, MissReason.NO_ROOM)

    @staticmethod
    def _older_than(batch: Sequence[_Move]) -> int | None:
        if any(waiter.holding for move in batch for waiter in move.waiters):
            return None
        return max(move.block.sequence for move in batch)

    def _next_batch(self) -> list[_Move]:
        """Take the queued moves that come first among those of one shape, up to a batch."""
        batch: list[_Move] = []
        while not batch and (shape := self._next_shape()) is not None:
            queue = self._queues[shape]
            while queue and (not batch or (len(batch) + 1) * shape.block_bytes <= _BATCH_BYTES):
                place, move = heapq.heappop(queue)
                if self._is_current(place, move):
                    batch.append(move)
            for move in batch:
                if move.block.dead and move.state is _State.QUEUED:
                    self._fail(move, self._cause(move.block))
            batch = [move for move in batch if move.state is _State.QUEUED]
        return batch

    def _next_shape(self) -> BlockShape | None:
        """Return the shape of the move that comes first, those without room left out."""
        heads = []
        for shape, queue in list(self._queues.items()):
            while queue and not self._is_current(*queue[0]):
                heapq.heappop(queue)
            if not queue:
                del self._queues[shape]
            elif shape not in self._stalled:
                heads.append((queue[0][0], shape))
        return min(heads)[1] if heads else None

    @staticmethod
    def _is_current(place: tuple[int, int], move: _Move) -> bool:
        return move.state is _State.QUEUED and move.place == place

    def _cause(self, block: Block) -> MissReason:
        """Say why a block that was discarded is not there any more."""
        ghost = self._index.ghosts.get(block.space.id, block.key)
        corrupt = ghost is not None and ghost.cause == "corrupt"
        return MissReason.CORRUPT if corrupt else MissReason.OTHER_EPOCH

    async def _move(self, moves: Sequence[_Move], slots: Sequence[Slot]) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        transfers = []
        for move, slot in zip(moves, slots, strict=True):
            move.state = _State.MOVING
            block = move.block
            assert block.disk is not None
            transfers.append(
                Transfer(
                    block.disk, self._host.views(slot), block.space.spec.shard_bytes, block.digests
                )
            )
        outcomes = [Outcome.IO_ERROR] * len(moves)
        self.moving += len(moves)
        try:
            outcomes = await self._source.read(transfers)
        except TierError as error:
            log.warning("promotion failed: %s", error)
        except Exception:
            # The boundary of a batch: what one of them met must not end the service of all.
            log.exception("promotion failed")
        finally:
            # Also when cancelled: by then the last system call has returned.
            self.moving -= len(moves)
            for move, slot, outcome in zip(moves, slots, outcomes, strict=True):
                self._land(move, slot, outcome)
        self._on_read(len(moves), loop.time() - begun)

    def _land(self, move: _Move, slot: Slot, outcome: Outcome) -> None:
        block = move.block
        if outcome is Outcome.OK and not block.dead:
            # Only the one move of a block gives it a host copy, so it has none now.
            self._index.hold_host(block)
            self._index.put_host(block, slot)
            for waiter in self._end(move):
                waiter.landed(block)
            self._index.release_host(block)
            return
        self._host.free(slot)
        if outcome is Outcome.CORRUPT:
            self._on_corrupt(block)
            self._fail(move, MissReason.CORRUPT)
        elif block.dead:
            self._fail(move, self._cause(block))
        else:
            self._fail(move, MissReason.IO_ERROR)

    def _fail(self, move: _Move, reason: MissReason) -> None:
        for waiter in self._end(move):
            waiter.failed(move.block, reason)
