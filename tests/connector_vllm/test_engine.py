"""A real engine in this process, on a store that can be made to fail: same tokens, whatever happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_store import DAEMONS, FakeDaemon
from vllm_engine import chosen, generate, make_engine, prompt

from kvstore.connectors.vllm import guard

# vLLM and PyTorch warn about themselves.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LENGTH = 530  # four stored blocks of 128 tokens, 18 left
TIGHT_BLOCKS = 42


@pytest.fixture(scope="module")
def daemon() -> FakeDaemon:
    DAEMONS["engine"] = FakeDaemon(slots=64)
    return DAEMONS["engine"]


@pytest.fixture(scope="module")
def llm(daemon: FakeDaemon) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        engine = make_engine(
            {"target": "engine", "store_factory": "fake_store:FakeClient"},
            block_size=32,
            num_gpu_blocks_override=TIGHT_BLOCKS,
            max_num_batched_tokens=256,
            enable_chunked_prefill=True,
        )
        yield engine
        engine.llm_engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def _fresh(llm: Any, daemon: FakeDaemon) -> Iterator[None]:
    guard.failures.clear()
    daemon.faults.clear()
    daemon.commits.clear()
    daemon.usage.clear()
    forget(llm)
    yield
    assert not guard.failures
    wait_for(lambda: not daemon.leases)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def forget(llm: Any) -> None:
    """Empty the engine's own prefix cache, so that a hit can only come from the store."""
    assert llm.reset_prefix_cache() is True


def run_cold(llm: Any, daemon: FakeDaemon, seed: int) -> list[list[int]]:
    outputs = generate(llm, prompt(LENGTH, seed))
    assert outputs[0].num_cached_tokens == 0
    # Nobody steps the engine now: commits happen all the same.
    wait_for(lambda: daemon.commits.count(1) >= 4)
    forget(llm)
    return chosen(outputs)


def test_warm_tokens_are_the_cold_ones(llm: Any, daemon: FakeDaemon) -> None:
    cold = run_cold(llm, daemon, 1)
    warm = generate(llm, prompt(LENGTH, 1))
    assert warm[0].num_cached_tokens == 512
    assert chosen(warm) == cold
    assert daemon.usage["reused_tokens_host"] == 512


def test_a_prompt_of_whole_blocks_leaves_one_token(llm: Any, daemon: FakeDaemon) -> None:
    cold = generate(llm, prompt(512, 2))
    wait_for(lambda: daemon.commits.count(1) >= 4)
    forget(llm)
    warm = generate(llm, prompt(512, 2))
    assert warm[0].num_cached_tokens >= 511
    assert chosen(warm) == chosen(cold)


def test_load_failure_gives_the_same_tokens_once(llm: Any, daemon: FakeDaemon) -> None:
    cold = run_cold(llm, daemon, 3)
    daemon.faults.add("generation")
    assert chosen(generate(llm, prompt(LENGTH, 3))) == cold
    assert daemon.usage["load_failures"] == 1
    daemon.faults.clear()
    forget(llm)
    warm = generate(llm, prompt(LENGTH, 3))
    assert warm[0].num_cached_tokens == 512
    assert chosen(warm) == cold


def test_local_hit_inside_a_stored_block(llm: Any, daemon: FakeDaemon) -> None:
    cold = run_cold(llm, daemon, 4)
    tokens = prompt(LENGTH, 4)["prompt_token_ids"]
    generate(llm, {"prompt_token_ids": tokens[:70]}, tokens=1)  # two engine blocks of four
    before = daemon.usage.get("reused_tokens_host", 0)
    warm = generate(llm, prompt(LENGTH, 4))
    assert chosen(warm) == cold
    assert daemon.usage["reused_tokens_host"] - before == 512 - 64


