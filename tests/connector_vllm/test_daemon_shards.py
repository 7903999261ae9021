"""Three tensor-parallel ranks, each with its own shard in its own slabs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm_engine import chosen, generate, make_engine, prompt

from kvstore import Client

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def llm(daemon: Any) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1|0")
        engine = make_engine({"target": daemon.address}, tensor_parallel_size=3)
    yield engine
    engine.llm_engine.engine_core.shutdown()


def test_every_rank_stores_and_loads_its_shard(
    llm: Any, daemon: Any, until: Callable[..., None]
) -> None:
    cold = generate(llm, prompt(300, 1), tokens=3)
    with Client(daemon.address) as client:
        until(lambda: next(t.blocks for t in client.stats().tiers if t.tier == 2) == 2)
        space = client.spaces()[0]
        assert len(space.spec.shard_bytes) == 3
        assert llm.reset_prefix_cache() is True
        warm = generate(llm, prompt(300, 1), tokens=3)
        assert warm[0].num_cached_tokens == 256
        assert chosen(warm) == chosen(cold)
        until(lambda: client.stats().leases == 0)
