"""Scrubbing: reading what is on disk again, to find damage before somebody needs the block.

1. List the blocks on disk by segment, a sample of each if so asked; what comes later is not looked
   at, what has left before its turn is skipped.
2. A small batch at a time, behind loads and flushes and within the rate: hold the disk copies, read
   them into buffers of its own (no host slot is taken), check the digests, let go.
3. A damaged copy goes, with those below it on disk. If host memory holds the block, and that copy
   still has the block's digest, the block stays there and goes to disk again; so do those below it
   that host holds without a gap.

What the device does not deliver is reported and stays: it may be back later. A file that was cut
short will not be: what lay beyond its end is damaged.

One check at a time. It runs in a task of its own: whoever watches it may be slow, or leave.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import mmap
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.engine.wake import Signal
from kvstore.errors import Busy, InvalidRequest, KVStoreError
from kvstore.tiers.base import Outcome, Slot, Transfer
from kvstore.tiers.digests import digest_shards
from kvstore.tiers.io_engine import SHORT, error_text
from kvstore.tiers.pool_copy import undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor

    from kvstore.engine.counters import Counters
    from kvstore.engine.removal import Removal
    from kvstore.index import Block, BlockIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.disk import DiskTier
    from kvstore.tiers.host import HostTier

__all__ = ["Fault", "Scrub", "Scrubber"]

log = logging.getLogger(__name__)

# Small enough that a load which comes meanwhile hardly waits for it.
_BATCH_BYTES: Final = 4 << 20
# At low rates batches are smaller, so that the rate holds over this time.
_RATE_SECONDS: Final = 0.1
# How long, at most, a batch gives way to loads and flushes: a busy daemon is checked, too.
_GIVE_WAY_SECONDS: Final = 0.25
_LOOK_AGAIN_SECONDS: Final = 0.005
# Blocks looked at in one go.
_CHUNK: Final = 4000
# Faults kept for a watcher that does not take them; beyond it they are counted only.
_MAX_FAULTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Fault:
    """A block that could not be served from disk.

    Attributes:
        space_id: its space.
        key: its key.
        slot: where it lay.
        problem: ``damaged`` or ``unreadable``.
        kept: host memory holds it, whole; it goes to disk again.
    """

    space_id: bytes
    key: bytes
    slot: Slot
    problem: str
    kept: bool


@dataclass(eq=False, slots=True)
class Scrub:
    """One check and what it found so far.

    Attributes:
        total: blocks to check.
        checked: blocks read, damaged ones included.
        damaged: blocks whose bytes are not what was stored.
        unreadable: blocks that the device did not deliver.
        gone: blocks that left the disk before their turn.
        read_bytes: bytes read.
        dropped: disk copies dropped for damage in them or above them.
        lost: blocks that are in no tier any more for it.
        done: everything was checked.
        error: why it ended early; None while it runs, when done, and when it was cancelled.
    """

    total: int = 0
    checked: int = 0
    damaged: int = 0
    unreadable: int = 0
    gone: int = 0
    read_bytes: int = 0
    dropped: int = 0
    lost: int = 0
    done: bool = False
    error: Exception | None = None
    _faults: list[Fault] = field(default_factory=list)
    _ended: Signal = field(default_factory=Signal)
    _task: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        """Whether it does no more."""
        return self._task is None or self._task.done()

    def cancel(self) -> None:
        """Break it off; it lets go of everything in a moment. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def wait(self, seconds: float) -> None:
        """Return when it is over, or after some seconds."""
        if not self.over:
            await self._ended.wait(seconds)

    def take_faults(self, count: int) -> list[Fault]:
        """Return up to `count` faults that were not taken before."""
        taken = self._faults[:count]
        del self._faults[:count]
        return taken

    def found(self, block: Block, slot: Slot, problem: str, *, kept: bool) -> None:
        """Note a fault."""
        if len(self._faults) < _MAX_FAULTS:
            self._faults.append(Fault(block.space.id, block.key, slot, problem, kept))


