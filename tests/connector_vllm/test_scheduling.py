"""Requests through the connector, step by step, with every byte checked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_store import FakeClient, FakeDaemon, FakeSpace
from mini_engine import BLOCK, MiniEngine

from kvstore.connectors.vllm import copier, guard
from kvstore.connectors.vllm.credits import Credits
from kvstore.connectors.vllm.settings import Settings
from kvstore.connectors.vllm.views import View
from kvstore.space import SpaceSpec

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


def quiet(daemon: FakeDaemon) -> None:
    """All engines are closed: nothing is leased or granted, slots are free or hold a block."""
    assert not daemon.leases
    assert not any(daemon.granted.values())
    held = [b.slot for b in daemon.blocks.values()]
    assert sorted(daemon.free + held) == list(range(daemon.slots))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 3 * B - 1, 3 * B, 3 * B + 1, 12 * B])
def test_lengths_around_a_block_what_one_engine_computed_another_loads(
    daemon: FakeDaemon, length: int, old: bool
) -> None:
    first = MiniEngine(daemon, old=old)
    first.run(first.add(prompt(length), 3))
    first.close()
    second = MiniEngine(daemon, old=old)
    request = second.add(prompt(length), 3)
    second.run(request)
    second.close()
    assert second.loaded_tokens == length // B * B
    quiet(daemon)


def test_a_load_names_its_request(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    request = engine.add(prompt(3 * B), 1)
    engine.run(request)
    engine.close()
    assert set(daemon.asked_for) == {request.request_id}


@pytest.mark.parametrize("group", [1, 2, 5])
def test_decoded_blocks_are_stored_too(daemon: FakeDaemon, group: int) -> None:
    first = MiniEngine(daemon, group=group)
    request = first.add(prompt(10), 60)
    first.run(request)
    tokens = request.tokens
    first.close()
    second = MiniEngine(daemon, group=group)
    second.run(second.add(tokens, 1))
    second.close()
    # The last token's own KV is never computed.
    assert second.loaded_tokens == (len(tokens) - 1) // (BLOCK * group) * BLOCK * group


def test_blocks_are_stored_while_the_prompt_is_still_computed(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon, step_tokens=B)
    request = engine.add(prompt(10 * B))
    for _ in range(6):
        engine.step()
    engine.settle()
    assert request.num_computed_tokens < request.num_tokens
    assert len(daemon.blocks) >= 4
    engine.run()
    assert len(daemon.blocks) == 10
    engine.close()


def test_the_last_chunk_of_an_idle_engine_is_stored(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon, step_tokens=B)
    engine.run(engine.add(prompt(4 * B), 1))
    assert len(daemon.blocks) == 4
    engine.close()


def test_a_request_that_ends_before_a_slot_is_there_is_stored_late(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    daemon.hold = True
    engine.run(engine.add(prompt(4 * B), 1), steps=300)
    assert not daemon.commits
    daemon.let_go()
    engine.run(engine.add([9], 2))  # something that makes the idle engine step
    engine.settle()
    assert len(daemon.blocks) == 4
    engine.run(engine.add(prompt(4 * B), 1))
    assert engine.loaded_tokens == 4 * B
    engine.close()


def test_the_last_token_is_not_stored_late(daemon: FakeDaemon) -> None:
    """It ends a block, and the block has a hash, but its own KV was never computed."""
    engine = MiniEngine(daemon)
    daemon.hold = True
    request = engine.add(prompt(2 * B - 1), 1)
    engine.run(request, steps=300)
    assert request.num_tokens == 2 * B
    daemon.let_go()
    engine.run(engine.add([9], 2))
    engine.settle()
    assert len(daemon.blocks) == 1
    engine.run(engine.add([*request.tokens, 1], 1))
    engine.close()


def test_late_blocks_with_a_new_owner_are_not_stored(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon, blocks=2 * 6 + 2)
    daemon.hold = True
    first = prompt(4 * B)
    engine.run(engine.add(first, 1), steps=300)
    other = engine.add(prompt(4 * B, 1), 1)  # takes the four blocks left, and four of the first's
    engine.run(other, steps=300)
    daemon.let_go()
    engine.run(engine.add([9], 2))
    engine.settle()
    assert 0 < len(daemon.blocks) < 8
    for tokens in (first, prompt(4 * B, 1)):
        engine.run(engine.add(tokens, 1))  # whatever is loaded is right
    engine.close()


def test_when_planning_fails_nothing_more_is_stored(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MiniEngine(daemon)
    monkeypatch.setattr(engine.scheduler._plan, "follow", lambda *_: 1 / 0)
    engine.run(engine.add(prompt(4 * B), 1))
    monkeypatch.undo()
    assert guard.failures.pop("_fill") > 0
    engine.run(engine.add(prompt(4 * B), 1))
    assert not daemon.commits
    engine.close()


def test_stores_wait_for_the_draft_pass(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon, delayed_stores=True)
    engine.run(engine.add(prompt(4 * B), 1))
    assert len(daemon.blocks) == 4
    engine.close()


def test_all_shards_or_no_hit(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon, shards=3)
    engine.run(engine.add(prompt(6 * B), 2))
    again = engine.add(prompt(6 * B), 2)
    engine.run(again)
    assert engine.loaded_tokens == 6 * B
    name = next(iter(daemon.blocks))
    daemon.blocks[name].shards.discard(2)
    engine.run(engine.add(prompt(6 * B), 2))
    assert engine.loaded_tokens == 6 * B
    engine.close()


def test_ranks_that_lay_out_their_cache_differently_are_refused(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon, shards=2)
    infos = [rank.worker.introduce() for rank in engine.ranks]
    infos[1].layout = "another"
    engine.scheduler.set_workers(infos)
    engine.run(engine.add(prompt(6 * B), 2))
    assert not daemon.blocks
    engine.close()


@pytest.mark.parametrize("old", [False, True])
def test_a_lost_generation_is_recomputed_and_not_asked_again(daemon: FakeDaemon, old: bool) -> None:
    engine = MiniEngine(daemon, old=old)
    engine.run(engine.add(prompt(8 * B), 2))
    daemon.faults.add("generation")
    request = engine.add(prompt(8 * B), 2)
    engine.run(request, steps=700)
    assert engine.loaded_tokens == 8 * B  # once
    assert daemon.usage["load_failures"] == 1
    daemon.faults.clear()
    engine.run(engine.add(prompt(8 * B), 2))
    assert engine.loaded_tokens == 16 * B
    engine.close()
    quiet(daemon)


def test_a_block_lost_after_a_local_hit_inside_a_stored_block(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon, local=True, group=4)
    tokens = prompt(8 * 4 * BLOCK)
    engine.run(engine.add(tokens, 1))
    engine.cached = dict(list(engine.cached.items())[:5])
    daemon.faults.add("generation")
    engine.run(engine.add(tokens, 2), steps=300)
    # Its own 5; of the 7 stored blocks read, the last 4 were lost.
    assert engine.failed_blocks == 4 * 4
    engine.close()
    quiet(daemon)


def test_the_first_block_lost_means_all_is_recomputed(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(B), 1))
    daemon.faults.add("generation")
    engine.run(engine.add(prompt(B), 1), steps=200)
    assert daemon.usage["load_failures"] == 1
    engine.close()


@pytest.mark.parametrize(
    "state", ["asked", "answered", "loading", "loaded", "computing", "decoding"]
)
def test_completion_for_an_aborted_request_abort_in_every_state(
    daemon: FakeDaemon, state: str
) -> None:
    engine = MiniEngine(daemon, step_tokens=2 * B)
    engine.run(engine.add(prompt(8 * B), 2))
    if state == "asked":
        daemon.hold = True
    request = engine.add(prompt(8 * B) + prompt(8 * B, 1), 9)
    if state == "answered":
        engine.free, kept = [], engine.free
        engine.step()  # promised, but there are no blocks for it
        assert engine.scheduler._tracks[request.request_id].lease is not None
        engine.free = kept
    elif state == "loading":
        meta = engine.top.build_connector_meta(engine.schedule())
        assert request.status == "loading"
        engine.abort(request)
        assert engine.all  # held until its load is reported
        engine._update([engine._work(0, meta, {})], {})
    elif state == "loaded":
        while request.request_id not in engine.received:
            engine.step()
    elif state == "computing":
        while request.status != "waiting" or not request.num_computed_tokens:
            engine.step()
            if request in engine.running:
                break
    elif state == "decoding":
        while request.num_tokens < request.num_prompt_tokens + 3:
            engine.step()
    if request.status != "finished":
        engine.abort(request)
    if state == "asked":
        daemon.let_go()
    engine.run()
    assert sorted(engine.free) == list(range(1, engine.blocks))
    # And it goes on.
    engine.run(engine.add(prompt(8 * B), 2))
    engine.close()
    quiet(daemon)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("resumed_as_new", [False, True])
def test_preempted_requests_come_back_from_the_store(
    daemon: FakeDaemon, old: bool, resumed_as_new: bool
) -> None:
    engine = MiniEngine(daemon, old=old, resumed_as_new=resumed_as_new)
    request = engine.add(prompt(6 * B), 30)
    while request.num_tokens < 7 * B:
        engine.step()
    engine.settle()
    engine.preempt(request)
    engine.run(request)
    assert engine.loaded_tokens >= 6 * B
    engine.close()
    quiet(daemon)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("owner", ["prompt", "decode", "load"])
def test_blocks_handed_out_again_while_their_store_runs(
    daemon: FakeDaemon, owner: str, old: bool
) -> None:
    """A copy that takes longer than a step: whoever gets the blocks next waits for it."""
    engine = MiniEngine(daemon, blocks=1 + 16 + 2, step_tokens=64 * B, old=old)
    loaded = prompt(8 * B, 1)
    engine.run(engine.add(loaded, 1))
    decoding = engine.add(prompt(3, 2), 16 * BLOCK if owner == "decode" else 1)
    engine.step()
    copier: Any = engine.ranks[0].worker._copier
    copy = copier._store

    def slow(*arguments: Any) -> bool:
        time.sleep(0.03)
        done: bool = copy(*arguments)
        return done

    copier._store = slow
    first = prompt(8 * B, 3)
    engine.finish(engine.add(first, 1))
    if owner == "prompt":
        engine.finish(engine.add(prompt(8 * B, 4), 1))
    elif owner == "load":
        again = engine.add(loaded, 1)
        engine.finish(again)
        assert engine.loaded_tokens == 8 * B
    else:
        engine.finish(decoding)
    engine.run()
    engine.close()
    second = MiniEngine(daemon)
    second.run(second.add(first, 1))
    assert second.loaded_tokens == 8 * B  # and they are right
    second.close()


def test_two_requests_with_one_prefix_share_the_load_and_the_store(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon, local=True, step_tokens=64 * B)
    a, b = engine.add([*prompt(8 * B), 1], 2), engine.add([*prompt(8 * B), 2], 2)
    engine.run(a, b)
    assert daemon.commits.count(1) == len(daemon.blocks) == 8
    assert daemon.commits.count(3) == 0
    engine.close()
    other = MiniEngine(daemon, local=True)
    a, b = other.add([*prompt(8 * B), 1], 2), other.add([*prompt(8 * B), 2], 2)
    other.run(a, b)
    assert other.loaded_tokens == 8 * B
    other.close()


def test_local_hits_that_end_inside_a_stored_block(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon, local=True, group=4)
    tokens = prompt(8 * 4 * BLOCK)
    engine.run(engine.add(tokens, 1))
    # Its own cache forgets all but the first five engine blocks.
    engine.cached = dict(list(engine.cached.items())[:5])
    engine.run(engine.add(tokens, 2))
    assert engine.loaded_tokens == len(tokens) - 5 * BLOCK
    engine.close()


def test_evicted_parents_are_stored_again(daemon: FakeDaemon) -> None:
    """They go while their request decodes: nothing is looked up, a child's commit tells."""
    engine = MiniEngine(daemon, local=True)
    request = engine.add(prompt(8 * B), 6 * B)
    while len(daemon.blocks) < 8:
        engine.step()
        engine.settle()
    daemon.evict(daemon.blocks)
    engine.run(request, steps=100_000)
    engine.settle()
    assert 4 in daemon.commits
    assert len(daemon.blocks) >= 12
    engine.close()
    quiet(daemon)


