"""How often is often: uses fade, and little is remembered."""

from __future__ import annotations

from engine_world import spec_of

from kvstore.engine.gpu_ascents import Ascent, AscentQueue
from kvstore.engine.gpu_demand import GpuDemand
from kvstore.index import Block, BlockIndex, SpaceIndex


def some_blocks(count: int) -> list[Block]:
    space = SpaceIndex(spec_of().fingerprint, spec_of(), 1)
    index = BlockIndex(lambda _: None, lambda *_: None)
    return [index.insert(space, at.to_bytes(16, "big"), None) for at in range(count)]


def test_uses_count_half_after_a_page_and_nothing_after_two() -> None:
    hot, *others = some_blocks(1000)
    demand = GpuDemand(10 * hot.space.shape.block_bytes)  # a page names 40 blocks
    for _ in range(8):
        demand.used([hot])
    assert demand.uses(hot) == 8
    demand.used(others[:40])
    assert demand.uses(hot) == 4
    demand.used([hot])
    assert demand.uses(hot) == 5
    demand.used(others[40:80])
    assert demand.uses(hot) == 1
    demand.used(others[80:121])
    assert demand.uses(hot) == 0
    for at in range(0, 990, 10):
        demand.used(others[at : at + 10])
        assert len(demand) <= 2 * 50


def test_twice_as_often_goes_first_and_rarest_is_given_up_first() -> None:
    queue = AscentQueue()
    uses = [1, 5, 2, 1, 4, 100]
    ascents = [Ascent(block) for block in some_blocks(len(uses))]
    size = ascents[0].block.space.shape.block_bytes
    for ascent, count in zip(ascents, uses, strict=True):
        queue.add(ascent, count)
    assert queue.bytes == len(uses) * size
    assert queue.least() is ascents[0]
    order = []
    while (first := queue.first()) is not None:
        assert queue.remove(first)
        assert not queue.remove(first)
        order.append(ascents.index(first))
    assert order == [5, 1, 4, 2, 0, 3]
    assert queue.bytes == 0
    assert not queue
