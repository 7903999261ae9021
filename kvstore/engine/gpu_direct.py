"""Promotion from disk straight to the GPU pool, for whoever wants blocks there and nowhere else.

A block is read once however many wait for it. The copy on disk and the GPU slot are held until the
engine is done with both; cancelling only takes a waiter away. What the engine fails to deliver goes
the other way, through host memory; what is damaged is a miss, dropped with what hangs on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from kvstore import tracing
from kvstore.miss import MissReason
from kvstore.prefetch.estimate import PathEstimate
from kvstore.tiers.base import Outcome
from kvstore.tiers.gpu_reader import DirectRead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.engine.counters import Counters
    from kvstore.engine.gpu_mover import GpuMover
    from kvstore.engine.gpu_room import GpuRoom
    from kvstore.engine.gpu_side import GpuRunWaiter
    from kvstore.index import Block, BlockIndex
    from kvstore.tiers.base import Slot
    from kvstore.tiers.gpu_reader import GpuReader

__all__ = ["GpuDirect"]

log = logging.getLogger(__name__)

_BATCH_BYTES: Final = 32 << 20
# The loop attends to nothing else for a few microseconds a block.
_BATCH_BLOCKS: Final = 256
_BATCHES_AT_ONCE: Final = 2


class GpuDirect:
    """Reads blocks into the GPU pool.

    Attributes:
        path: how fast that goes.
        through_host: takes blocks, with who waits for each, that have to come the other way.
        on_corrupt: called for a block whose bytes do not match their digests.
    """

    def __init__(
        self,
        index: BlockIndex,
        reader: GpuReader,
        room: GpuRoom,
        mover: GpuMover,
        counters: Counters,
    ) -> None:
        """Compose."""
        self.through_host: Callable[[Block, GpuRunWaiter], None] = lambda *_: None
        self.on_corrupt: Callable[[Block], None] = lambda _: None
        self._index = index
        self._reader = reader
        self._room = room
        self._mover = mover
        self._counters = counters
        self.path = PathEstimate()
        self._bytes = 0
        self._waiters: dict[Block, list[GpuRunWaiter]] = {}
        # Of the requests that want a block there, as far as they are traced.
        self._traceparents: dict[Block, tuple[str, ...]] = {}
        self._queue: deque[Block] = deque()
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to serve."""
        self._tasks = [
            asyncio.create_task(self._serve(), name=f"gpu-direct-{i}")
            for i in range(_BATCHES_AT_ONCE)
        ]

    async def stop(self) -> None:
        """Stop; reads under way finish first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        """Return the number of blocks queued or on their way."""
        return len(self._waiters)

    @property
    def queued_bytes(self) -> int:
        """Bytes of blocks that have not begun to move."""
        return max(0, self._bytes - self.path.in_flight)

    @property
    def usable(self) -> bool:
        """Whether blocks should come this way now."""
        return self._reader.usable

    def request(self, blocks: Iterable[Block], waiter: GpuRunWaiter) -> None:
        """Bring blocks that are on disk, with digests, and tell the waiter about each."""
        carried = tracing.carried()
        for block in blocks:
            waiters = self._waiters.get(block)
            if carried:
                self._traceparents[block] = (*self._traceparents.get(block, ()), carried)
            if waiters is None:
                waiters = self._waiters[block] = []
                self._index.hold_disk(block)
                self._bytes += block.space.shape.block_bytes
                self._queue.append(block)
            waiters.append(waiter)
        self._work.set()

    def cancel(self, blocks: Iterable[Block], waiter: GpuRunWaiter) -> None:
        """Take a waiter away; blocks that nobody waits for are skipped when their turn comes."""
        for block in blocks:
            waiters = self._waiters.get(block, [])
            if waiter in waiters:
                waiters.remove(waiter)

    async def _serve(self) -> None:
        while True:
            batch = self._next()
            if not batch:
                self._work.clear()
                await self._work.wait()
                continue
            # What goes through host instead, and what leaves for the batch, hangs on it.
            with self._begin_span(batch) as span:
                try:
                    await self._bring(batch)
                except Exception:
                    # The boundary of a batch: what one of them met must not end the service of all.
                    log.exception("reading to the gpu failed")
                if span is not tracing.OFF:
                    span.set(landed_blocks=sum(block.gpu is not None for block in batch))

    def _begin_span(self, batch: Sequence[Block]) -> tracing.Span:
        if not self._traceparents:
            return tracing.OFF
        traced = [text for block in batch for text in self._traceparents.get(block, ())]
        size = len(batch) * batch[0].space.shape.block_bytes
        return tracing.batch_span("kvstore.promote_direct", traced, blocks=len(batch), bytes=size)

    def _next(self) -> list[Block]:
        """Take the first blocks of one shape, up to a batch."""
        batch: list[Block] = []
        size = 0
        while self._queue and len(batch) < _BATCH_BLOCKS:
            block = self._queue[0]
            shape = block.space.shape
            wanted = self._waiters[block] and not block.dead and block.gpu is None
            if not wanted:
                self._queue.popleft()
                self._end(block, MissReason.OTHER_EPOCH)
                continue
            full = size + shape.block_bytes > _BATCH_BYTES
            if batch and (shape != batch[0].space.shape or full):
                break
            self._queue.popleft()
            batch.append(block)
            size += shape.block_bytes
        return batch

    async def _bring(self, batch: Sequence[Block]) -> None:
        slots: list[Slot] = []
        outcomes: list[Outcome] = []
        admitted: set[Block] = set()
        try:
            admitted = self._room.admit(batch)
            batch = sorted(batch, key=lambda block: block not in admitted)
            shape = batch[0].space.shape
            newest = max(block.sequence for block in batch)
            if admitted:
                slots = await self._mover.slots(shape, len(admitted), newest)
            reads = []
            for block, slot in zip(batch, slots, strict=False):
                assert block.disk is not None
                assert block.digests is not None
                lengths = block.space.spec.shard_bytes
                reads.append(DirectRead(block.disk, slot, shape.slot_bytes, lengths, block.digests))
            outcomes = await self._timed(reads, shape.block_bytes)
        finally:
            # Also when cancelled: by then the engine is done with disk and device.
            self._room.arrived(admitted)
            for at, block in enumerate(batch):
                taken = slots[at] if at < len(slots) else None
                outcome = outcomes[at] if at < len(outcomes) else Outcome.IO_ERROR
                self._land(block, taken, outcome)

    async def _timed(self, reads: Sequence[DirectRead], block_bytes: int) -> list[Outcome]:
        """Read, and take note of how fast that went."""
        loop = asyncio.get_running_loop()
        outcomes: list[Outcome] = []
        number = self.path.begin(len(reads) * block_bytes, loop.time())
        try:
            outcomes = await self._reader.read(reads)
        finally:
            self.path.end(number, outcomes.count(Outcome.OK) * block_bytes, loop.time())
        return outcomes

    def _land(self, block: Block, slot: Slot | None, outcome: Outcome) -> None:
        if slot is None:
            self._end(block, MissReason.NO_ROOM)
            return
        if outcome is Outcome.OK and not block.dead and block.gpu is None:
            self._index.put_gpu(block, slot)
            self._counters.counts["promoted_blocks_gpu"] += 1
            self._counters.counts["direct_blocks_gpu"] += 1
            self._end(block, MissReason.NONE)
            return
        self._room.free(slot)
        if outcome is Outcome.CORRUPT:
            self.on_corrupt(block)
            self._end(block, MissReason.CORRUPT)
        elif block.dead or block.gpu is not None:
            self._end(block, MissReason.OTHER_EPOCH)
        else:
            waiters = self._forget(block)
            for waiter in waiters:
                self.through_host(block, waiter)
            self._index.release_disk(block)

    def _forget(self, block: Block) -> list[GpuRunWaiter]:
        self._traceparents.pop(block, None)
        self._bytes -= block.space.shape.block_bytes
        return self._waiters.pop(block)

    def _end(self, block: Block, reason: MissReason) -> None:
        """Forget a block and tell who waits for it."""
        waiters = self._forget(block)
        self._index.release_disk(block)
        for waiter in waiters:
            if block.gpu is not None and not block.dead:
                waiter.arrived(block)
            else:
                waiter.failed(block, reason)
