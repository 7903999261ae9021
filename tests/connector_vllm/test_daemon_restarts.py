"""Daemons that die, stop and start again under an engine: what is loaded, byte by byte."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from fake_store import FakeAttachment, FakeDaemon
from mini_engine import BLOCK, MiniEngine

from kvstore.connectors.vllm import copier as copiers
from kvstore.connectors.vllm import guard, scheduler_side

GROUP = 2
B = BLOCK * GROUP


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture(autouse=True)
def _no_hook_fails() -> Iterator[None]:
    guard.failures.clear()
    yield
    assert not guard.failures


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(250), k=length)


def worker_of(engine: MiniEngine) -> FakeAttachment:
    attachment = engine.ranks[0].worker._client.attachment
    assert isinstance(attachment, FakeAttachment)
    return attachment


def quiet(daemon: FakeDaemon) -> None:
    """All engines are closed: nothing is leased or granted, slots are free or hold a block."""
    assert not daemon.leases
    assert not any(daemon.granted.values())
    held = [b.slot for b in daemon.blocks.values()]
    assert sorted(daemon.free + held) == list(range(daemon.slots))


def test_daemon_dies_half_way_through_a_copy(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No generation is raised any more by then: that the daemon is gone is what tells."""
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 2))
    monkeypatch.setattr(copiers, "reach", lambda name: daemon.stop())
    engine.run(engine.add(prompt(8 * B), 2), steps=300)
    assert engine.failed_blocks == 8 * GROUP
    engine.close()


def test_daemon_dies_between_lease_and_copy(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 2))
    request = engine.add(prompt(8 * B), 2)
    output = engine.schedule()
    assert request.status == "loading"
    daemon.stop()
    meta = engine.top.build_connector_meta(output)
    engine._update([engine._work(0, meta, {})], {})
    engine.run(request, steps=200)
    engine.close()


def test_daemon_restarts_and_the_engine_is_warm_again(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 2))
    daemon.stop()
    engine.run(engine.add(prompt(8 * B), 2))
    assert engine.loaded_tokens == 0
    daemon.boot()
    engine.run(engine.add(prompt(8 * B), 4))
    assert len(daemon.blocks) == 8
    engine.run(engine.add(prompt(8 * B), 2))
    assert engine.loaded_tokens == 8 * B
    engine.close()
    quiet(daemon)


def test_slots_of_an_earlier_run_are_never_used(daemon: FakeDaemon) -> None:
    """The daemon restarts between planning and copying; slot names may coincide."""
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 2))
    request = engine.add(prompt(8 * B), 2)
    output = engine.schedule()
    meta = engine.top.build_connector_meta(output)
    daemon.stop()
    daemon.boot()
    daemon.room(engine.scheduler._spec(""))
    daemon.generations[:] = 1
    engine._update([engine._work(0, meta, {})], {})
    engine.run(request, steps=200)
    assert daemon.usage["load_failures"] == 1
    engine.close()


def test_daemon_absent_at_start(daemon: FakeDaemon) -> None:
    daemon.stop()
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 2))
    daemon.boot()
    engine.run(engine.add(prompt(8 * B), 5))
    engine.run(engine.add(prompt(8 * B), 2))
    assert engine.loaded_tokens == 8 * B
    engine.close()


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_the_first_request_after_a_warm_restart_is_warm(
    daemon: FakeDaemon, shards: int, seen: bool
) -> None:
    """Whether or not a step has told the scheduler that the workers' attachments are gone."""
    engine = MiniEngine(daemon, shards=shards)
    engine.run(engine.add(prompt(8 * B), 2))
    daemon.stop()
    if seen:
        engine.run(engine.add(prompt(3 * B, 1), 2))
    daemon.warm_boot()
    engine.run(engine.add(prompt(8 * B), 2))
    assert engine.loaded_tokens == 8 * B
    # And what it computes is stored again.
    engine.run(engine.add(prompt(4 * B, 2), 2))
    engine.run(engine.add(prompt(4 * B, 2), 2))
    assert engine.loaded_tokens == 12 * B
    engine.close()
    quiet(daemon)


def test_a_worker_that_finds_the_new_daemon_last_is_waited_for(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copiers, "ATTACH_SECONDS", 60.0)
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 2))
    daemon.stop()
    daemon.warm_boot()
    late = worker_of(engine)
    late.joined = False
    request = engine.add(prompt(8 * B), 2)
    output = engine.schedule()
    assert request.status == "loading"
    meta = engine.top.build_connector_meta(output)
    timer = threading.Timer(0.01, lambda: setattr(late, "joined", True))
    timer.start()
    engine._update([engine._work(0, meta, {})], {})
    engine.run(request, steps=100_000)
    timer.join()
    assert engine.loaded_tokens == 8 * B
    assert not engine.failed_blocks
    engine.close()


def test_an_engine_beside_a_daemon_is_ready_when_its_scheduler_has_found_it(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_side, "_ATTACH_SECONDS", 60.0)
    engine = MiniEngine(daemon)
    mine = engine.scheduler._client.attachment
    assert isinstance(mine, FakeAttachment)
    mine.joined = False
    infos = [rank.worker.introduce() for rank in engine.ranks]
    timer = threading.Timer(0.01, lambda: setattr(mine, "joined", True))
    timer.start()
    engine.scheduler.set_workers(infos)
    assert mine.alive
    timer.join()
    engine.close()


def test_an_engine_without_a_daemon_does_not_wait_for_one(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_side, "_ATTACH_SECONDS", 3600.0)
    engine = MiniEngine(daemon)
    mine = engine.scheduler._client.attachment
    assert isinstance(mine, FakeAttachment)
    infos = [rank.worker.introduce() for rank in engine.ranks]
    for info in infos:
        info.attachment_id = 0
    mine.joined = False
    engine.scheduler.set_workers(infos)
    assert not mine.alive
    engine.close()


def test_a_worker_that_cannot_map_the_next_daemon_s_pool_costs_one_load(
    daemon: FakeDaemon,
) -> None:
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 2))
    daemon.stop()
    daemon.warm_boot()
    worker_of(engine).unmappable = True
    for _ in range(3):
        engine.run(engine.add(prompt(8 * B), 2), steps=300)
    assert daemon.usage["load_failures"] == 1
    # The one after that it can.
    daemon.stop()
    daemon.warm_boot()
    worker_of(engine).unmappable = False
    engine.run(engine.add(prompt(8 * B), 2))
    engine.run(engine.add(prompt(8 * B), 2))
    assert engine.loaded_tokens >= 8 * B
    engine.close()