def test_daemon_gone_and_back(llm: Any, daemon: FakeDaemon) -> None:
    cold = run_cold(llm, daemon, 5)
    daemon.stop()
    assert chosen(generate(llm, prompt(LENGTH, 5))) == cold
    forget(llm)
    daemon.boot()
    daemon.commits.clear()
    assert chosen(generate(llm, prompt(LENGTH, 5))) == cold
    wait_for(lambda: daemon.commits.count(1) >= 4)
    forget(llm)
    warm = generate(llm, prompt(LENGTH, 5))
    assert warm[0].num_cached_tokens == 512
    assert chosen(warm) == cold


def test_what_is_reported_is_what_the_outputs_say(llm: Any, daemon: FakeDaemon) -> None:
    """The effective hit rate, whoever had the tokens: the store, the engine's own cache, or both."""
    run_cold(llm, daemon, 11)
    daemon.usage.clear()
    outputs = generate(llm, prompt(LENGTH, 12))  # nobody has it
    outputs += generate(llm, prompt(LENGTH, 11))  # the store has it
    outputs += generate(llm, prompt(LENGTH, 11))  # now the engine, too
    forget(llm)
    tokens = prompt(LENGTH, 11)["prompt_token_ids"]
    outputs += generate(llm, {"prompt_token_ids": tokens[:70]}, tokens=1)  # shorter than a block
    outputs += generate(llm, prompt(LENGTH, 11))  # two engine blocks here, the rest in the store
    cached = [output.num_cached_tokens for output in outputs]
    assert cached == [0, 512, 512, 0, 512]
    used = daemon.usage
    assert used["requests"] == len(outputs)
    assert used["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    assert used["reused_tokens_host"] + used["local_tokens"] == sum(cached)
    assert used["local_tokens"] == 512 + 64


def test_abort_while_loading(llm: Any, daemon: FakeDaemon) -> None:
    from vllm import SamplingParams

    cold = run_cold(llm, daemon, 6)
    engine = llm.llm_engine
    for steps in range(4):
        engine.add_request(f"abort-{steps}", prompt(LENGTH, 6), SamplingParams(max_tokens=9))
        for _ in range(steps):
            engine.step()
        engine.abort_request([f"abort-{steps}"])
        while engine.has_unfinished_requests():
            engine.step()
    scheduler = engine.engine_core.engine_core.scheduler
    while scheduler.has_requests():
        engine.engine_core.engine_core.step()
    assert not scheduler.requests
    forget(llm)  # True only if no block is held
    assert chosen(generate(llm, prompt(LENGTH, 6))) == cold


def test_preemption_in_a_tight_cache(
    llm: Any, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests fit in, but not with what they generate: one is preempted and comes back."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def count(request: Any, *args: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **options)

    monkeypatch.setattr(scheduler, "_preempt_request", count)
    length, tokens = 620, 40
    alone = [chosen(generate(llm, prompt(length, seed), tokens=tokens))[0] for seed in (7, 8)]
    wait_for(lambda: daemon.commits.count(1) >= 8)
    forget(llm)
    both = generate(llm, prompt(length, 7), prompt(length, 8), tokens=tokens)
    assert chosen(both) == alone
    forget(llm)
    daemon.evict(daemon.blocks)
    daemon.usage.clear()
    preempted.clear()
    both = generate(llm, prompt(length, 7), prompt(length, 8), tokens=tokens)
    assert chosen(both) == alone
    assert preempted


def test_two_requests_with_one_prefix_store_it_once(llm: Any, daemon: FakeDaemon) -> None:
    shared = prompt(LENGTH, 9)["prompt_token_ids"]
    pair = [{"prompt_token_ids": [*shared, last]} for last in (1001, 1002)]
    cold = chosen(generate(llm, *pair))
    wait_for(lambda: daemon.commits.count(1) >= 4)
    assert daemon.commits == [1] * 4
    forget(llm)
    assert chosen(generate(llm, *pair)) == cold


def test_reset_of_the_connector_is_a_fresh_view(llm: Any, daemon: FakeDaemon) -> None:
    cold = run_cold(llm, daemon, 10)
    assert llm.reset_prefix_cache(reset_connector=True) is True
    again = generate(llm, prompt(LENGTH, 10))
    assert again[0].num_cached_tokens == 0
    assert chosen(again) == cold
