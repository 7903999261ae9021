"""What a newcomer adds to what is read anyway: the bytes that others wait longer for if it overtakes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.prefetch.move import MoveState

if TYPE_CHECKING:
    from kvstore.prefetch.move import Move, WaiterJob
    from kvstore.prefetch.queue import Job, JobQueue

__all__ = ["Wanted"]


class Wanted:
    """Blocks of one job, before it is in line.

    What is under way, or wanted by a higher class, comes in any case. What somebody of its own class
    wants comes when that one is served: those who stand before it do not wait for it yet.

    Attributes:
        brought: bytes that nobody of its class or above has asked for.
        shared: bytes that others of its class have, by the one that is served first.
    """

    def __init__(self, queue: JobQueue[Move], priority: int) -> None:
        """Want nothing yet.

        Args:
            queue: where it would stand; it does not change meanwhile.
            priority: its class.
        """
        self._queue = queue
        self._priority = priority
        self._places: dict[Job[Move], int] | None = None
        self.brought = 0
        self.shared: dict[Job[Move], int] = {}

    def add(self, move: Move | None, size: int) -> None:
        """Want a block of `size` bytes, of which somebody may have asked for a move."""
        if move is None:
            self.brought += size
            return
        if move.state is MoveState.MOVING:
            return
        equals: list[WaiterJob] = []
        for job in move.jobs:
            if job.priority > self._priority:
                return
            if job.priority == self._priority:
                equals.append(job)
        if not equals:
            self.brought += size
            return
        if self._places is None:
            self._places = self._queue.places(self._priority)
        places = self._places
        first = min(equals, key=lambda job: places.get(job, -1))
        # Who stands in line no more has begun all that it wants.
        if first in places:
            self.shared[first] = self.shared.get(first, 0) + size