def test_what_was_evicted_is_stored_again_by_the_same_engine(daemon: FakeDaemon) -> None:
    """No child's commit tells: the prompt is the same, and what was evicted is all of it."""
    engine = MiniEngine(daemon)
    for _ in range(2):
        # Whatever a request was too short for, the next one stores.
        for _ in range(100):
            engine.run(engine.add(prompt(8 * B), 2))
            engine.settle()
            if len(daemon.blocks) >= 8:
                break
        assert len(daemon.blocks) == 8
        daemon.evict(daemon.blocks)
    engine.close()
    quiet(daemon)


def test_what_is_on_disk_and_declined_is_not_stored_again(daemon: FakeDaemon) -> None:
    """What comes after it is; and all of it once it is gone."""
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 2))
    engine.settle()
    engine.close()
    for _ in range(100):
        if len(daemon.blocks) == 8:
            break
        engine = MiniEngine(daemon)
        engine.run(engine.add(prompt(8 * B), 2))
        engine.settle()
        engine.close()
    assert len(daemon.blocks) == 8
    for block in list(daemon.blocks.values())[3:]:
        block.on_disk = True
    daemon.declines = True
    daemon.commits.clear()
    other = MiniEngine(daemon)
    for _ in range(3):
        other.run(other.add(prompt(8 * B), 2))
        other.settle()
    assert daemon.commits == []
    for _ in range(100):
        other.run(other.add(prompt(8 * B) + prompt(4 * B, 1), 2))
        other.settle()
        if len(daemon.blocks) == 12:
            break
    assert daemon.commits == [1] * 4
    # Also when what comes before it is declined all the same.
    daemon.evict(list(daemon.blocks)[6:])
    for _ in range(100):
        other.run(other.add(prompt(8 * B), 2))
        other.settle()
        if len(daemon.blocks) == 8:
            break
    assert daemon.commits == [1] * 6
    daemon.evict(list(daemon.blocks)[3:])
    for _ in range(100):
        other.run(other.add(prompt(8 * B), 2))
        other.settle()
        if len(daemon.blocks) == 8:
            break
    assert daemon.commits == [1] * 11
    other.close()
    quiet(daemon)


