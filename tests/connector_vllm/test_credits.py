"""Slots reserved ahead: who they are for, and that none is forgotten."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_store import SLOT

from kvstore.connectors.vllm.credits import Credits
from kvstore.errors import DeadlineExceeded, KVStoreError


class Daemon:
    """Answers when told to."""

    def __init__(self) -> None:
        self.boot_id, self.id = b"boot", 7
        self.asked: list[tuple[int, Future[Any]]] = []
        self.given_back: list[tuple[int, int]] = []

    def reserve(self, count: int, **_: Any) -> Future[Any]:
        self.asked.append((count, Future()))
        return self.asked[-1][1]

    def grant(self, number: int, count: int, shortage: int = 0, **fields: Any) -> None:
        _, future = self.asked.pop(0)
        known: dict[str, Any] = {"boot_id": b"boot", "owner_id": 7}
        slots = np.zeros(count, SLOT)
        slots["index"] = range(100 * number, 100 * number + count)
        future.set_result(
            SimpleNamespace(id=number, slots=slots, shortage=shortage, **(known | fields))
        )

    def abort(self, owner: int, grant: int, slots: Any = None, all_shards: bool = False) -> None:
        assert all_shards
        self.given_back.append((grant, -1 if slots is None else len(slots)))


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def errors() -> list[KVStoreError]:
    return []


@pytest.fixture
def credits(daemon: Daemon, now: list[float], errors: list[KVStoreError]) -> Credits:
    made: Any = daemon
    return Credits(made, made, (1, 2), failed=errors.append, clock=lambda: now[0])


def test_one_question_at_a_time(credits: Credits, daemon: Daemon) -> None:
    for _ in range(3):
        credits.top_up(8, tuple)
    assert [count for count, _ in daemon.asked] == [8]
    daemon.grant(1, 8)
    credits.top_up(10, tuple)
    assert [count for count, _ in daemon.asked] == [2]


def test_slots_are_taken_in_order_across_grants(credits: Credits, daemon: Daemon) -> None:
    for number in (1, 2):
        credits.top_up(3 * number, tuple)
        daemon.grant(number, 3)
    credits.poll()
    taken = credits.take(4)
    assert taken.grants.tolist() == [1, 1, 1, 2]
    assert taken.slots["index"].tolist() == [100, 101, 102, 200]
    assert credits.take(9).slots["index"].tolist() == [201, 202]
    assert len(credits.take(1).slots) == credits.available == 0


def test_the_newest_are_given_back_first(credits: Credits, daemon: Daemon) -> None:
    for number in (1, 2):
        credits.top_up(3 * number, tuple)
        daemon.grant(number, 3)
    credits.give_back(2)
    assert daemon.given_back == [(2, 3), (1, 1)]
    assert credits.take(9).slots["index"].tolist() == [100, 101]


def test_closing_returns_what_is_still_to_come(credits: Credits, daemon: Daemon) -> None:
    credits.top_up(4, tuple)
    credits.close()
    daemon.grant(1, 4)
    assert daemon.given_back == [(1, -1)]
    assert credits.available == 0


@pytest.mark.parametrize("fields", [{"boot_id": b"next"}, {"owner_id": 8}])
def test_a_grant_to_another_incarnation_is_returned(
    credits: Credits, daemon: Daemon, fields: dict[str, Any]
) -> None:
    credits.top_up(4, tuple)
    daemon.grant(1, 4, **fields)
    credits.poll()
    assert credits.available == 0
    assert daemon.given_back == [(1, -1)]


def test_a_short_pool_is_asked_ever_less_often(
    credits: Credits, daemon: Daemon, now: list[float]
) -> None:
    asked = 0
    for step in range(1000):
        now[0] = step / 100
        credits.top_up(4, tuple)
        if daemon.asked:
            asked += 1
            daemon.grant(asked, 0, shortage=1)
    assert 8 <= asked <= 20


def test_errors_are_told_and_asked_again_later(
    credits: Credits, daemon: Daemon, errors: list[KVStoreError], now: list[float]
) -> None:
    credits.top_up(4, tuple)
    daemon.asked.pop()[1].set_exception(DeadlineExceeded("late"))
    credits.top_up(4, tuple)
    assert not daemon.asked
    assert len(errors) == 1
    now[0] += 1
    credits.top_up(4, tuple)
    assert len(daemon.asked) == 1
