"""Which job goes next: class, then its place in line, and after three of these the oldest."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvstore.prefetch.queue import Job, JobQueue


def job(left: int, priority: int = 0, kind: str = "k", slack: float = math.inf) -> Job[int]:
    made: Job[int] = Job(kind, priority, slack=slack)
    made.left = made.brought = left
    return made


def queue_of(*jobs: Job[int]) -> JobQueue[int]:
    queue: JobQueue[int] = JobQueue()
    for one in jobs:
        queue.add(one)
    return queue


def before(queue: JobQueue[int], priority: int, left: int, brought: int | None = None) -> int:
    """Return the bytes that would be served before a new job."""
    jobs, _ = queue.around(priority, left, left if brought is None else brought)
    return sum(job.left for job in jobs)


def served(queue: JobQueue[int]) -> list[Job[int]]:
    """Take out all jobs in the order in which they are served."""
    order = []
    while (picked := queue.pick()) is not None:
        order.append(picked)
        queue.remove(picked)
    return order


def test_a_higher_class_goes_first_whatever_its_size() -> None:
    urgent, small = job(1000, priority=1), job(1)
    queue = queue_of(small, urgent)
    assert [queue.pick() for _ in range(8)] == [urgent] * 8
    queue.remove(urgent)
    assert queue.pick() is small


def test_fewer_bytes_go_first_and_of_equals_who_came_first() -> None:
    long, short, same = job(30), job(10), job(10)
    assert served(queue_of(long, short, same)) == [short, same, long]


def test_a_long_job_is_picked_every_fourth_time_and_ends() -> None:
    """One that never gets a turn while short ones keep coming would wait for ever."""
    long = job(1 << 30)
    queue = queue_of(long)
    since = 0
    for _ in range(100):
        short = job(10)
        queue.add(short)
        picked = queue.pick()
        assert picked is not None
        if picked is long:
            assert picked.in_passing
            since = 0
            queue.remove(short)
        else:
            since += 1
            queue.remove(picked)
        assert since <= 3


def test_the_turn_of_the_oldest_is_not_spent_on_what_is_left_of_anothers_batch() -> None:
    """Two kinds, and batches of two jobs: every fourth pick would be one that it cannot have."""
    long = job(1 << 30, kind="other")
    queue = queue_of(long, *(job(10) for _ in range(20)))
    firsts = []
    for _ in range(6):
        first = queue.pick()
        assert first is not None
        firsts.append(first)
        kind = first.kind
        filled = queue.pick(lambda other, kind=kind: other == kind, filling=True)  # type: ignore[misc]
        for one in {first, filled} - {long, None}:
            assert one is not None
            queue.remove(one)
    assert firsts.count(long) >= 2


def test_who_was_told_when_it_ends_is_overtaken_by_as_much_as_it_can_spare() -> None:
    long = job(100, slack=25)
    shorts = [job(10) for _ in range(4)]
    queue = queue_of(long, *shorts)
    assert long.slack == 5
    # Who has 5 bytes would go before all, who has 6 stays behind the long one and two others.
    assert (before(queue, 0, 5), before(queue, 0, 6)) == (0, 120)
    # Unless some of that is what the others wait for, too.
    assert before(queue, 0, 6, brought=5) == 0
    assert served(queue) == [*shorts[:2], long, *shorts[2:]]


def test_who_cannot_spare_anything_holds_up_those_who_would_pass_others_before_it() -> None:
    long, told, short = job(100), job(50, slack=0), job(10)
    assert served(queue_of(long, told, short)) == [told, short, long]


def test_nobody_who_was_told_when_it_ends_is_picked_for_its_age() -> None:
    told, short = job(100, slack=1000), job(10)
    queue = queue_of(told, short)
    assert [queue.pick() for _ in range(8)] == [short] * 8
    # That it may be overtaken is all that others take from it.
    assert told.slack == 990


def test_a_job_that_shrank_by_anothers_moves_moves_up() -> None:
    first, second = job(100), job(50)
    queue = queue_of(first, second)
    first.left = 10
    queue.changed(first)
    assert queue.pick() is first


def test_a_job_that_shrank_stays_behind_those_who_cannot_wait_for_it() -> None:
    first, second = job(50, slack=9), job(100)
    queue = queue_of(first, second)
    second.left = 10
    queue.changed(second)
    assert queue.pick() is first
    second.left = 9
    queue.changed(second)
    assert (queue.pick(), first.slack) == (second, 0)


def test_kinds_that_cannot_be_served_are_passed_over_and_keep_their_place() -> None:
    wide, narrow = job(1, kind="wide"), job(9, kind="narrow")
    queue = queue_of(wide, narrow)
    assert queue.pick(lambda kind: kind != "wide") is narrow
    assert queue.pick() is wide
    assert queue.pick(lambda _: False) is None


def test_bytes_before_a_new_job() -> None:
    queue = queue_of(job(10), job(20), job(40), job(500, priority=1), job(5, priority=-1))
    assert before(queue, 0, 20) == 530
    assert before(queue, 1, 499) == 0
    assert before(queue, -1, 5) == 575


def test_who_is_around_a_job_that_is_there() -> None:
    small, there, long, urgent, idle = job(10), job(20), job(40), job(500, priority=1), job(5, -1)
    queue = queue_of(small, there, long, urgent, idle)
    assert queue.around(0, 20, 20, there) == ([urgent, small], [long])
    assert queue.around(0, 20, 20) == ([urgent, small, there], [long])
    queue.remove(there)
    assert queue.around(0, 20, 20, there) == ([], [])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "shrink", "remove", "pick"]),
            st.integers(0, 7),
            st.integers(0, 2),
        ),
        max_size=80,
    )
)
def test_against_lists_of_numbers(steps: list[tuple[str, int, int]]) -> None:
    """Nothing is lost or picked twice, and nobody is overtaken by more than it can spare."""
    queue: JobQueue[int] = JobQueue()
    spare = [math.inf, 150.0, 0.0, math.inf, 400.0, math.inf, 90.0, math.inf]
    jobs = [
        job(100 + 7 * i, priority=i % 3, kind="ab"[i % 2], slack=spare[i])
        for i in range(len(spare))
    ]
    brought = [100, 0, 114, 50, 128, 135, 20, 149]
    for one, new in zip(jobs, brought, strict=True):
        one.brought = new
    lines: dict[int, list[int]] = {0: [], 1: [], 2: []}
    born: dict[int, int] = {}
    fronts = {0: 0, 1: 0, 2: 0}

    def settle(which: int, at: int) -> None:
        line, own = lines[which % 3], jobs[which].left
        cost = min(own, brought[which])
        while at and jobs[line[at - 1]].left > own and spare[line[at - 1]] >= cost:
            at -= 1
            spare[line[at]] -= cost
        line.insert(at, which)

    for what, which, amount in steps:
        one, line = jobs[which], lines[which % 3]
        if what == "add":
            born.setdefault(which, len(born))
            if which not in line:
                settle(which, len(line))
            queue.add(one)
        elif what == "shrink":
            one.left = max(0, one.left - 30 * amount)
            if which in line:
                at = line.index(which)
                line.remove(which)
                settle(which, at)
            queue.changed(one)
        elif what == "remove":
            if which in line:
                line.remove(which)
                fronts[which % 3] *= bool(line)
            queue.remove(one)
        else:
            picked = queue.pick()
            if not any(lines.values()):
                assert picked is None
                continue
            top = max(priority for priority in lines if lines[priority])
            first = expected = lines[top][0]
            if fronts[top] == 3:
                fronts[top] = 0
                patient = [i for i in lines[top] if spare[i] == math.inf]
                expected = min(patient, key=lambda i: born[i], default=first)
            else:
                fronts[top] += 1
            assert picked is jobs[expected]
            assert picked.in_passing == (expected != first)
        assert len(queue) == sum(map(len, lines.values()))
        assert [j for p in lines for j in queue.jobs() if j.priority == p] == [
            jobs[i] for p in lines for i in lines[p]
        ]
        assert [j.slack for j in jobs] == spare
        assert all(slack >= 0 for slack in spare)
