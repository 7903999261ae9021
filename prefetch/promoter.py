"""Promotion: moving blocks from a slower tier into memory, one read per block.

Whoever wants blocks names them in chain order with a waiter; that is a job. A block that is already
on its way gets one more job, not one more read. Jobs are served in the order of `queue`, a batch at
a time; several batches are under way at once. A job's first batch is small and each next one twice
as large, so that its first block can be used after about one block's time; no batch is larger than
what the path moves in a few milliseconds, so that nobody waits long behind a batch, and what is
taken in passing before shorter jobs is as small as a first batch. A shape without room for now lets
the others go first and keeps its place.

A move holds its source copy from the request on, and its destination slot until the last system call
has returned: cancelling takes a waiter away, and drops moves that nobody waits for only if they have
not begun. Telling a waiter may make it cancel others of its moves, so whoever tells several looks at
each move's state again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

from kvstore import tracing
from kvstore.errors import TierError
from kvstore.miss import MissReason
from kvstore.prefetch.admission import admitted, at_whose_cost, loses_nothing
from kvstore.prefetch.ahead import bytes_ahead
from kvstore.prefetch.batch import (
    BATCHES_AT_ONCE,
    batch_bytes,
    first_bytes,
    least_priority,
    passing_bytes,
)
from kvstore.prefetch.estimate import PathEstimate
from kvstore.prefetch.move import Kind, Move, MoveState, Waiter, WaiterJob
from kvstore.prefetch.passed_over import PassedOver
from kvstore.prefetch.queue import Job, JobQueue
from kvstore.prefetch.wanted import Wanted
from kvstore.tiers.base import Outcome, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from kvstore.index import Block, BlockIndex
    from kvstore.prefetch.host_room import HostRoom
    from kvstore.space import BlockShape
    from kvstore.tiers.base import Slot, Tier

__all__ = ["Promoter"]

log = logging.getLogger(__name__)


class Promoter:
    """Moves blocks from one tier into host memory.

    Attributes:
        path: how fast that goes.
        moving: host slots that are being filled: they will be blocks soon.
    """

    def __init__(
        self,
        index: BlockIndex,
        source: Tier,
        host: HostRoom,
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
        self._moves: dict[Block, Move] = {}
        self._jobs: dict[tuple[Waiter, BlockShape, int], WaiterJob] = {}
        self._queue: JobQueue[Move] = JobQueue()
        self._bytes = 0
        # For the batch that seeks room: what was taken out of whose items, and who has none left.
        self._taken: list[tuple[WaiterJob, Move]] = []
        self._emptied: list[WaiterJob] = []
        self._work = asyncio.Event()
        self._passed_over = PassedOver(host, self._work.set)
        self._tasks: list[asyncio.Task[None]] = []
        self.path = PathEstimate()
        self.moving = 0
        self._failing = False

    def start(self) -> None:
        """Begin to serve requests."""
        self._tasks = [
            asyncio.create_task(self._serve(), name=f"promoter-{i}") for i in range(BATCHES_AT_ONCE)
        ]

    async def stop(self) -> None:
        """Stop; moves under way finish their system calls first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._passed_over.stop()

    def __len__(self) -> int:
        """Return the number of blocks queued or on their way."""
        return len(self._moves)

    @property
    def jobs(self) -> int:
        """Number of jobs that have not ended."""
        return len(self._jobs)

    @property
    def queued_bytes(self) -> int:
        """Bytes of blocks queued or on their way."""
        return self._bytes

    def request(
        self,
        blocks: Iterable[Block],
        waiter: Waiter,
        priority: int = 0,
        deadline: float = math.inf,
        slack: float = math.inf,
    ) -> None:
        """Promote blocks of one shape, given in chain order, and tell the waiter about each.

        Args:
            blocks: each has a disk copy.
            waiter: who is told.
            priority: class; higher goes first.
            deadline: loop time after which what has not begun is not wanted any more.
            slack: bytes of shorter jobs that may still be put before these, beyond `ahead_bytes`;
                infinite when nobody counts on when they arrive.
        """
        job: WaiterJob | None = None
        wanted = Wanted(self._queue, priority)
        for block in blocks:
            shape = block.space.shape
            if job is None:
                name = (waiter, shape, priority)
                job = self._jobs.get(name)
                if job is None:
                    job = WaiterJob(waiter, shape, priority, deadline, slack)
                    self._jobs[name] = job
            move = self._moves.get(block)
            if move is None:
                move = self._moves[block] = Move(block)
                self._bytes += shape.block_bytes
                self._index.hold_disk(block)
            if job not in move.jobs:
                wanted.add(move, shape.block_bytes)
                move.jobs[job] = None
                job.moves += 1
                job.left += shape.block_bytes
                if move.state is MoveState.QUEUED:
                    job.items.append(move)
                elif move.state is MoveState.MOVING:
                    job.moving += shape.block_bytes
        if job is not None:
            job.brought += wanted.brought
            for other, size in wanted.shared.items():
                job.shared[other] = job.shared.get(other, 0) + size
            if job.items:
                self._queue.add(job)
        self._work.set()

    def spare(self, waiter: Waiter, shape: BlockShape, priority: int, slack: float) -> None:
        """Put no more before a waiter's blocks from now on than he can spare as things are now.

        Args:
            waiter: who waits.
            shape: of the blocks.
            priority: at which they were asked for.
            slack: see `request`; what he had spared before is not given back.
        """
        job = self._jobs.get((waiter, shape, priority))
        if job is not None and job.told:
            job.slack = min(job.slack, slack)

    def ahead_bytes(
        self, blocks: Iterable[Block], priority: int, waiter: Waiter | None = None
    ) -> int:
        """Return how many bytes would be read before these blocks; those in flight not counted.

        Args:
            blocks: of one shape.
            priority: at which they are, or would be, asked for.
            waiter: who waits for them already: nobody waits for himself.

        Returns:
            less than nothing when some of the blocks are themselves in flight.
        """
        wanted = list(blocks)
        job: WaiterJob | None = None
        if waiter is not None and wanted:
            job = self._jobs.get((waiter, wanted[0].space.shape, priority))
        return bytes_ahead(self._queue, self._moves, self._bytes, self.path, wanted, priority, job)

    def cancel(self, blocks: Iterable[Block], waiter: Waiter) -> None:
        """Take a waiter away; moves that have begun run to their end."""
        left: dict[WaiterJob, None] = {}
        for block in blocks:
            move = self._moves.get(block)
            if move is None:
                continue
            for job in [job for job in move.jobs if job.waiter is waiter]:
                self._leave(job, move)
                left[job] = None
        for job in left:
            self._queue.changed(job)

    def _leave(self, job: WaiterJob, move: Move) -> None:
        """A job does not want a move any more; the queue is told by the caller."""
        del move.jobs[job]
        for other in move.jobs:
            other.orphaned(job, move.block.space.shape.block_bytes)
        self._settle(job, move)
        if not move.jobs and move.state is MoveState.QUEUED:
            self._end(move)

    def _settle(self, job: WaiterJob, move: Move) -> None:
        """Count a move as over for a job, whatever it came to; the queue is told by the caller."""
        size = move.block.space.shape.block_bytes
        job.moves -= 1
        job.left -= size
        if move.state is MoveState.MOVING:
            job.moving -= size
        if not job.moves:
            self._queue.remove(job)
            job.shared.clear()
            name = (job.waiter, move.block.space.shape, job.priority)
            if self._jobs.get(name) is job:
                del self._jobs[name]

    def _end(self, move: Move) -> list[Waiter]:
        """Forget a move; return who waits for it."""
        del self._moves[move.block]
        self._bytes -= move.block.space.shape.block_bytes
        self._index.release_disk(move.block)
        jobs, move.jobs = move.jobs, {}
        for job in jobs:
            self._settle(job, move)
            self._queue.changed(job)
        move.state = MoveState.ENDED
        return list(dict.fromkeys(job.waiter for job in jobs))

    async def _serve(self) -> None:
        while True:
            batch = self._next_batch()
            if not batch:
                self._work.clear()
                await self._work.wait()
                continue
            if not (batch := self._within_quotas(batch)):
                continue
            shape, older_than = batch[0].block.space.shape, at_whose_cost(batch)
            slots = self._host.take(shape, len(batch), older_than, lossless=loses_nothing(batch))
            if slots:
                self._put_back(batch[len(slots) :])
                await self._move(batch[: len(slots)], slots)
                self._work.set()
            elif self._host.may_come(shape, promoting=True):
                self._put_back(batch)
                # Those who may push out more than these may still find some.
                self._passed_over.add({Kind(shape, False), Kind(shape, older_than is None)})
            else:
                for move in batch:
                    self._fail_taken(move, MissReason.NO_ROOM)

    def _within_quotas(self, batch: list[Move]) -> list[Move]:
        """Return the moves that the quotas of their spaces allow now; the others come to nothing."""
        older_than, lossless = at_whose_cost(batch), loses_nothing(batch)
        blocks, admit = [move.block for move in batch], self._host.admit
        fits = admitted(blocks, lambda s, n: admit(s, n, older_than, lossless=lossless))
        for move, fit in zip(batch, fits, strict=True):
            if not fit:
                self._fail_taken(move, MissReason.NO_ROOM)
            elif not move.jobs:
                self._end(move)  # who heard that others are not coming gave it up
        return [move for move in batch if move.state is MoveState.TAKEN]

    def _put_back(self, moves: Sequence[Move]) -> None:
        """Moves that found no room are next in their jobs again, and these stand where they stood."""
        for move in moves:
            if move.jobs:
                move.state = MoveState.QUEUED
            else:
                self._end(move)  # who heard that another one is not coming gave it up
        for job, move in reversed(self._taken):
            if move.state is MoveState.QUEUED and job in move.jobs:
                job.items.appendleft(move)
        for job in reversed(self._emptied):
            if job.items:
                self._queue.back(job)

    def _next_batch(self) -> list[Move]:
        """Take the queued moves that come first among those of one shape, up to a batch.

        A job that has nothing more to begin lets the next one fill the batch.
        """
        while True:
            batch = self._gather()
            # Those who hear that a block is dead may not want others of the batch any more.
            for move in batch:
                if move.block.dead:
                    self._fail_taken(move, self._cause(move.block))
                elif not move.jobs:
                    self._end(move)
            left = [move for move in batch if move.state is MoveState.TAKEN]
            if left or not batch:
                return left

    def _gather(self) -> list[Move]:
        batch: list[Move] = []
        room = 0
        self._taken.clear()
        self._emptied.clear()
        now = asyncio.get_running_loop().time()
        while (job := self._pick(batch)) is not None:
            assert isinstance(job, WaiterJob)
            if job.deadline <= now:
                self._drop(job)
                continue
            move = self._next_move(job)
            if move is None:
                self._empty(job)
                continue
            size = move.block.space.shape.block_bytes
            most = first_bytes(size)
            if not batch:
                room = batch_bytes(self.path, size)
            if not job.in_passing:
                most <<= min(job.batches - 1, 8)
            while move is not None and (not batch or size <= min(room, most)):
                job.items.popleft()
                move.state = MoveState.TAKEN
                self._taken.append((job, move))
                batch.append(move)
                room -= size
                most -= size
                move = self._next_move(job)
            if move is not None:
                break
            self._empty(job)
        return batch

    def _empty(self, job: WaiterJob) -> None:
        """A job has nothing more to begin, unless its moves are put back."""
        self._queue.remove(job)
        self._emptied.append(job)

    def _pick(self, batch: Sequence[Move]) -> Job[Move] | None:
        """Return the job that goes next, of those whose blocks may join a batch."""
        if not batch:
            return self._queue.pick(
                lambda kind: kind not in self._passed_over,
                least=least_priority(self.path),
                passing=self._passing,
            )
        shape = batch[0].block.space.shape
        kinds = (Kind(shape, True), Kind(shape, False))
        joining = [kind for kind in kinds if kind not in self._passed_over]
        return self._queue.pick(joining.__contains__, filling=True)

    def _passing(self, kind: Hashable) -> int:
        assert isinstance(kind, Kind)
        return passing_bytes(self.path, kind.shape.block_bytes)

    def _next_move(self, job: WaiterJob) -> Move | None:
        """Return the first move that a job wants and nobody has begun; it stays where it is."""
        items = job.items
        while items:
            move = items[0]
            if move.state is MoveState.QUEUED and job in move.jobs:
                return move
            items.popleft()
            if move.state is MoveState.TAKEN:
                self._taken.append((job, move))
        return None

    def _drop(self, job: WaiterJob) -> None:
        """The job's deadline has passed: what has not begun is not wanted any more."""
        self._empty(job)
        for move in list(job.items):
            if move.state is MoveState.QUEUED and job in move.jobs:
                self._leave(job, move)
                job.waiter.failed(move.block, MissReason.DEADLINE)
            elif move.state is MoveState.TAKEN:
                self._taken.append((job, move))
        job.items.clear()

    def _cause(self, block: Block) -> MissReason:
        """Say why a block that was discarded is not there any more."""
        ghost = self._index.ghosts.get(block.space.id, block.key)
        corrupt = ghost is not None and ghost.cause == "corrupt"
        return MissReason.CORRUPT if corrupt else MissReason.OTHER_EPOCH

    async def _move(self, moves: Sequence[Move], slots: Sequence[Slot]) -> None:
        loop = asyncio.get_running_loop()
        transfers = []
        for move, slot in zip(moves, slots, strict=True):
            move.state = MoveState.MOVING
            block = move.block
            for job in move.jobs:
                job.moving += block.space.shape.block_bytes
            block.space.host_arriving += 1
            assert block.disk is not None
            transfers.append(
                Transfer(
                    block.disk, self._host.views(slot), block.space.spec.shard_bytes, block.digests
                )
            )
        outcomes = [Outcome.IO_ERROR] * len(moves)
        size = moves[0].block.space.shape.block_bytes
        number = self.path.begin(len(moves) * size, loop.time())
        self.moving += len(moves)
        span = tracing.OFF
        if tracing.recording():
            traced = [job.traceparent for move in moves for job in move.jobs]
            about = {"blocks": len(moves), "bytes": len(moves) * size}
            span = tracing.batch_span("kvstore.promote", traced, **about)
        # Log lines of it, and what is asked for because of it, such as the way on to the GPU,
        # belong to the trace.
        with tracing.using(span):
            try:
                outcomes = await self._read(transfers)
            finally:
                # Also when cancelled: by then the last system call has returned.
                self.moving -= len(moves)
                arrived = sum(outcome is not Outcome.IO_ERROR for outcome in outcomes)
                seconds = self.path.end(number, arrived * size, loop.time())
                if arrived < len(moves):
                    span.fail(f"{len(moves) - arrived} blocks could not be read")
                span.end()
                for move, slot, outcome in zip(moves, slots, outcomes, strict=True):
                    self._land(move, slot, outcome)
        self._on_read(len(moves), seconds)

    async def _read(self, transfers: Sequence[Transfer]) -> list[Outcome]:
        """Read; what goes wrong for all of them is logged."""
        try:
            outcomes = await self._source.read(transfers)
        except TierError as error:
            # Said once: a device that is gone fails every batch, and its tier says so too.
            log.log(logging.DEBUG if self._failing else logging.WARNING, "read failed: %s", error)
            self._failing = True
        except Exception:
            # The boundary of a batch: what one of them met must not end the service of all.
            log.exception("promotion failed")
        else:
            self._failing = False
            return outcomes
        return [Outcome.IO_ERROR] * len(transfers)

    def _land(self, move: Move, slot: Slot, outcome: Outcome) -> None:
        block = move.block
        block.space.host_arriving -= 1
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

    def _fail_taken(self, move: Move, reason: MissReason) -> None:
        """A move of a batch comes to nothing; failing another one may have ended it."""
        if move.jobs:
            self._fail(move, reason)
        elif move.state is MoveState.TAKEN:
            self._end(move)

    def _fail(self, move: Move, reason: MissReason) -> None:
        for waiter in self._end(move):
            waiter.failed(move.block, reason)