def test_what_is_being_stored_is_not_stored_twice(daemon: FakeDaemon) -> None:
    """A request that comes meanwhile is told that nothing is there."""
    engine = MiniEngine(daemon, step_tokens=64 * B)
    first, second = engine.add(prompt(8 * B), 2), engine.add(prompt(8 * B), 2)
    engine.run(first, second)
    assert daemon.commits.count(1) == len(daemon.blocks) == 8
    assert daemon.commits.count(3) == 0
    engine.close()
    quiet(daemon)


def test_what_was_stored_since_it_was_looked_up_is_not_stored_twice(daemon: FakeDaemon) -> None:
    """Requests of one prefix that wait in the queue were all told that nothing is there."""
    engine = MiniEngine(daemon, local=True, step_tokens=8 * B)
    engine.run(engine.add(prompt(4 * B, 9), 2))  # slots are there
    for number in range(6):
        engine.add(prompt(8 * B) + prompt(8 * B, 10 + number), 1)
    while engine.all:
        engine.step()
        engine.settle()
    assert daemon.commits.count(3) == 0
    engine.close()
    quiet(daemon)


def test_failed_commits_give_their_slots_back(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    daemon.faults.add("commit")
    engine.run(engine.add(prompt(8 * B), 2))
    assert not daemon.blocks
    daemon.faults.clear()
    engine.run(engine.add(prompt(8 * B), 2))
    assert len(daemon.blocks) == 8
    engine.close()
    quiet(daemon)


def test_a_pool_smaller_than_the_prompt_stores_its_head(daemon: FakeDaemon) -> None:
    small = FakeDaemon(slots=5)
    engine = MiniEngine(
        small, settings=Settings(step_wait_seconds=0, idle_credit_bytes=0, answer_seconds=60)
    )
    engine.run(engine.add(prompt(8 * B), 4))
    # However slow the machine is: what is asked for next has been stored.
    engine.settle()
    engine.run(engine.add(prompt(8 * B), 4))
    assert engine.loaded_tokens > 0
    engine.close()
    quiet(small)


def test_a_request_that_cannot_be_allocated_gives_its_lease_back(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 1))
    engine.free, kept = [], engine.free
    request = engine.add(prompt(8 * B), 1)
    for _ in range(1000):
        engine.step()
        if not daemon.leases:
            break
    assert not daemon.leases
    engine.free = kept
    engine.run(request)
    assert engine.loaded_tokens == 8 * B
    engine.close()