class _Pace:
    """Keeps reading within a rate, without making up for time that was not used."""

    def __init__(self, bytes_per_second: int) -> None:
        self._rate = bytes_per_second or math.inf
        self._due = 0.0
        self.batch_bytes = int(min(_BATCH_BYTES, self._rate * _RATE_SECONDS))

    async def wait(self) -> None:
        """Wait until there is time for more."""
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now)
        await asyncio.sleep(self._due - now)

    def spend(self, read_bytes: int) -> None:
        """Bytes are about to be read."""
        self._due += read_bytes / self._rate


class Scrubber:
    """Checks the disk tier's blocks."""

    def __init__(
        self,
        index: BlockIndex,
        host: HostTier,
        disk: DiskTier,
        removal: Removal,
        counters: Counters,
        executor: Executor,
        *,
        busy: Callable[[], bool],
        on_released: Callable[[], None],
    ) -> None:
        """Compose.

        Args:
            index: knows the blocks.
            host: may hold good copies.
            disk: is read.
            removal: drops what is damaged.
            counters: what happened.
            executor: its threads hash copies in host memory.
            busy: whether somebody else needs the disk now.
            on_released: called when blocks may leave the disk again.
        """
        self._index = index
        self._host = host
        self._disk = disk
        self._removal = removal
        self._counters = counters
        self._executor = executor
        self._busy = busy
        self._on_released = on_released
        self._scrub: Scrub | None = None
        self._closed = False

    def begin(self, fraction: float, bytes_per_second: int) -> Scrub:
        """Begin a check.

        Args:
            fraction: of each segment's blocks, in (0, 1].
            bytes_per_second: at most; 0: no limit.

        Raises:
            InvalidRequest: the fraction is none.
            Busy: a check is under way, or the daemon is stopping.
        """
        if not 0 < fraction <= 1:
            raise InvalidRequest("fraction", f"{fraction:g} is not above 0 and at most 1")
        if self._closed:
            raise Busy("the daemon is stopping")
        scrub = self._scrub
        if scrub is not None and not scrub.over:
            raise Busy(
                f"a verification is under way: {scrub.checked} of {scrub.total} blocks are checked"
            )
        self._scrub = scrub = Scrub()
        self._counters.counts["scrubs"] += 1
        scrub._task = asyncio.create_task(
            self._run(scrub, fraction, _Pace(bytes_per_second)), name="scrub"
        )
        return scrub

    async def stop(self) -> None:
        """Break off the check under way, and begin no more."""
        self._closed = True
        await self.break_off()

    async def break_off(self) -> None:
        """Break off the check under way and wait until it has let go of everything."""
        if self._scrub is not None and self._scrub._task is not None:
            self._scrub.cancel()
            await asyncio.gather(self._scrub._task, return_exceptions=True)

    async def _run(self, scrub: Scrub, fraction: float, pace: _Pace) -> None:
        try:
            listed = await self._list(fraction)
            scrub.total = sum(map(len, listed.values()))
            buffers: dict[BlockShape, list[tuple[memoryview, ...]]] = {}
            for blocks in listed.values():
                shape = blocks[0].space.shape
                if shape not in buffers:
                    # One shape at a time: blocks may be large.
                    buffers = {shape: _buffers(shape, pace.batch_bytes)}
                for batch in _batches(blocks, len(buffers[shape])):
                    await self._give_way()
                    await pace.wait()
                    pace.spend(len(batch) * shape.block_bytes)
                    await self._check(scrub, batch, buffers[shape])
            scrub.done = True
        except KVStoreError as error:
            scrub.error = error
        except Exception as error:
            # The boundary of a check: who watches it is told.
            log.exception("a verification failed")
            scrub.error = error
        finally:
            scrub._ended.notify()

    async def _list(self, fraction: float) -> dict[int, list[Block]]:
        """Return the blocks to check by segment, in the order of their slots."""
        listed: dict[int, list[Block]] = {}
        for space in list(self._index.spaces.values()):
            for at, block in enumerate(list(space.blocks.values())):
                if block.disk is not None:
                    listed.setdefault(block.disk.group, []).append(block)
                if at % _CHUNK == _CHUNK - 1:
                    await asyncio.sleep(0)
        for group, blocks in listed.items():
            if fraction < 1:
                listed[group] = random.sample(blocks, math.ceil(len(blocks) * fraction))
            listed[group].sort(key=_place)
            await asyncio.sleep(0)
        return dict(sorted(listed.items()))

    async def _give_way(self) -> None:
        """Wait while others need the disk, though not for ever."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _GIVE_WAY_SECONDS
        while self._busy() and loop.time() < end:
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    async def _check(
        self, scrub: Scrub, batch: Sequence[Block], buffers: Sequence[tuple[memoryview, ...]]
    ) -> None:
        """Read one batch; drop what is damaged."""
        held: list[tuple[Block, Slot]] = []
        transfers = []
        for block, memory in zip(batch, buffers, strict=False):
            if block.dead or block.disk is None:
                scrub.gone += 1
                continue
            lengths = block.space.spec.shard_bytes
            self._index.hold_disk(block)
            held.append((block, block.disk))
            transfers.append(Transfer(block.disk, memory, lengths, block.digests))
        if not held:
            return
        try:
            outcomes = await self._disk.read(transfers)
        finally:
            # Also when cancelled: by then the last system call has returned.
            for block, _ in held:
                self._index.release_disk(block)
            self._on_released()
        for (block, slot), outcome in zip(held, outcomes, strict=True):
            scrub.checked += 1
            self._counters.counts["scrubbed_blocks"] += 1
            if outcome is Outcome.OK:
                scrub.read_bytes += block.space.shape.block_bytes
            else:
                await self._fault(scrub, block, slot, outcome)

    async def _fault(self, scrub: Scrub, block: Block, slot: Slot, outcome: Outcome) -> None:
        cut = self._disk.broken(slot.group) == error_text(SHORT)
        if outcome is Outcome.IO_ERROR and not cut:
            scrub.unreadable += 1
            scrub.found(block, slot, "unreadable", kept=block.host is not None)
            return
        scrub.damaged += 1
        self._counters.counts["scrub_damaged_blocks"] += 1
        kept = await self._host_copy_is_good(block)
        # It may have left the disk meanwhile, or moved.
        if not block.dead and block.disk == slot:
            dropped, lost = self._removal.damaged_on_disk(block, kept=kept)
            scrub.dropped += dropped
            scrub.lost += lost
        scrub.found(block, slot, "damaged", kept=kept and not block.dead)

    async def _host_copy_is_good(self, block: Block) -> bool:
        if block.host is None or block.dead:
            return False
        self._index.hold_host(block)
        try:
            views, lengths = self._host.views(block.host), block.space.spec.shard_bytes
            loop = asyncio.get_running_loop()
            found = await undisturbed(
                loop.run_in_executor(self._executor, digest_shards, views, lengths)
            )
        finally:
            self._index.release_host(block)
            self._on_released()
        return found == block.digests and not block.dead


def _place(block: Block) -> int:
    return 0 if block.disk is None else block.disk.index


def _batches(blocks: Sequence[Block], size: int) -> Iterator[Sequence[Block]]:
    return (blocks[at : at + size] for at in range(0, len(blocks), size))


def _buffers(shape: BlockShape, batch_bytes: int) -> list[tuple[memoryview, ...]]:
    """Return page-aligned memory for as many blocks as a batch has, at least one."""
    count = max(1, batch_bytes // shape.block_bytes)
    # Given back when the last view of it is gone.
    memory = memoryview(mmap.mmap(-1, count * shape.block_bytes))
    slots = itertools.count(0, shape.slot_bytes)
    return [
        tuple(memory[at : at + shape.slot_bytes] for at in itertools.islice(slots, shape.shards))
        for _ in range(count)
    ]
