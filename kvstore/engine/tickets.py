"""Prefetch tickets: runs that somebody wants in memory soon, and may ask about again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.engine.gpu_side import GpuRunWaiter
from kvstore.engine.misses import miss_of
from kvstore.engine.waiting import RunWaiter
from kvstore.index import NEVER
from kvstore.miss import Miss, MissReason
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.arrivals import Arrivals
    from kvstore.engine.gpu_side import GpuSide
    from kvstore.engine.leases import Leases
    from kvstore.index import Block, BlockIndex, SpaceIndex

__all__ = ["Tickets"]

# Beyond this the oldest ticket is cancelled: ids are the clients' and may never be asked again.
_MAX_TICKETS: Final = 10_000
# The contract's limit: a ticket is opened in one slice of the loop.
_MOST_BLOCKS: Final = 32_768


@dataclass(slots=True)
class _Ticket:
    run: list[Block]
    miss: Miss
    waiter: RunWaiter
    deadline: float
    tier: TierName

    def has(self, block: Block) -> bool:
        """Return whether a block is where it is wanted."""
        there = block.gpu is not None if self.tier is TierName.GPU else block.readable
        return there and not block.dead


class Tickets:
    """All tickets that are not done."""

    def __init__(self, index: BlockIndex, leases: Leases, arrivals: Arrivals) -> None:
        """Compose."""
        self._index = index
        self._leases = leases
        self._arrivals = arrivals
        # Set when there is a GPU tier.
        self.gpu: GpuSide | None = None
        self._tickets: dict[int, _Ticket] = {}

    def __len__(self) -> int:
        """Return the number of tickets."""
        return len(self._tickets)

    async def prefetch(
        self,
        space: SpaceIndex,
        keys: Sequence[bytes],
        ticket_id: int,
        deadline_seconds: float,
        priority: int,
        wait_seconds: float,
        tier: TierName = TierName.HOST,
    ) -> tuple[int, bool, Miss]:
        """Ask for a run in host memory, or on the GPU; join the ticket if it is known.

        Returns:
            blocks of the leading run there by now, whether nothing more is coming, and why the
            run ends.
        """
        loop = asyncio.get_running_loop()
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            ticket = self._open(space, keys, deadline_seconds, priority, tier)
            if len(self._tickets) >= _MAX_TICKETS:
                self.cancel(next(iter(self._tickets)))
            self._tickets[ticket_id] = ticket
        waiter = ticket.waiter
        await waiter.wait(min(ticket.deadline, loop.time() + wait_seconds))
        if loop.time() >= ticket.deadline:
            self._give_up(ticket)
        run = ticket.run
        blocks = next((i for i, b in enumerate(run) if not ticket.has(b)), len(run))
        miss = ticket.miss
        if blocks < len(run):
            missing = run[blocks]
            failure = waiter.failures.get(missing)
            if failure is None and space.blocks.get(missing.key) is not missing:
                miss = miss_of(self._index, space, missing.key)
            else:
                # Without a failure it has been here, and others needed the room more.
                here = not waiter.pending and loop.time() < ticket.deadline
                reason = MissReason.NO_ROOM if here else MissReason.DEADLINE
                miss = Miss(failure or reason, "disk")
        # It may have been cancelled meanwhile, and another one be known by its name.
        if not waiter.pending and self._tickets.get(ticket_id) is ticket:
            del self._tickets[ticket_id]
        return blocks, not waiter.pending, miss

    def _open(
        self,
        space: SpaceIndex,
        keys: Sequence[bytes],
        deadline_seconds: float,
        priority: int,
        tier: TierName,
    ) -> _Ticket:
        run, miss = self._leases.find_run(space, keys[:_MOST_BLOCKS])
        if len(run) == _MOST_BLOCKS < len(keys):
            miss = Miss(MissReason.LEASE_CAP)
        self._index.touch(run)
        deadline = asyncio.get_running_loop().time() + (deadline_seconds or NEVER)
        waiter: RunWaiter
        if tier is TierName.GPU and self.gpu is not None:
            wanted = [b for b in run if b.gpu is None]
            waiter = GpuRunWaiter(self._index, wanted, self.gpu)
            cold = self.gpu.bring(wanted, waiter)
        else:
            cold = [b for b in run if not b.readable]
            waiter = RunWaiter(self._index, cold, hold=False)
        self._arrivals.request(cold, waiter, priority, deadline)
        return _Ticket(run, miss, waiter, deadline, tier)

    def cancel(self, ticket_id: int) -> None:
        """Forget a ticket; what nobody else waits for and has not begun is dropped."""
        ticket = self._tickets.pop(ticket_id, None)
        if ticket is not None:
            self._give_up(ticket)

    def expire(self) -> None:
        """Forget the tickets that are done or late."""
        now = asyncio.get_running_loop().time()
        for ticket_id, ticket in list(self._tickets.items()):
            if not ticket.waiter.pending or ticket.deadline < now:
                self.cancel(ticket_id)

    def _give_up(self, ticket: _Ticket) -> None:
        waiter = ticket.waiter
        if waiter.pending:
            self._arrivals.cancel(list(waiter.pending), waiter)
            if isinstance(waiter, GpuRunWaiter):
                waiter.give_up()
        waiter.close()
