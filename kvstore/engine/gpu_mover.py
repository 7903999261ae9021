"""Moves between host memory and the GPU pool.

Up: what somebody asks for (`request`), and, behind it, what was leased from host memory and let go
of (`used`): its next use comes from the GPU. The latter comes in the order of how often it is used,
and makes room only at the cost of what is used less often (`gpu_demand`). Down: hot copies that have to leave and are on disk
otherwise, while host has room. Bytes in host were checked when they arrived there; on the way down
they are checked again.

A move holds its source and its destination until the device has finished. What is to come by use
only is paced while anybody loads: one batch, then a pause as long. A block that is gone, or has a
GPU copy already, when its turn comes is skipped.

After a crash nothing is left: the pool was the process's.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvstore import tracing
from kvstore.engine.gpu_ascents import Ascent, AscentQueue
from kvstore.errors import TierError
from kvstore.miss import MissReason
from kvstore.prefetch.estimate import PathEstimate
from kvstore.tiers.base import Outcome, TierName, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.engine.counters import Counters
    from kvstore.engine.gpu_ascents import GpuWaiter
    from kvstore.engine.gpu_demand import GpuDemand
    from kvstore.engine.gpu_room import GpuRoom
    from kvstore.engine.room import HostRoom
    from kvstore.index import Block, BlockIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.base import Slot
    from kvstore.tiers.gpu import GpuTier

__all__ = ["GpuMover"]

log = logging.getLogger(__name__)

# Large enough that the bus, not the submitting, takes the time.
_BATCH_BYTES: Final = 64 << 20
# The loop attends to nothing else for a few microseconds a block.
_BATCH_BLOCKS: Final = 256
_BATCHES_AT_ONCE: Final = 2
# A load that begins waits for no more than this on the bus.
_PACED_BATCH_BYTES: Final = 16 << 20
_PAUSE_SECONDS: Final = 0.001
_ONLY_FREE: Final = -1


class GpuMover:
    """Copies blocks up and down.

    Attributes:
        path: how fast blocks go up.
    """

    def __init__(
        self,
        index: BlockIndex,
        host_room: HostRoom,
        gpu: GpuTier,
        room: GpuRoom,
        demand: GpuDemand,
        counters: Counters,
        *,
        loading: Callable[[], bool],
        on_released: Callable[[], None],
    ) -> None:
        """Compose.

        Args:
            index: gets the new copies.
            host_room: of host memory.
            gpu: the tier.
            room: in it.
            demand: how often blocks are used.
            counters: of what happened.
            loading: whether anybody loads now.
            on_released: host copies may leave that could not before.
        """
        self._index = index
        self._host_room = host_room
        self._gpu = gpu
        self._room = room
        self._demand = demand
        self._counters = counters
        self._loading = loading
        self._on_released = on_released
        self.path = PathEstimate()
        self._ascents: dict[Block, Ascent] = {}
        self._wanted = AscentQueue()
        self._later = AscentQueue()
        self._work = asyncio.Event()
        self._paced = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to serve."""
        self._tasks = [
            asyncio.create_task(self._serve(), name=f"gpu-mover-{i}")
            for i in range(_BATCHES_AT_ONCE)
        ]

    async def stop(self) -> None:
        """Stop; what is on the bus finishes first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        """Return the number of blocks queued or on their way up."""
        return len(self._ascents)

    @property
    def wanted_bytes(self) -> int:
        """Bytes that somebody waits for and that have not begun to move."""
        return self._wanted.bytes

    def used(self, run: Sequence[Block]) -> None:
        """Blocks that were just used, in chain order: copy them up when there is time."""
        if self._gpu.state != "ok" or not run:
            return
        limit = self._gpu.usage().capacity_bytes
        # Of a run that is longer than the pool the head is what can stay there.
        for block in run[: limit // run[0].space.shape.block_bytes]:
            if block.gpu is not None or not block.readable or block.dead:
                continue
            ascent = self._ascents.get(block)
            if ascent is None:
                ascent = self._ascents[block] = Ascent(block)
            elif not self._later.remove(ascent):
                continue
            self._later.add(ascent, self._demand.uses(block))
        while self._later.bytes > limit and (least := self._later.least()) is not None:
            self._forget(least)
            self._counters.counts["gpu_promotions_dropped"] += 1
        self._work.set()

    def request(self, blocks: Iterable[Block], waiter: GpuWaiter) -> None:
        """Copy blocks that are readable in host up soon, and tell the waiter about each."""
        carried = tracing.carried()
        for block in blocks:
            if block.gpu is not None or self._gpu.state != "ok":
                self._tell(block, [waiter])
                continue
            ascent = self._ascents.get(block)
            if ascent is None:
                ascent = self._ascents[block] = Ascent(block)
            ascent.waiters.append(waiter)
            if carried:
                ascent.traceparents += (carried,)
            if not ascent.moving and block not in self._wanted:
                self._later.remove(ascent)
                self._wanted.add(ascent)
                self._index.hold_host(block)
                ascent.held = True
        self._work.set()

    def cancel(self, blocks: Iterable[Block], waiter: GpuWaiter) -> None:
        """Take a waiter away; what nobody waits for and has not begun is dropped."""
        for block in blocks:
            ascent = self._ascents.get(block)
            if ascent is not None and waiter in ascent.waiters:
                ascent.waiters.remove(waiter)
                if not ascent.waiters and not ascent.moving:
                    self._forget(ascent)

    def _forget(self, ascent: Ascent) -> list[GpuWaiter]:
        """Take an ascent off every list; return who waits for it."""
        block = ascent.block
        del self._ascents[block]
        if not self._wanted.remove(ascent):
            self._later.remove(ascent)
        if ascent.held:
            ascent.held = False
            self._index.release_host(block)
            self._on_released()
        return ascent.waiters

    def _tell(
        self, block: Block, waiters: Sequence[GpuWaiter], reason: MissReason = MissReason.IO_ERROR
    ) -> None:
        for waiter in waiters:
            if block.gpu is not None and not block.dead:
                waiter.arrived(block)
            else:
                waiter.failed(block, MissReason.OTHER_EPOCH if block.dead else reason)

    async def _serve(self) -> None:
        while True:
            try:
                if self._wanted:
                    await self._ascend(self._next(self._wanted, _BATCH_BYTES))
                elif self._later and not self._loading():
                    await self._ascend(self._next(self._later, _BATCH_BYTES))
                elif self._later and not self._paced.locked():
                    await self._ascend_paced()
                else:
                    self._work.clear()
                    await self._work.wait()
            except TierError as error:
                log.warning("copying to the gpu failed: %s", error)
            except Exception:
                # The boundary of a batch: what one of them met must not end the service of all.
                log.exception("copying to the gpu failed")

    async def _ascend_paced(self) -> None:
        """Move a little, then leave the bus to others for as long."""
        loop = asyncio.get_running_loop()
        async with self._paced:
            begun = loop.time()
            await self._ascend(self._next(self._later, _PACED_BATCH_BYTES))
            await asyncio.sleep(max(_PAUSE_SECONDS, loop.time() - begun))
        self._work.set()

    def _next(self, queue: AscentQueue, limit: int) -> list[Ascent]:
        """Take the first ascents of one shape off a queue, up to a batch."""
        batch: list[Ascent] = []
        size = 0
        while len(batch) < _BATCH_BLOCKS and (ascent := queue.first()) is not None:
            block = ascent.block
            shape = block.space.shape
            full = size + shape.block_bytes > limit
            # What is used less often has another claim to room.
            other = batch and (shape, ascent.level) != (batch[0].block.space.shape, batch[0].level)
            if batch and (full or other):
                break
            if block.dead or block.gpu is not None or not block.readable:
                self._tell(block, self._forget(ascent))
                continue
            queue.remove(ascent)
            ascent.moving = True
            if not ascent.held:
                self._index.hold_host(block)
                ascent.held = True
            batch.append(ascent)
            size += shape.block_bytes
        return batch

    async def _ascend(self, batch: Sequence[Ascent]) -> None:
        """Copy a batch up as far as there is room; the batch is over then, whatever happens."""
        if not batch:
            return
        slots: list[Slot] = []
        transfers: list[Transfer] = []
        outcomes: list[Outcome] = []
        loop = asyncio.get_running_loop()
        begun = loop.time()
        span = tracing.OFF
        admitted: set[Block] = set()
        try:
            if tracing.recording():
                traced = [text for ascent in batch for text in ascent.traceparents]
                span = tracing.batch_span("kvstore.promote_gpu", traced, blocks=len(batch))
            with tracing.using(span):
                admitted = self._room.admit(ascent.block for ascent in batch)
            batch = sorted(batch, key=lambda ascent: ascent.block not in admitted)
            shape = batch[0].block.space.shape
            newest = max(ascent.block.sequence for ascent in batch)
            rare = None
            if not any(ascent.waiters for ascent in batch):
                rare = min(self._demand.uses(ascent.block) for ascent in batch)
            if admitted:
                with tracing.using(span):
                    slots = await self.slots(shape, len(admitted), newest, rare)
            transfers = [
                self._transfer(ascent.block, slot, ascent.block.host)
                for ascent, slot in zip(batch, slots, strict=False)
            ]
            number = self.path.begin(len(transfers) * shape.block_bytes, loop.time())
            try:
                outcomes = await self._gpu.write(transfers)
            finally:
                moved = outcomes.count(Outcome.OK) * shape.block_bytes
                self.path.end(number, moved, loop.time())
        finally:
            # Also when cancelled: by then the device has finished, and nothing may view a slab any
            # more when its slots become free.
            transfers.clear()
            self._room.arrived(admitted)
            landed = 0
            for at, ascent in enumerate(batch):
                done = at < len(outcomes) and outcomes[at] is Outcome.OK
                landed += self._land(ascent, slots[at] if at < len(slots) else None, done=done)
            self._counters.counts["promoted_blocks_gpu"] += landed
            span.set(landed_blocks=landed)
            span.end()
        if landed:
            self._counters.record("promote_gpu_batch", loop.time() - begun)
        if self._gpu.state != "ok":
            self._room.drop_all()

    def _transfer(self, block: Block, gpu: Slot | None, host: Slot | None) -> Transfer:
        """Describe the copy between two slots of a block."""
        assert gpu is not None
        assert host is not None
        lengths = block.space.spec.shard_bytes
        return Transfer(gpu, self._host_room.views(host), lengths, block.digests)

    def _land(self, ascent: Ascent, slot: Slot | None, *, done: bool) -> bool:
        """End one ascent; return whether the block got its copy."""
        block = ascent.block
        good = slot is not None and done and not block.dead and block.gpu is None
        if good and slot is not None:
            self._index.put_gpu(block, slot)
        elif slot is not None:
            self._room.free(slot)
        reason = MissReason.NO_ROOM if slot is None else MissReason.IO_ERROR
        self._tell(block, self._forget(ascent), reason)
        return good

    async def slots(
        self, shape: BlockShape, count: int, older_than: int, uses: int | None = None
    ) -> list[Slot]:
        """Take slots, after hot copies that have to leave were brought to host; see `GpuRoom`."""
        slots, hot = self._room.take(shape, count, older_than, uses)
        try:
            # A device that fails, or host memory that is closed, would be asked for the same for ever.
            while hot and await self._demote(shape, hot):
                more, hot = self._room.take(shape, count - len(slots), older_than, uses)
                slots += more
        except BaseException:
            for slot in slots:
                self._room.free(slot)
            raise
        if self._gpu.state != "ok":
            # Also for who reads from disk to there.
            self._room.drop_all()
        return slots

    async def _demote(self, shape: BlockShape, blocks: Sequence[Block]) -> bool:
        """Copy blocks, whose GPU copies are held, to free host memory; let go of them.

        Returns:
            Whether any of them can leave now that could not before.
        """
        slots = self._host_room.take(shape, len(blocks), _ONLY_FREE)
        transfers: list[Transfer] = []
        outcomes: list[Outcome] = []
        span = tracing.OFF
        if tracing.recording():
            span = tracing.batch_span("kvstore.demote", (tracing.carried(),), blocks=len(slots))
        try:
            transfers = [
                self._transfer(block, block.gpu, slot)
                for block, slot in zip(blocks, slots, strict=False)
            ]
            outcomes = await self._gpu.read(transfers)
        finally:
            transfers.clear()
            span.end()
            for at, block in enumerate(blocks):
                done = at < len(outcomes) and outcomes[at] is Outcome.OK
                if at < len(slots):
                    if done and not block.dead and block.host is None:
                        self._index.put_host(block, slots[at])
                        self._counters.counts["demoted_blocks"] += 1
                    else:
                        self._host_room.free(slots[at])
                self._index.release_gpu(block)
                if at < len(outcomes) and outcomes[at] is Outcome.CORRUPT:
                    self._index.evict(block, TierName.GPU)
            damaged = outcomes.count(Outcome.CORRUPT)
            if damaged:
                self._counters.counts["corrupt_blocks"] += damaged
                log.error("%d blocks in the gpu pool were damaged; they are on disk", damaged)
        return damaged > 0 or Outcome.OK in outcomes
