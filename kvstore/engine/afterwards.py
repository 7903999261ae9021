"""What was declined and used comes to host memory afterwards.

A disk that is a little slower than computing is declined, and rightly, by every request for what lies
there only. But what an engine computes then is not stored a second time, so that without this a
prefix that is asked for all day would be computed all day: the disk is fast enough to have it in
memory by the next request, only not by this one.

The flow: `Worth` notes the blocks that a request computes itself. When computing them should be over,
since until then the engine needs the processors and the memory's bandwidth, they are read, parents
first, what was noted last first. Before each small step it is seen to that nobody waits: not while
a lease does, nor while anybody but warm-up wants something of the path; and within a step every few
milliseconds, so that what has not begun is taken back. With warm-up it shares a class: both are
guesses, and who has fewer bytes left goes first, so that what is asked for now does not
wait for all of what was used before the start.

Reading afterwards takes nothing from anybody: room is what is free above the watermark, and copies
that were used less recently and are on disk too. It is neither a use nor a hit, and holds
nothing. A request that asks for a block meanwhile takes it over at its own priority.

Notes are bounded by bytes, the oldest go first. When its turn comes, what has arrived otherwise is
passed over; where a block is gone, or its parent did not come to memory, the rest of the run is
forgotten. When reads stall or fail, all is forgotten; so it is at a stop, and nothing survives it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.engine.waiting import RunWaiter
from kvstore.engine.wake import Signal
from kvstore.engine.warm_up import PRIORITY
from kvstore.miss import MissReason
from kvstore.tiers.base import TierName
from kvstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine.counters import Counters
    from kvstore.index import Block, BlockIndex, SpaceIndex
    from kvstore.prefetch.promoter import Promoter

__all__ = ["Afterwards", "SpareRoom"]

log = logging.getLogger(__name__)

# How often it is looked whether somebody waits.
_LOOK_SECONDS: Final = 0.01
# A step is what the path moves in this time, and at most so much.
_STEP_SECONDS: Final = 0.1
_STEP_BYTES: Final = 256 * MIB
# Nothing is due.
_IDLE_SECONDS: Final = 3600.0


class SpareRoom(Protocol):
    """What it needs of host memory."""

    def spare(self, space: SpaceIndex, count: int, older_than: int) -> int:
        """Return for how many of a space's blocks there is room that costs nobody anything."""


@dataclass(eq=False, slots=True)
class _Run:
    """Blocks that were declined together.

    Attributes:
        blocks: those still to be looked at, in chain order; each is in one run only.
        due: loop time from which they may be read.
    """

    blocks: OrderedDict[Block, None]
    due: float


