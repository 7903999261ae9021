"""Jobs that wait for moves, and which of them goes next.

A job is what one waiter wants: a chain of moves, served in order. Among jobs the order is: higher
priority class first; in a class the job with the fewest bytes left, because that ends the most
waits soonest; but after three such picks the job that has waited longest, so that a long one is
served at least every fourth time while shorter ones keep coming, and ends. Such a pick is *in passing*:
whoever serves it takes little, since those who would have been first wait for it.

A job's bytes only ever become fewer, and most often by somebody else's move. So the heaps hold an
entry for each time that a job's place changed, and what is out of date is skipped when it surfaces.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

__all__ = ["Job", "JobQueue"]

Item = TypeVar("Item")

# Picks by fewest bytes left between two picks by age.
_SHORT_PICKS: Final = 3


class Job(Generic[Item]):
    """What one waiter wants.

    Attributes:
        kind: jobs of one kind compete for the same room: a block shape.
        priority: its class; higher goes first.
        deadline: loop time after which nobody wants it any more.
        items: what is still to be begun, in order. Whoever takes one out looks whether it still
            is: the queue does not follow what happens to them.
        left: bytes that have not arrived.
        moving: of these, bytes that are on their way.
        order: of arrival.
        batches: how often it was picked.
        in_passing: whether it was picked last by age, before jobs that have fewer bytes left.
        queued: whether it competes.
        aged: whether the queue's heap by age holds it.
        listed: for how many bytes left the other heap holds it; -1 for none.
    """

    __slots__ = (
        "aged",
        "batches",
        "deadline",
        "in_passing",
        "items",
        "kind",
        "left",
        "listed",
        "moving",
        "order",
        "priority",
        "queued",
    )

    def __init__(self, kind: Hashable, priority: int = 0, deadline: float = math.inf) -> None:
        """Make a job without items; it is not in a queue yet."""
        self.kind = kind
        self.priority = priority
        self.deadline = deadline
        self.items: deque[Item] = deque()
        self.left = 0
        self.moving = 0
        self.order = -1
        self.batches = 0
        self.in_passing = False
        self.queued = False
        self.aged = False
        self.listed = -1


class _Class(Generic[Item]):
    """The jobs of one priority and kind, in both orders."""

    __slots__ = ("by_age", "by_left")

    def __init__(self) -> None:
        self.by_left: list[tuple[int, int, Job[Item]]] = []
        self.by_age: list[tuple[int, Job[Item]]] = []

    def enter(self, job: Job[Item]) -> None:
        """Put a job where it belongs, unless it is there."""
        if not job.aged:
            job.aged = True
            heapq.heappush(self.by_age, (job.order, job))
        if job.listed != job.left:
            job.listed = job.left
            heapq.heappush(self.by_left, (job.left, job.order, job))

    def fewest(self) -> Job[Item] | None:
        """Return the queued job with the fewest bytes left."""
        heap = self.by_left
        while heap:
            left, _, job = heap[0]
            if job.queued and job.left == left:
                return job
            heapq.heappop(heap)
            if job.listed == left:
                job.listed = -1
        return None

    def oldest(self) -> Job[Item] | None:
        """Return the queued job that has waited longest."""
        heap = self.by_age
        while heap:
            job = heap[0][1]
            if job.queued:
                return job
            heapq.heappop(heap)
            job.aged = False
        return None

    def clear(self) -> None:
        """Forget the entries of jobs that do not compete."""
        for _, _, job in self.by_left:
            job.listed = -1


class JobQueue(Generic[Item]):
    """Jobs with items to begin."""

    def __init__(self) -> None:
        """Start empty."""
        self._classes: dict[tuple[int, Hashable], _Class[Item]] = {}
        self._order = itertools.count()
        self._short_picks: dict[int, int] = {}
        self._size = 0

    def __len__(self) -> int:
        """Return the number of jobs that have something to begin."""
        return self._size

    def add(self, job: Job[Item]) -> None:
        """Let a job compete, or again; its age counts from the first time."""
        if job.queued:
            self.changed(job)
            return
        if job.order < 0:
            job.order = next(self._order)
        job.queued = True
        self._size += 1
        self._classes.setdefault((job.priority, job.kind), _Class()).enter(job)

    def changed(self, job: Job[Item]) -> None:
        """Take note that a job has another number of bytes left."""
        if job.queued:
            self._classes[job.priority, job.kind].enter(job)

    def remove(self, job: Job[Item]) -> None:
        """Let a job compete no more. Idempotent."""
        if job.queued:
            job.queued = False
            self._size -= 1

    def pick(self, among: Callable[[Hashable], bool] = lambda _: True) -> Job[Item] | None:
        """Return the job that goes next; it stays in the queue.

        Args:
            among: of a kind, whether it can be served now.
        """
        for place, of in list(self._classes.items()):
            if of.oldest() is None:
                of.clear()
                del self._classes[place]
        candidates = [place for place in self._classes if among(place[1])]
        if not candidates:
            return None
        priority = max(place[0] for place in candidates)
        classes = [self._classes[place] for place in candidates if place[0] == priority]
        picks = self._short_picks.get(priority, 0)
        by_age = picks >= _SHORT_PICKS
        self._short_picks[priority] = 0 if by_age else picks + 1
        heads = [job for of in classes if (job := of.fewest()) is not None]
        chosen = shortest = min(heads, key=lambda job: (job.left, job.order))
        if by_age:
            heads = [job for of in classes if (job := of.oldest()) is not None]
            chosen = min(heads, key=lambda job: job.order)
        chosen.in_passing = chosen is not shortest
        chosen.batches += 1
        return chosen

    def before(self, priority: int, left: int, but: Job[Item] | None = None) -> int:
        """Return how many bytes would begin to move before those of a job.

        Args:
            priority: of the job.
            left: bytes that it has left.
            but: the job itself, if it is in the queue.
        """
        return sum(
            job.left - job.moving
            for job in self.jobs()
            if job is not but
            and (job.priority > priority or (job.priority == priority and job.left <= left))
        )

    def jobs(self) -> Iterator[Job[Item]]:
        """Yield the queued jobs."""
        for of in self._classes.values():
            for _, job in of.by_age:
                if job.queued:
                    yield job
