"""Which job goes next: class, then fewest bytes left, then, every fourth time, the oldest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.prefetch.queue import Job, JobQueue


def job(left: int, priority: int = 0, kind: str = "k") -> Job[int]:
    made: Job[int] = Job(kind, priority)
    made.left = left
    return made


def queue_of(*jobs: Job[int]) -> JobQueue[int]:
    queue: JobQueue[int] = JobQueue()
    for one in jobs:
        queue.add(one)
    return queue


def test_a_higher_class_goes_first_whatever_its_size() -> None:
    urgent, small = job(1000, priority=1), job(1)
    queue = queue_of(small, urgent)
    assert [queue.pick() for _ in range(8)] == [urgent] * 8
    queue.remove(urgent)
    assert queue.pick() is small


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
            since = 0
            queue.remove(short)
        else:
            since += 1
            queue.remove(picked)
        assert since <= 3


def test_a_job_that_shrank_by_anothers_moves_moves_up() -> None:
    first, second = job(100), job(50)
    queue = queue_of(first, second)
    first.left = 10
    queue.changed(first)
    assert queue.pick() is first


def test_kinds_that_cannot_be_served_are_passed_over_and_keep_their_place() -> None:
    wide, narrow = job(1, kind="wide"), job(9, kind="narrow")
    queue = queue_of(wide, narrow)
    assert queue.pick(lambda kind: kind != "wide") is narrow
    assert queue.pick() is wide
    assert queue.pick(lambda _: False) is None


def test_bytes_before_a_new_job() -> None:
    queue = queue_of(job(10), job(20), job(40), job(500, priority=1), job(5, priority=-1))
    assert queue.before(0, 20) == 530
    assert queue.before(1, 499) == 0
    assert queue.before(-1, 5) == 575


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
def test_against_sorting_all_of_them(steps: list[tuple[str, int, int]]) -> None:
    """The heaps skip what is out of date; nothing is lost or picked twice by it."""
    queue: JobQueue[int] = JobQueue()
    jobs = [job(100 + 7 * i, priority=i % 3, kind="ab"[i % 2]) for i in range(8)]
    inside: dict[int, int] = {}  # number -> age
    ages = iter(range(1000))
    born: dict[int, int] = {}
    short = {0: 0, 1: 0, 2: 0}
    for what, which, amount in steps:
        one = jobs[which]
        if what == "add":
            born.setdefault(which, next(ages))
            inside[which] = born[which]
            queue.add(one)
        elif what == "shrink":
            one.left = max(0, one.left - 30 * amount)
            queue.changed(one)
        elif what == "remove":
            inside.pop(which, None)
            queue.remove(one)
        else:
            picked = queue.pick()
            if not inside:
                assert picked is None
                continue
            top = max(jobs[i].priority for i in inside)
            best = [i for i in inside if jobs[i].priority == top]
            shortest = min(best, key=lambda i: (jobs[i].left, inside[i]))
            if short[top] == 3:
                short[top] = 0
                expected = min(best, key=lambda i: inside[i])
            else:
                short[top] += 1
                expected = shortest
            assert picked is jobs[expected]
            assert picked.in_passing == (short[top] == 0 and picked is not jobs[shortest])
        assert len(queue) == len(inside)
        assert sorted(id(j) for j in queue.jobs()) == sorted(id(jobs[i]) for i in inside)
