"""Hit rates of one LRU pool: published ones, and those of a plain LRU list."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest

from kvstore.replay import CostModel, Simulation, SizeResult, open_trace, parse_blocks, replay

HERE = Path(__file__).parent
CHATS = HERE / "chats.jsonl"
# Capacity in blocks: block and token hit rate, percent. Computed with `plain_lru` below.
CHATS_GOLDEN = {50: (11.88, 12.13), 200: (33.70, 34.42), 500: (59.31, 60.57), 5000: (73.09, 74.64)}
# From the README beside the trace.
CONVERSATION_GOLDEN = {
    "1000": (4.45, 4.54),
    "5859": (13.61, 13.87),
    "30000": (32.57, 33.22),
    "unlimited": (36.64, 37.36),
}


def run(path: Path, blocks: str) -> list[SizeResult]:
    trace = open_trace(str(path), token_bytes=1 << 17)
    try:
        sizes = parse_blocks(blocks)
        return replay(trace, [Simulation(size, trace.spaces, CostModel()) for size in sizes])
    finally:
        trace.close()


def plain_lru(path: Path, capacity: int, block_tokens: int = 512) -> tuple[float, float]:
    """One list, most recent last: a request is looked up as a whole, then touched tail first."""
    cache: OrderedDict[int, None] = OrderedDict()
    blocks = hits = tokens = hit_tokens = 0
    for line in path.read_text().splitlines():
        request = json.loads(line)
        ids = request["hash_ids"]
        run = next((n for n, block in enumerate(ids) if block not in cache), len(ids))
        blocks += len(ids)
        hits += run
        tokens += request["input_length"]
        hit_tokens += min(request["input_length"], run * block_tokens)
        for block in reversed(ids):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return 100 * hits / blocks, 100 * hit_tokens / tokens


@pytest.mark.parametrize("capacity", CHATS_GOLDEN)
def test_the_index_hits_what_a_plain_lru_hits(capacity: int) -> None:
    (result,) = run(CHATS, str(capacity))
    expected = plain_lru(CHATS, capacity)
    assert (result.block_hit_rate, result.token_hit_rate) == pytest.approx(expected, abs=1e-9)
    assert expected == pytest.approx(CHATS_GOLDEN[capacity], abs=0.005)


def test_a_pool_smaller_than_the_chains_keeps_their_heads() -> None:
    for capacity in (1, 3, 7):
        (result,) = run(CHATS, str(capacity))
        expected = plain_lru(CHATS, capacity)
        assert (result.block_hit_rate, result.token_hit_rate) == pytest.approx(expected, abs=1e-9)
        assert result.pool.not_stored > 0


def test_the_conversation_trace_hits_what_its_readme_says() -> None:
    traces = [parent / "shared/traces/conversation_trace.jsonl" for parent in HERE.parents]
    path = next((path for path in traces if path.exists()), None)
    if path is None:
        pytest.skip("shared/traces/conversation_trace.jsonl is not beside the repository")
    results = run(path, ",".join(CONVERSATION_GOLDEN))
    for result, expected in zip(results, CONVERSATION_GOLDEN.values(), strict=True):
        # Two digits are given, 0.05 points are allowed.
        assert (result.block_hit_rate, result.token_hit_rate) == pytest.approx(expected, abs=0.05)
    assert results[0].requests == 12_031
