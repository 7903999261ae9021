"""Checks the eviction rule itself, on a model: nothing of kvstore is imported here."""

from __future__ import annotations

import pytest
from eviction_machine import EvictionMachine
from eviction_rule import Model
from hypothesis import given, settings
from hypothesis import strategies as st

LONG = [chr(0x4E00 + i) for i in range(200)]

TestEvictionMachine = EvictionMachine.TestCase
TestEvictionMachine.settings = settings(max_examples=200, stateful_step_count=40)


def store(model: Model, chain: list[str], window: int = 1) -> int:
    """Put a chain as a client does: ahead by a window, protecting what was put. Return its run."""
    done = 0
    while done < len(chain):
        if chain[done] in model.order:
            done += 1
            continue
        tail = chain[done - 1 : done] if done else []
        got = model.reserve(min(window, len(chain) - done), tail)
        while not got and model.waiting:
            model.flush_step()
            got = model.reserve(1, tail)
        if not got:
            break
        for _ in range(got):
            if chain[done] not in model.order:
                assert model.commit(chain[done]) == "committed"
            else:
                model.granted -= 1
            done += 1
    while model.waiting:
        model.flush_step()
    return done


def chain_of(letter: str, length: int) -> list[str]:
    return [letter * n for n in range(1, length + 1)]


def run_of(model: Model, chain: list[str]) -> int:
    return next((i for i, key in enumerate(chain) if key not in model.order), len(chain))


@pytest.mark.parametrize("policy", ["through", "evict"])
@given(
    host=st.integers(1, 8), disk=st.integers(0, 12), window=st.integers(1, 4), n=st.integers(1, 40)
)
@settings(max_examples=150)
def test_a_chain_longer_than_everything_keeps_its_head(
    policy: str, host: int, disk: int, window: int, n: int
) -> None:
    model = Model(host, disk, policy)
    chain = chain_of("a", n)
    stored = store(model, chain, window)
    assert run_of(model, chain) == len(model.order) == stored
    assert stored >= min(n, max(host, disk))
    for _ in range(2):  # again: nothing is swapped for nothing
        before = list(model.order)
        assert store(model, chain, window) == stored
        assert sorted(model.order) == sorted(before)


@pytest.mark.parametrize("policy", ["through", "evict"])
@given(
    host=st.integers(1, 8),
    disk=st.integers(0, 12),
    lengths=st.lists(st.integers(1, 10), min_size=2, max_size=12),
)
@settings(max_examples=150)
def test_the_chain_that_came_last_is_there_as_far_as_it_fits(
    policy: str, host: int, disk: int, lengths: list[int]
) -> None:
    model = Model(host, disk, policy)
    for i, length in enumerate(lengths):
        chain = chain_of(LONG[i], length)
        stored = store(model, chain)
        assert run_of(model, chain) == stored >= min(length, host)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_chains_that_are_used_stay_and_the_others_go(uses: list[int]) -> None:
    model = Model(6, 0, "through")
    chains = [chain_of(letter, 2) for letter in "abcdef"]
    for which in uses:
        store(model, chains[which])
        model.touch(chains[which])
    recent = list(dict.fromkeys(reversed(uses)))[:3]
    for which in recent:
        assert run_of(model, chains[which]) == 2


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_copy_on_the_gpu_goes_before_the_last_other_one(on_disk: bool) -> None:
    model = Model(2, 1, "evict", gpu_blocks=1)
    store(model, ["a"])
    assert model.load_gpu("a")
    if on_disk:
        model.enqueue("a")
        model.flush_step()
        model.evict(["a"], "host")
        assert (model.gpu, model.host, model.disk) == ({"a"}, set(), {"a"})
    model.hold_gpu("a")
    model.evict(["a"], "disk" if on_disk else "host")
    assert model.order == ["a"]
    model.release_gpu("a")
    model.evict(["a"], "disk" if on_disk else "host")
    assert not model.order
    assert not model.gpu


def test_a_last_copy_on_disk_waits_for_its_child_in_host() -> None:
    model = Model(2, 1, "evict")
    store(model, ["a"])
    model.enqueue("a")
    model.flush_step()
    model.evict(["a"], "host")
    store(model, ["a", "aa"])
    assert (model.host, model.disk) == ({"aa"}, {"a"})
    model.evict(["a"], "disk")
    assert not model.evictable_disk("a")
    assert model.order == ["aa", "a"]
    model.evict(["aa"], "host")
    assert model.evictable_disk("a")


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_parent_waits_for_the_shards_of_its_child(tier: str) -> None:
    model = Model(2, 1, "evict")
    store(model, ["a"])
    if tier == "disk":
        model.enqueue("a")
        model.flush_step()
        model.evict(["a"], "host")
    model.reserve(1, [])
    assert model.commit("aa", partly=True) == "waiting"
    model.evict(["a"], tier)
    assert model.order == ["a"]
    assert model.complete("aa") == "committed"


def test_a_chain_on_its_way_to_disk_does_not_push_out_its_own_head() -> None:
    model = Model(4, 2, "through")
    assert store(model, chain_of("a", 4)) == 4
    assert model.disk == {"a", "aa"}
    assert model.refused == {"aaa", "aaaa"}
    # Another chain takes the place of the colder one, tail first, and what was refused leaves
    # host with its last copy.
    assert store(model, chain_of("b", 2)) == 2
    assert model.host >= {"b", "bb"}
    assert "aaaa" not in model.order