class Afterwards:
    """Notes what was declined, and reads it later."""

    def __init__(
        self,
        index: BlockIndex,
        room: SpareRoom,
        promoter: Promoter,
        counters: Counters,
        *,
        budget_bytes: Callable[[], int],
        waiting: Callable[[], object],
        stalled: Callable[[], object],
    ) -> None:
        """Compose; `start` begins.

        Args:
            index: of the blocks.
            room: of host memory.
            promoter: reads them.
            counters: get what came.
            budget_bytes: returns the most that may be noted.
            waiting: returns whether a lease waits for blocks.
            stalled: returns whether reads have stalled.
        """
        self._index = index
        self._room = room
        self._promoter = promoter
        self._counters = counters
        self._budget_bytes = budget_bytes
        self._waiting = waiting
        self._stalled = stalled
        self._runs: list[_Run] = []  # oldest first
        self._noted: dict[Block, _Run] = {}
        self._reading: frozenset[Block] = frozenset()
        self._bytes = 0
        self._signal = Signal()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        # The last attempt found no room.
        self._crowded = False

    def start(self) -> None:
        """Begin to read what is noted."""
        if not self._closed:
            self._task = asyncio.create_task(self._run(), name="afterwards")

    async def stop(self) -> None:
        """Forget everything, and note nothing more. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._forget_all()

    def __len__(self) -> int:
        """Return how many blocks are noted."""
        return len(self._noted)

    def __contains__(self, block: Block) -> bool:
        """Return whether a block is noted, or being read."""
        return block in self._noted or block in self._reading

    @property
    def noted_bytes(self) -> int:
        """Bytes of the blocks that are noted."""
        return self._bytes

    def note(self, blocks: Sequence[Block], seconds: float) -> bool:
        """Have blocks of one space brought, those that are on disk only.

        Asked for again before that, they do not come later than they would have.

        Args:
            blocks: in chain order; of more than the budget, the first ones.
            seconds: how long the one who asked for them computes them.

        Returns:
            Whether the path can be expected to be used then.
        """
        if self._closed or not blocks:
            return False
        budget = self._budget_bytes()
        size = blocks[0].space.shape.block_bytes
        cold = [b for b in blocks if b.host is None and b.disk is not None][: budget // size]
        if not cold:
            return False
        due = asyncio.get_running_loop().time() + seconds
        first = self._noted.get(cold[0])
        if (
            first is not None
            and first is self._noted.get(cold[-1])
            and (len(first.blocks) == len(cold))
        ):
            # The same again: only that it was asked for last.
            self._runs.remove(first)
            self._runs.append(first)
            return not self._crowded
        run = _Run(OrderedDict.fromkeys(cold), due)
        for block in cold:
            older = self._noted.get(block)
            if older is None:
                self._bytes += size
            else:
                del older.blocks[block]
                run.due = min(run.due, older.due)
            self._noted[block] = run
        # Those of which nothing is left go: they are not counted by bytes.
        self._runs = [older for older in self._runs if older.blocks]
        self._runs.append(run)
        self._trim()
        self._signal.notify()
        return not self._crowded

    def _trim(self) -> None:
        """Forget the tails of the oldest runs until the rest is within the budget."""
        budget = self._budget_bytes()
        while self._bytes > budget:
            oldest = self._runs[0]
            if oldest.blocks:
                self._forget(next(reversed(oldest.blocks)))
            else:
                del self._runs[0]

    def _forget(self, block: Block) -> None:
        del self._noted.pop(block).blocks[block]
        self._bytes -= block.space.shape.block_bytes

    def _forget_run(self, run: _Run) -> None:
        for block in list(run.blocks):
            self._forget(block)

    def _put_back(self, run: _Run, blocks: Sequence[Block]) -> None:
        """Blocks that were taken out of a run are its next ones again."""
        for block in reversed(blocks):
            if block not in self._noted:
                self._noted[block] = run
                self._bytes += block.space.shape.block_bytes
                run.blocks[block] = None
                run.blocks.move_to_end(block, last=False)
        if run.blocks and run not in self._runs:
            self._runs.insert(0, run)
        self._trim()

    def _forget_all(self) -> None:
        self._runs.clear()
        self._noted.clear()
        self._bytes = 0

    async def _run(self) -> None:
        try:
            while True:
                await self._turn()
        except Exception:
            # The boundary of a convenience: its failure must not end the daemon.
            log.exception("bringing what was declined failed; it is not tried again")
            self._closed = True
            self._forget_all()

    async def _turn(self) -> None:
        """Read a little, or wait for something to do."""
        self._runs = [run for run in self._runs if run.blocks]
        now = asyncio.get_running_loop().time()
        run = next((run for run in reversed(self._runs) if run.due <= now), None)
        if run is None:
            next_due = min((run.due for run in self._runs), default=now + _IDLE_SECONDS)
            await self._signal.wait(next_due - now)
        elif self._stalled():
            self._forget_all()
        elif self._somebody_waits():
            await asyncio.sleep(_LOOK_SECONDS)
        else:
            await self._step(run)

    def _somebody_waits(self) -> bool:
        # Warm-up is no reason to wait: what goes before that is.
        return bool(self._waiting() or self._promoter.ahead_bytes((), PRIORITY + 1))

    async def _step(self, run: _Run) -> None:
        """Read the next blocks of a run, as many as do not keep the path busy for long."""
        step = self._next_blocks(run)
        if not step:
            # All of it has come otherwise; so may have many other runs.
            await asyncio.sleep(0)
            return
        space = step[0].space
        newest = max(block.sequence for block in step)
        fits = self._room.spare(space, len(step), newest)
        if not fits:
            # Whatever is in memory was used since, or is nowhere else.
            self._crowded = True
            self._forget_run(run)
            return
        self._put_back(run, step[fits:])
        del step[fits:]
        self._reading = frozenset(step)
        waiter = RunWaiter(self._index, step, hold=False)
        self._promoter.request(step, waiter, PRIORITY)
        loop = asyncio.get_running_loop()
        try:
            while waiter.pending and not (self._somebody_waits() or self._stalled()):
                await waiter.wait(loop.time() + _LOOK_SECONDS)
        finally:
            self._promoter.cancel(step, waiter)
            self._reading = frozenset()
        came = len(step) - len(waiter.failures) - len(waiter.pending)
        if came:
            self._crowded = False
        self._counters.counts["afterwards_blocks"] += came
        self._counters.counts["afterwards_bytes"] += came * space.shape.block_bytes
        if MissReason.IO_ERROR in waiter.failures.values():
            self._forget_all()
            return
        # What has begun all the same has landed when its turn comes again.
        self._put_back(run, [block for block in step if block in waiter.pending])

    def _next_blocks(self, run: _Run) -> list[Block]:
        """Take the next blocks of a run that are still wanted."""
        step: list[Block] = []
        most = 0
        while run.blocks:
            block = next(iter(run.blocks))
            size = block.space.shape.block_bytes
            above = block.parent
            if block.dead or not (
                above is None or above.fastest_tier < TierName.DISK or (step and above is step[-1])
            ):
                # It cannot be reached in memory, nor can what hangs on it.
                self._forget_run(run)
                break
            if block.host is None and block.disk is not None:
                most = most or self._promoter.path.quantum(_STEP_SECONDS, size, _STEP_BYTES)
                if step and (len(step) + 1) * size > most:
                    break
                step.append(block)
            self._forget(block)
        return step