def test_slow_answers_do_not_hold_up_a_request(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 1))
    daemon.hold = True
    engine.run(engine.add(prompt(8 * B), 1), steps=100)
    assert engine.loaded_tokens == 0
    daemon.let_go()
    engine.close()
    quiet(daemon)


def test_growing_leases_are_waited_for(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 1))
    blocks = list(daemon.blocks.values())
    for block in blocks[4:]:
        block.on_disk = True
    request = engine.add(prompt(8 * B), 1)
    for _ in range(3):
        engine.step()
    assert request.status == "waiting"
    for block in blocks:
        block.on_disk = False
    for lease in daemon.leases.values():
        lease.grow(wait=True)
    engine.run(request)
    assert engine.loaded_tokens == 8 * B
    engine.close()


def test_reset_moves_only_this_engine_to_a_fresh_view(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    other = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 1))
    assert engine.top.reset_cache() is True
    engine.run(engine.add(prompt(8 * B), 2))
    assert engine.loaded_tokens == 0
    engine.run(engine.add(prompt(8 * B), 2))
    assert engine.loaded_tokens == 8 * B
    other.run(other.add(prompt(8 * B), 1))
    assert other.loaded_tokens == 8 * B
    engine.close()
    other.close()


def test_what_was_computed_before_a_reset_is_not_stored_after_it(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon, step_tokens=B)
    request = engine.add(prompt(8 * B), 2)
    for _ in range(4):
        engine.step()
    engine.settle()
    engine.top.reset_cache()
    before = len(daemon.blocks)
    engine.run(request)
    names = {space for space, _ in daemon.blocks}
    assert len(names) == 1
    assert len(daemon.blocks) == before > 0
    engine.close()


