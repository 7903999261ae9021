"""Jobs that wait for moves, and which of them goes next.

A job is what one waiter wants: a chain of moves, served in order. Higher priority classes go first; in
a class jobs stand in line. A newcomer goes before those at the end of the line that have more bytes left
than it has, because that ends the most waits soonest, and stops at the first that has fewer, or that
cannot spare the time: whoever was told when it will be served says how many bytes may still be put
before it (its *slack*), and everyone who goes before it takes his own from that. So what is told to a
newcomer holds: what stands before it, when it comes, is all that it ever waits for beyond its slack.

A job that was told nothing has slack without end. It is overtaken by all that are shorter, so after
three picks from the front of the line the oldest of these jobs is picked, and ends while shorter ones
keep coming. Such a pick is *in passing*: whoever serves it takes little, since those in front wait for it;
who was told when it ends before the oldest came gives it from its slack, or is not passed.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

__all__ = ["FRONT_PICKS", "Job", "JobQueue"]

Item = TypeVar("Item")

# Picks from the front between two picks by age.
FRONT_PICKS: Final = 3
_age = attrgetter("order")


class Job(Generic[Item]):
    """What one waiter wants.

    Attributes:
        kind: jobs of one kind compete for the same room.
        priority: its class; higher goes first.
        deadline: loop time after which nobody wants it any more.
        slack: bytes that may still be put before it; infinite when nobody counts on when it ends.
        items: what is still to be begun, in order. Whoever takes one out looks whether it still
            is: the queue does not follow what happens to them.
        left: bytes that have not arrived.
        brought: bytes that nobody else of its class or above had asked for before it: what others
            have to come for anyway costs them no time when it goes before them.
        shared: of the others, bytes that come for one of its own class: they cost those who stand
            before that one as much as what is brought.
        moving: of these, bytes that are on their way.
        order: of arrival.
        batches: how often it was picked.
        in_passing: whether it was picked last by age, before jobs in front of it.
        queued: whether it competes.
        place: how many jobs stood before it when it did last.
    """

    __slots__ = (
        "batches",
        "brought",
        "deadline",
        "in_passing",
        "items",
        "kind",
        "left",
        "moving",
        "order",
        "place",
        "priority",
        "queued",
        "shared",
        "slack",
    )

    def __init__(
        self,
        kind: Hashable,
        priority: int = 0,
        deadline: float = math.inf,
        slack: float = math.inf,
    ) -> None:
        """Make a job without items; it is not in a queue yet."""
        self.kind = kind
        self.priority = priority
        self.deadline = deadline
        self.slack = slack
        self.items: deque[Item] = deque()
        self.left = 0
        self.brought = 0
        self.shared: dict[Job[Item], int] = {}
        self.moving = 0
        self.order = -1
        self.batches = 0
        self.in_passing = False
        self.queued = False
        self.place = 0

    @property
    def told(self) -> bool:
        """Whether somebody counts on when it ends."""
        return self.slack < math.inf


class _Line(Generic[Item]):
    """The jobs of one priority.

    Attributes:
        jobs: in the order in which they are served.
        ages: those that were told nothing, the oldest first.
        front_picks: since the last pick by age.
    """

    __slots__ = ("ages", "front_picks", "jobs")

    def __init__(self) -> None:
        self.jobs: list[Job[Item]] = []
        self.ages: list[Job[Item]] = []
        self.front_picks = 0

    def overtaken(
        self, left: int, brought: int, shared: Mapping[Job[Item], int], end: int
    ) -> Iterator[tuple[Job[Item], int]]:
        """Yield those before whom one goes that comes at `end`, and how many bytes each waits longer.

        See `Job` for the others.
        """
        cost = brought
        if shared:
            cost += sum(shared.get(job, 0) for job in self.jobs[end:])
        for at in range(end - 1, -1, -1):
            job = self.jobs[at]
            costs = min(left, cost)
            if job.left <= left or job.slack < costs:
                break
            yield job, costs
            cost += shared.get(job, 0)

    def enter(self, job: Job[Item], end: int | None = None) -> None:
        """Let a job in where it belongs, and take from the slack of those that it overtakes."""
        at = end = len(self.jobs) if end is None else end
        for passed, cost in self.overtaken(job.left, job.brought, job.shared, end):
            passed.slack -= cost
            at -= 1
        self.jobs.insert(at, job)

    def move_up(self, job: Job[Item]) -> None:
        """Let a job that has fewer bytes left overtake those that it may overtake now."""
        at = self.jobs.index(job)
        if at and self.jobs[at - 1].left > job.left:
            del self.jobs[at]
            self.enter(job, at)

    def first(self, among: Callable[[Hashable], bool]) -> Job[Item] | None:
        """Return the job in front."""
        return next((job for job in self.jobs if among(job.kind)), None)

    def oldest(
        self, among: Callable[[Hashable], bool], passing: Callable[[Hashable], int]
    ) -> Job[Item] | None:
        """Return the oldest of those that were told nothing, if those before it can spare its turn.

        Who was told after it had come was told of its turns, too.
        """
        oldest = next((job for job in self.ages if among(job.kind)), None)
        if oldest is None:
            return None
        before = itertools.takewhile(lambda job: job is not oldest, self.jobs)
        unaware = [job for job in before if job.told and job.order < oldest.order]
        if unaware:
            cost = min(oldest.left, passing(oldest.kind))
            if any(job.slack < cost for job in unaware):
                return None
            for job in unaware:
                job.slack -= cost
        return oldest


class JobQueue(Generic[Item]):
    """Jobs with items to begin."""

    def __init__(self) -> None:
        """Start empty."""
        self._lines: dict[int, _Line[Item]] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        """Return the number of jobs that have something to begin."""
        return sum(len(line.jobs) for line in self._lines.values())

    def add(self, job: Job[Item]) -> None:
        """Let a job compete, or again; its age counts from the first time."""
        if job.queued:
            self.changed(job)
            return
        if job.order < 0:
            job.order = next(self._order)
        self._open(job).enter(job)

    def back(self, job: Job[Item]) -> None:
        """Let a job compete again that was removed a moment ago, where it stood.

        Of several, the one that was removed last comes first.
        """
        if not job.queued:
            line = self._open(job)
            line.jobs.insert(min(job.place, len(line.jobs)), job)

    def _open(self, job: Job[Item]) -> _Line[Item]:
        """Note that a job competes; return its line, where it has no place yet."""
        job.queued = True
        line = self._lines.setdefault(job.priority, _Line())
        if not job.told:
            bisect.insort(line.ages, job, key=_age)
        return line

    def changed(self, job: Job[Item]) -> None:
        """Take note that a job has another number of bytes left."""
        if job.queued:
            self._lines[job.priority].move_up(job)

    def remove(self, job: Job[Item]) -> None:
        """Let a job compete no more. Idempotent."""
        if not job.queued:
            return
        job.queued = False
        line = self._lines[job.priority]
        job.place = line.jobs.index(job)
        del line.jobs[job.place]
        if not job.told:
            del line.ages[bisect.bisect_left(line.ages, job.order, key=_age)]
        if not line.jobs:
            del self._lines[job.priority]

    def pick(
        self,
        among: Callable[[Hashable], bool] = lambda _: True,
        *,
        filling: bool = False,
        least: float = -math.inf,
        passing: Callable[[Hashable], int] = lambda _: 0,
    ) -> Job[Item] | None:
        """Return the job that goes next; it stays in the queue.

        Args:
            among: of a kind, whether it can be served now.
            filling: it gets what others have left of a batch, which may be of another kind, or
                too little for it: the oldest does not spend its turn on that.
            least: priority that it has at least.
            passing: of a kind, how many bytes are taken of a job that is picked for its age.
        """
        for priority in sorted(self._lines, reverse=True):
            if priority < least:
                break
            line = self._lines[priority]
            first = line.first(among)
            if first is None:
                continue
            chosen = first
            if line.front_picks >= FRONT_PICKS and not filling:
                line.front_picks = 0
                chosen = line.oldest(among, passing) or first
            else:
                line.front_picks += 1
            chosen.in_passing = chosen is not first
            chosen.batches += 1
            return chosen
        return None

    def places(self, priority: int) -> dict[Job[Item], int]:
        """Return where each job of a class stands."""
        line = self._lines.get(priority)
        return {} if line is None else {job: at for at, job in enumerate(line.jobs)}

    def around(
        self,
        priority: int,
        left: int,
        brought: int,
        but: Job[Item] | None = None,
        shared: Mapping[Job[Item], int] | None = None,
    ) -> tuple[list[Job[Item]], list[Job[Item]]]:
        """Return the jobs that are served before one, and those of its class behind it.

        Args:
            priority: of the job.
            left: bytes that it has left.
            brought: of these, bytes that nobody else has asked for.
            but: the job itself, if there is one already; all that does not compete any more is
                under way, and nothing is before it.
            shared: bytes that come for others of its class; see `Job`.
        """
        if but is not None and not but.queued:
            return [], []
        first = [
            job for other, line in self._lines.items() if other > priority for job in line.jobs
        ]
        line = self._lines.get(priority)
        if line is None:
            return first, []
        at = len(line.jobs) if but is None else line.jobs.index(but)
        if but is None:
            at -= sum(1 for _ in line.overtaken(left, brought, shared or {}, at))
        return first + line.jobs[:at], line.jobs[at + (but is not None) :]

    def jobs(self) -> Iterator[Job[Item]]:
        """Yield the queued jobs."""
        for line in self._lines.values():
            yield from line.jobs
