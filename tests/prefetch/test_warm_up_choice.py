"""Which blocks a warm-up brings: looking for them among very many holds nobody up."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import cast

from promoter_world import PromoterWorld
from virtual_time import run_in_virtual_time

from kvstore.engine.counters import Counters
from kvstore.engine.warm_up import WarmUp
from kvstore.tiers.base import Slot, TierUsage
from kvstore.tiers.host import HostTier


async def _choice() -> None:
    world = PromoterWorld(1e9, 4096)
    chains = [world.chain(40) for _ in range(500)]
    random.Random(3).shuffle(chains)
    for chain in chains:
        world.index.touch(chain)
    *_, hottest = chains
    for at, block in enumerate(hottest):
        world.index.put_host(block, Slot(0, at))
    usage = TierUsage(1 << 30, 1 << 30, 40 * 4096)
    host = cast("HostTier", SimpleNamespace(usage=lambda: usage))
    warm_up = WarmUp(world.index, host, world.promoter, Counters(), 5_010 * 4096)
    choosing = asyncio.create_task(warm_up._choose())
    turns = 0
    while not choosing.done():
        await asyncio.sleep(0)
        turns += 1
    in_order = [block for chain in reversed(chains[:-1]) for block in chain]
    assert choosing.result() == in_order[:5_010]
    assert turns >= 20


def test_the_hottest_of_many_are_chosen_in_steps() -> None:
    """20,000 blocks on disk; a budget that ends in the middle of a chain; one chain is there already."""
    run_in_virtual_time(_choice())