def test_after_a_bumped_epoch_the_engine_shares_nothing_more(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 1))
    daemon.epoch += 1
    for _ in range(2):
        engine.run(engine.add(prompt(8 * B), 1))
    assert engine.loaded_tokens == 0
    engine.close()


def test_requests_that_may_not_read_the_cache_do_not(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 1))
    request = engine.add(prompt(8 * B), 1)
    request.skip_reading_prefix_cache = True
    engine.run(request)
    assert engine.loaded_tokens == 0
    engine.close()


def test_usage_counts_tokens_by_where_they_came_from(daemon: FakeDaemon) -> None:
    engine = MiniEngine(daemon)
    engine.run(engine.add(prompt(8 * B), 1))
    engine.run(engine.add(prompt(8 * B), 1))
    assert daemon.usage["requests"] == 2
    assert daemon.usage["prompt_tokens"] == 16 * B
    assert daemon.usage["reused_tokens_host"] == 8 * B
    block_bytes = B * 8 * 8 * 3
    assert daemon.usage["stored_bytes"] == daemon.usage["loaded_bytes"] == 8 * block_bytes
    engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_keeps_every_byte_right(seed: int) -> None:
    """Small caches, shared prefixes, aborts, preemptions, restarts, lost slots: two engines."""
    rng = random.Random(seed)
    daemon = FakeDaemon(slots=40)
    engines = [
        MiniEngine(
            daemon,
            blocks=48,
            group=2,
            shards=2,
            local=rng.random() < 0.5,
            old=rng.random() < 0.3,
            resumed_as_new=rng.random() < 0.5,
            delayed_stores=rng.random() < 0.3,
        )
        for _ in range(2)
    ]
    stems = [prompt(rng.randrange(1, 12 * B), 100 + i) for i in range(4)]
    for turn in range(150):
        engine = rng.choice(engines)
        act = rng.random()
        if act < 0.25 and len(engine.all) < 6:
            stem = rng.choice(stems)
            cut = rng.randrange(1, len(stem) + 1)
            engine.add(stem[:cut] + prompt(rng.randrange(3), turn), rng.randrange(1, 12))
        elif act < 0.30 and engine.all:
            request = rng.choice(list(engine.all.values()))
            if request.status != "finished":
                engine.abort(request)
        elif act < 0.34 and engine.running:
            engine.preempt(rng.choice(engine.running))
        elif act < 0.35:
            daemon.stop()
            daemon.boot()
        elif act < 0.38:
            daemon.faults ^= {"generation"}
        elif act < 0.40:
            daemon.hold = True
        elif act < 0.44:
            daemon.let_go()
        else:
            engine.step()
    daemon.faults.clear()
    daemon.let_go()
    for engine in engines:
        engine.run()
        assert sorted(engine.free) == list(range(1, engine.blocks))
        engine.close()
    quiet(daemon)


