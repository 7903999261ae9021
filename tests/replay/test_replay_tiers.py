"""Two tiers without bytes: where blocks go, what is written, what it costs."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from kvstore.config import WritePolicy
from kvstore.index import Block, BlockIndex, SpaceIndex, disk_evictable, host_evictable
from kvstore.replay import (
    CostModel,
    Prices,
    Request,
    Simulation,
    Size,
    SizeResult,
    TraceSpace,
    recommend,
    replay,
)
from kvstore.replay.distribution import Distribution
from kvstore.replay.tiered_pool import TieredPool
from kvstore.space import SpaceSpec
from kvstore.tiers.base import Slot

BLOCK = 4096
KIND = TraceSpace(block_tokens=16, block_bytes=BLOCK)
FAST = CostModel(disk_read=1e12, host_read=1e12, disk_write=float("inf"))


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}/{n}".encode().ljust(16, b"\0") for n in range(blocks)]


def ask(name: str, blocks: int, at: float = 0.0) -> Request:
    return Request(at, chain(name, blocks), 16 * blocks)


def result_of(
    requests: list[Request],
    host: int,
    disk: int,
    policy: WritePolicy = WritePolicy.THROUGH,
    cost: CostModel = FAST,
) -> SizeResult:
    size = Size(host * BLOCK, disk * BLOCK)
    return replay(requests, [Simulation(size, [KIND], cost, policy)])[0]


def test_what_left_host_is_loaded_from_disk() -> None:
    requests = [ask("a", 8), ask("b", 8), ask("c", 8), ask("a", 8)]
    result = result_of(requests, host=12, disk=100)
    assert (result.host_blocks, result.disk_blocks) == (0, 8)
    assert result.pool.written == 24
    assert result.pool.promoted == 8
    assert result_of(requests, host=12, disk=0).host_blocks == 0
    assert result_of(requests, host=30, disk=0).host_blocks == 8


@pytest.mark.parametrize(
    ("policy", "written"), [("through", 24), ("reused", 4), ("evict", 16), ("evict-roomy", 0)]
)
def test_each_policy_writes_what_it_says(policy: str, written: int) -> None:
    name, _, roomy = policy.partition("-")
    requests = [ask("a", 8), ask("a", 4), ask("b", 8), ask("c", 8)]
    result = result_of(requests, 100 if roomy else 12, 100, WritePolicy(name))
    assert result.pool.written == written
    assert result.pool.written_bytes == written * BLOCK


def test_a_slow_disk_keeps_host_full_of_what_it_has_not_written() -> None:
    # Nothing is written between requests at the same moment: the next store waits for the disk.
    slow = CostModel(disk_write=BLOCK)
    requests = [ask("a", 10), ask("b", 10)]
    result = result_of(requests, host=10, disk=100, cost=slow)
    assert result.pool.stored == 20
    assert result.pool.written == 20
    # A second request of `a` finds it on disk.
    again = result_of([*requests, ask("a", 10, at=60.0)], host=10, disk=100, cost=slow)
    assert again.host_blocks + again.disk_blocks + again.not_worth_blocks == 10


def test_what_loads_slower_than_it_computes_is_computed() -> None:
    requests = [ask("a", 8), ask("b", 8), ask("a", 8)]
    # A block of 16 tokens takes 1.6 ms to compute; to load, 4 s or 0.4 µs.
    slow = result_of(requests, 8, 100, cost=CostModel(disk_read=1e3))
    assert slow.disk_blocks == 0
    assert slow.not_worth_blocks == 8
    assert slow.ttft.maximum == pytest.approx(128 / 10_000)
    fast = result_of(requests, 8, 100, cost=CostModel(disk_read=1e10))
    assert fast.disk_blocks == 8
    # One token is computed whatever is loaded.
    assert fast.ttft.quantile(0.01) >= 1 / 10_000


def test_requests_wait_for_an_engine() -> None:
    requests = [ask(name, 10) for name in "abcd"]
    assert result_of(requests, 100, 0).ttft.maximum == pytest.approx(0.016)
    waiting = result_of(requests, 100, 0, cost=CostModel(engines=2))
    assert waiting.ttft.maximum == pytest.approx(0.032)
    assert waiting.ttft.mean == pytest.approx(0.024)


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_the_rule_holds_and_nothing_piles_up(policy: WritePolicy) -> None:
    rng = random.Random(7)
    host, disk = 40, 90
    pool = TieredPool(host * BLOCK, disk * BLOCK, policy, write_bytes_per_second=100 * BLOCK)
    space = pool.space(0, KIND)
    for n in range(4000):
        pool.advance(n / 10)
        keys = chain(f"{rng.randrange(60)}", rng.randint(1, 30))
        run = pool.find(space, keys)
        in_host = pool.use(run)
        if in_host < len(run) and rng.random() < 0.8:
            pool.promote(run)
        run = pool.find(space, keys)
        pool.store(space, keys[len(run) :], run[-1] if run else None)
        assert space.host_blocks <= host
        assert space.disk_blocks <= disk
        if n % 200 == 0:
            _check(pool, space)
    assert pool.counts.written > disk
    assert len(pool.index.host_queue(space.shape)) <= 2 * host + 1024
    assert len(pool.index.ghosts) <= 1


def _check(pool: TieredPool, space: SpaceIndex) -> None:
    """Host and disk hold what the index says; the disk and the whole are prefix-closed."""
    blocks = space.blocks.values()
    assert sum(b.host is not None for b in blocks) == space.host_blocks
    assert sum(b.disk is not None for b in blocks) == space.disk_blocks
    for block in blocks:
        assert block.host is not None or block.disk is not None
        if block.parent is not None:
            assert space.blocks[block.parent.key] is block.parent
            if block.disk is not None:
                assert block.parent.disk is not None


def test_inserting_a_run_is_inserting_its_blocks_one_by_one() -> None:
    """The same links, counts and order of leaving, for runs below other runs."""

    def build(whole: bool) -> tuple[BlockIndex, SpaceIndex]:
        spec = SpaceSpec(model="m", dtype="x", block_tokens=16, shard_bytes=(BLOCK,))
        index = BlockIndex(lambda _: None, lambda *_: None)
        space = SpaceIndex(spec.fingerprint, spec, 1)
        index.spaces[space.id] = space
        rng = random.Random(3)
        numbers = itertools.count()
        for n in range(50):
            blocks = list(space.blocks.values())
            parent = rng.choice([None, *blocks])
            keys = chain(f"run {n}", rng.randint(1, 6))
            slots = [Slot(0, next(numbers)) for _ in keys]
            if whole:
                index.insert_run(space, keys, parent, slots)
            else:
                at: Block | None = parent
                for key, slot in zip(keys, slots, strict=True):
                    at = index.insert(space, key, at)
                    index.put_host(at, slot)
            if rng.random() < 0.3:
                victim = index.host_queue(space.shape).peek()
                assert victim is not None
                index.drop_host(victim)
        return index, space

    def leaving(index: BlockIndex, space: SpaceIndex) -> list[bytes]:
        order = []
        while (block := index.host_queue(space.shape).peek()) is not None:
            assert host_evictable(block)
            assert not disk_evictable(block)
            index.drop_host(block)
            order.append(block.key)
        assert not space.blocks
        return order

    one, other = build(whole=True), build(whole=False)
    assert one[1].host_blocks == other[1].host_blocks
    assert [b.sequence for b in one[1].blocks.values()] == [
        b.sequence for b in other[1].blocks.values()
    ]
    assert leaving(*one) == leaving(*other)


def test_a_distribution_knows_its_quantiles() -> None:
    some = Distribution()
    for n in range(1, 1001):
        some.add(n / 1000)
    assert some.quantile(0.5) == pytest.approx(0.5, rel=0.01)
    assert some.quantile(0.99) == pytest.approx(0.99, rel=0.01)
    assert some.quantile(1) == some.maximum == 1.0
    assert some.mean == pytest.approx(0.5005)
    assert Distribution().quantile(0.5) == 0.0


def test_the_cheapest_size_that_is_good_enough_is_recommended() -> None:
    def of(host: int, disk: int, seconds: float) -> SizeResult:
        result = SizeResult(Size(host, disk), host)
        result.ttft.add(seconds)
        return result

    gb = 10**9
    small, middle, large = of(10 * gb, 0, 2.0), of(10 * gb, 900 * gb, 1.04), of(99 * gb, 0, 1.0)
    prices = Prices(host=5, disk=0.1)
    chosen = recommend([small, middle, large], prices, 0.05)
    assert chosen.choice is middle
    assert chosen.best is large
    assert (chosen.price, chosen.best_price) == (140, 495)
    assert recommend([small, middle, large], prices, 0.01).choice is large
    assert recommend([small, middle, large], prices, 1.0).choice is small
    endless = of(1 << 62, 0, 0.99)
    assert recommend([small, middle, large, endless], prices, 0.02).choice is large
    assert recommend([endless], prices, 0.02).choice is endless


def test_a_trace_of_many_spaces_shares_the_tiers(tmp_path: Path) -> None:
    kinds = [KIND, TraceSpace(block_tokens=16, block_bytes=4 * BLOCK)]
    simulation = Simulation(Size(16 * BLOCK), kinds, FAST)
    for n in range(6):
        simulation.step(Request(float(n), chain(f"small {n}", 2), 32, space=0))
        simulation.step(Request(float(n), chain(f"large {n}", 1), 16, space=1))
    simulation.step(Request(9.0, chain("large 5", 1), 16, space=1))
    simulation.step(Request(9.0, chain("small 5", 2), 32, space=0))
    result = simulation.finish()
    assert result.host_blocks == 3
    assert result.pool.stored == 18
    # 6 bytes of small and 24 of large blocks went through room for 16.
    assert result.pool.evicted_host > 6
