"""An engine that starts: memory is made and pinned before it serves, and nothing holds it up for ever."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest

from kvstore import Client
from kvstore.connectors.vllm import guard, pool_wait
from kvstore.connectors.vllm.cuda.pins import SlabPins
from kvstore.connectors.vllm.pool_wait import PoolWait
from kvstore.errors import InvalidRequest, NotImplementedByServer, ServerUnavailable
from kvstore.proto import kvstore_pb2 as pb
from kvstore.units import KIB, MIB

POOL = 64 * MIB
# Of one block, on two ranks.
SHARDS = (256 * KIB, 256 * KIB)
NEVER = 600.0

Until = Callable[..., None]


class Runtime:
    """Pins memory that is there, when it is allowed to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()

    def set_device(self, device: int) -> None:
        pass

    def relax_capture(self) -> None:
        pass

    def host_register(self, address: int, length: int) -> None:
        (ctypes.c_uint8 * length).from_address(address)[length - 1]
        self.entered.set()
        assert self.go.wait(120.0)

    def host_unregister(self, address: int) -> None:
        pass


class Rank:
    """What a worker has of this."""

    def __init__(self, address: str, rank: int = 0, seconds: float = NEVER) -> None:
        self.runtime = Runtime()
        self.client = Client(address, shards=[rank])
        self.pins = SlabPins(self.runtime, 0)
        attachment: Any = self.client.attachment
        attachment.use_devices(["GPU-a"], self.pins)
        self.wait = PoolWait(attachment, SHARDS, self.pins, seconds)
        self.waiting = threading.Thread(target=self._introduce, daemon=True)

    def _introduce(self) -> None:
        self.client.attachment.wait_active(60.0)
        self.wait.wait()

    def waited(self) -> bool:
        self.waiting.join(120.0)
        return not self.waiting.is_alive()

    def close(self) -> None:
        self.runtime.go.set()
        self.client.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    monkeypatch.setattr(pool_wait, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(guard, "_said", set())
    made: list[Rank] = []

    def make(*arguments: Any, **options: Any) -> Rank:
        made.append(Rank(*arguments, **options))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def said(text: str) -> bool:
    return any(text in line for line in guard._said)


def test_two_ranks_serve_once_the_pool_is_made_and_each_has_pinned_its_shards(
    start_daemon: Callable[..., Any], ranks: Callable[..., Rank]
) -> None:
    daemon = start_daemon("--host-pool", f"{POOL >> 20}MiB")
    two = [ranks(daemon.address, rank) for rank in (0, 1)]
    for rank in two:
        rank.wait.ask()  # before anybody is attached
    for rank in two:
        rank.waiting.start()
    assert all(rank.waited() for rank in two)
    assert [rank.pins.pinned_bytes for rank in two] == [POOL // 2, POOL // 2]
    assert [rank.pins.threads() for rank in two] == [1, 1]
    (host,) = two[0].client.stats().tiers
    assert host.allocated_bytes == host.capacity_bytes == POOL
    assert host.used_bytes == 0
    assert said("64 MiB made, 32 MiB pinned by this worker")
    assert not guard.failures["pin"]


def test_a_pool_of_an_earlier_engine_is_pinned_and_not_made_again(
    start_daemon: Callable[..., Any], ranks: Callable[..., Rank]
) -> None:
    daemon = start_daemon("--host-pool", f"{POOL >> 20}MiB")
    for _ in range(2):
        rank = ranks(daemon.address)
        rank.waiting.start()
        assert rank.waited()
        assert rank.pins.pinned_bytes == POOL // 2
        assert rank.client.stats().counters.get("slab_groups_retired", 0) == 0


def test_an_engine_whose_time_is_up_serves_and_the_rest_is_pinned_beside_it(
    start_daemon: Callable[..., Any], ranks: Callable[..., Rank], until: Until
) -> None:
    daemon = start_daemon("--host-pool", f"{POOL >> 20}MiB")
    rank = ranks(daemon.address, seconds=0.5)
    rank.runtime.go.clear()
    rank.waiting.start()
    assert rank.waited()
    assert rank.pins.threads() == 1
    assert not rank.pins.pinned_bytes
    assert said("until the rest is, too, loads and stores are slower")
    rank.runtime.go.set()
    until(lambda: rank.pins.pinned_bytes == POOL // 2)


def test_a_daemon_that_dies_meanwhile_is_not_waited_for(
    start_daemon: Callable[..., Any], ranks: Callable[..., Rank]
) -> None:
    daemon = start_daemon("--host-pool", f"{POOL >> 20}MiB")
    rank = ranks(daemon.address)
    rank.runtime.go.clear()
    rank.waiting.start()
    assert rank.runtime.entered.wait(60.0)
    daemon.kill()
    assert rank.waited()
    assert said("the daemon went away")


def test_a_daemon_that_stands_still_is_waited_for_as_long_as_was_said(
    start_daemon: Callable[..., Any], ranks: Callable[..., Rank]
) -> None:
    daemon = start_daemon("--host-pool", f"{POOL >> 20}MiB")
    rank = ranks(daemon.address, seconds=0.5)
    assert rank.client.attachment.wait_active(60.0)
    daemon.signal(signal.SIGSTOP)
    try:
        rank.waiting.start()
        assert rank.waited()
    finally:
        daemon.signal(signal.SIGCONT)


def test_a_daemon_whose_memory_cannot_be_mapped_makes_none(
    start_daemon: Callable[..., Any], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of another machine."""
    daemon = start_daemon("--host-pool", f"{POOL >> 20}MiB")
    with Client(daemon.tcp) as client:
        pins, attachment = SlabPins(Runtime(), 0), cast("Any", client.attachment)
        asking = PoolWait(attachment, SHARDS, pins, NEVER)
        until(lambda: attachment.streams_only)
        asking._ask()
        asking.wait()
        assert client.stats().tiers[0].allocated_bytes == 0
        assert pins.threads() == 1


def test_without_a_daemon_nothing_is_waited_for(tmp_path: Any, ranks: Callable[..., Rank]) -> None:
    rank = ranks(f"unix://{tmp_path}/nobody.sock")
    rank.wait.wait()
    assert rank.pins.threads() == 1
    assert not guard._said


class Script:
    """An attachment that answers as it is told; each pause takes a second."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, ...]] = []
        self.now = 0.0
        self.alive = True
        self.groups: list[tuple[int, ...]] = []
        self.unfilled = 0

    def make_room(self, shard_bytes: Sequence[int]) -> Future[Any]:
        self.asked.append(tuple(shard_bytes))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        future: Future[Any] = Future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future

    def wait_filled(self, timeout_s: float, groups: Collection[int] = ()) -> bool:
        assert timeout_s >= 0
        self.groups.append(tuple(groups))
        self.unfilled -= 1
        return self.unfilled < 0

    def pause(self, seconds: float) -> None:
        self.now += 1.0

    def wait(self, shards: Sequence[int] = SHARDS, seconds: float = 20.0) -> PoolWait:
        pins = SlabPins(Runtime(), 0)
        made: Any = self
        return PoolWait(made, shards, pins, seconds, clock=lambda: self.now, pause=self.pause)


def room(made: int, expected: int, *groups: int) -> pb.MakeRoomResponse:
    return pb.MakeRoomResponse(made_bytes=made, expected_bytes=expected, groups=groups)


def test_it_is_asked_again_until_nothing_more_comes_and_all_of_it_is_pinned() -> None:
    script = Script(room(1, 3, 7), ServerUnavailable("a moment"), room(3, 3, 7, 8))
    script.unfilled = 2
    script.wait().wait()
    assert script.groups == [(7,), (7, 8), (7, 8)]
    assert script.asked == [SHARDS] * 4


@pytest.mark.parametrize("made", [0, 2])
def test_a_pool_that_gets_no_memory_is_taken_as_it_is(made: int) -> None:
    script = Script(room(made, 9), room(made, made))
    script.wait().wait()
    assert len(script.asked) == 2


def test_a_pool_that_never_ends_growing_is_waited_for_until_the_time_is_up() -> None:
    script = Script(room(1, 9))
    script.wait().wait()
    assert script.now == 20.0


@pytest.mark.parametrize(
    "answer", [NotImplementedByServer("MakeRoom"), InvalidRequest("shard_bytes", "are too many")]
)
def test_a_daemon_that_makes_nothing_ahead_has_its_memory_pinned_all_the_same(
    answer: Exception,
) -> None:
    script = Script(answer)
    script.unfilled = 1
    script.wait().wait()
    assert script.groups == [(), ()]


def test_who_does_not_know_the_shape_asks_for_nothing_and_who_does_not_wait_neither() -> None:
    unknown = Script(room(0, 0))
    unknown.wait(()).ask()  # begins no thread
    unknown.wait(()).wait()
    assert unknown.groups == [()]
    impatient = Script(room(0, 0))
    impatient.wait(seconds=0.0).ask()
    impatient.wait(seconds=0.0).wait()
    assert not impatient.groups
    assert not unknown.asked + impatient.asked
