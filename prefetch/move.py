"""One block on its way up, and who waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore import tracing
from kvstore.prefetch.queue import Job

if TYPE_CHECKING:
    from kvstore.index import Block
    from kvstore.miss import MissReason
    from kvstore.space import BlockShape

__all__ = ["Kind", "Move", "MoveState", "Waiter", "WaiterJob"]


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


class MoveState(Enum):
    """How far a move has come."""

    QUEUED = 1
    TAKEN = 2  # in a batch that seeks room; goes back, on, or ends before anybody else runs
    MOVING = 3
    ENDED = 4


@dataclass(eq=False, slots=True)
class Move:
    """One block's way up.

    Attributes:
        block: the block.
        jobs: that want it.
        state: how far it is.
    """

    block: Block
    jobs: dict[WaiterJob, None] = field(default_factory=dict)
    state: MoveState = MoveState.QUEUED


class Kind(NamedTuple):
    """What competes for the same room.

    Attributes:
        shape: of the blocks.
        holding: that of the waiter, who may have others make room for what was used less recently.
    """

    shape: BlockShape
    holding: bool


class WaiterJob(Job[Move]):
    """A job, and what it comes to.

    Attributes:
        waiter: who is told.
        moves: those of its moves that have not ended.
        traceparent: of the request that wants them; "" when nobody traces it.
    """

    __slots__ = ("moves", "traceparent", "waiter")

    def __init__(
        self, waiter: Waiter, shape: BlockShape, priority: int, deadline: float, slack: float
    ) -> None:
        """Start without moves."""
        super().__init__(Kind(shape, waiter.holding), priority, deadline, slack)
        self.waiter = waiter
        self.moves = 0
        self.traceparent = tracing.carried()

    def orphaned(self, other: Job[Move], size: int) -> None:
        """Another job does not want a block any more that may have come for it alone."""
        lost = min(size, self.shared.get(other, 0))
        if lost:
            self.shared[other] -= lost
            self.brought += lost