def test_a_request_says_how_long_it_waits_for_others(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disk is read meanwhile; whose turn comes earlier asks again."""
    engine = MiniEngine(daemon)
    target = prompt(3 * B, 1)
    engine.run(engine.add(target, 1))
    for block in daemon.blocks.values():
        block.on_disk = True
    monkeypatch.setattr(engine.scheduler._pace, "rate", lambda tokens: 8.0)
    daemon.asked_for.clear()
    daemon.queued.clear()
    first = engine.add(prompt(2 * engine.step_tokens, 2), 1, "first")
    second = engine.add([*target, 0], 1, "second")
    assert daemon.queued == [0.0, first.num_tokens / 8.0]
    engine.step()
    assert (daemon.asked_for, len(daemon.leases)) == (["first", "second"], 1)
    # Nobody computes what comes before it any more.
    engine.abort(first)
    engine.step()
    assert daemon.asked_for == ["first", "second", "second"]
    assert daemon.queued[-1] == 0.0
    for block in daemon.blocks.values():
        block.on_disk = False
    for lease in list(daemon.leases.values()):
        lease.grow(wait=True)
    engine.run(second)
    assert engine.loaded_tokens == 3 * B
    engine.close()
    quiet(daemon)


def test_the_first_request_of_an_engine_is_stored_in_its_own_step(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have no other. Its space opens while it is scheduled, not before."""
    scheduled = threading.Event()
    opening, waiting = FakeClient.open_space, View.open_once

    def open_late(self: FakeClient, spec: SpaceSpec) -> FakeSpace:
        assert scheduled.wait(60)
        return opening(self, spec)

    def open_once(self: View, seconds: float) -> Any:
        scheduled.set()
        return waiting(self, seconds)

    monkeypatch.setattr(FakeClient, "open_space", open_late)
    monkeypatch.setattr(View, "open_once", open_once)
    engine = MiniEngine(daemon, settings=Settings(step_wait_seconds=1.0, answer_seconds=60.0))
    engine.add(prompt(4 * B), 1)
    engine.step()
    assert engine.planned == 4
    engine.close()


def test_slots_that_are_on_their_way_are_waited_for_a_moment(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when some are there, but fewer than the step fills."""
    engine = MiniEngine(daemon, settings=Settings(load=False, step_wait_seconds=1.0))
    engine.run(engine.add(prompt(2 * B, 1), 1))
    [view] = engine.scheduler._views.all()
    credits = view.credits
    assert credits is not None
    credits.give_back(1)
    wait = Credits.wait

    def arrives(self: Credits, seconds: float) -> None:
        daemon.let_go()
        wait(self, 60.0 if seconds else 0.0)

    monkeypatch.setattr(Credits, "wait", arrives)
    engine.planned = 0
    daemon.hold = True
    engine.add(prompt(4 * B, 2), 1)
    engine.step()
    assert engine.planned == 4
    engine.close()


def test_background_work_rests_while_a_step_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MiniEngine(FakeDaemon())
    attachment: Any = engine.ranks[0].worker._client.attachment
    resting: list[bool] = []
    forward = engine._forward

    def watched(rank: int, scheduled: dict[str, int]) -> None:
        if scheduled:
            resting.append(attachment.resting[-1])
        forward(rank, scheduled)

    monkeypatch.setattr(engine, "_forward", watched)
    engine.run(engine.add(list(range(48)), 2))
    assert resting
    assert all(resting)
    assert attachment.resting[-1] is False
    engine.close()


def test_a_store_lags_behind_its_step_until_somebody_needs_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first token must not share the processors with the copies of its prompt."""
    monkeypatch.setattr(copier, "_LAG_SECONDS", 3600.0)
    daemon = FakeDaemon()
    engine = MiniEngine(daemon, blocks=17)
    first, second = prompt(48, 1), prompt(48, 2)
    engine.finish(engine.add(first, 1))
    assert engine.planned == 6
    assert not daemon.commits
    # The blocks get new owners: what they hold is copied before it is overwritten.
    engine.finish(engine.add(second, 1))
    engine.close()
    other = MiniEngine(daemon)
    other.run(other.add([*first, 0], 1), other.add([*second, 0], 1))
    assert other.loaded_tokens == 96
    other.close()
    quiet(daemon)
