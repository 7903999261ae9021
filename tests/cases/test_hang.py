"""Stories of what was waited for and never came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from engine_invariants import check
from engine_world import World, chain

from kvstore.miss import MissReason
from kvstore.tiers.base import TierName
from kvstore.tiers.faulty import Fault, FaultKind, Faulty

Make = Callable[..., World]

PREFETCHES = 10_000


@pytest.mark.slow
def test_failed_prefetch_never_unpinned_hang_after_hours(make_world: Make) -> None:
    """10,000 of them fail, in every way that there is: no pin, no ticket, no slot stays behind."""

    async def story(world: World) -> None:
        player = world.player()
        keys = chain("prefetch", 8)
        assert await player.put(keys) == 8
        await world.evict_host()
        kinds = (FaultKind.IO_ERROR, FaultKind.UNAVAILABLE, FaultKind.SHORT_READ)
        prefetch = world.engine.tickets.prefetch
        for turn in range(PREFETCHES // 100):
            kind = kinds[turn % len(kinds)]
            # A block of the middle, or all of them; there is no other way to end.
            world.disk.plan[:] = [Fault(kind, "read", block=None if turn % 2 else 0)]
            answers = await asyncio.gather(
                *(
                    prefetch(world.space, keys[: 1 + n % 8], turn * 100 + n, 30.0, 0, 30.0)
                    for n in range(100)
                )
            )
            for blocks, done, miss in answers:
                assert done
                assert blocks == 0
                assert miss.reason is MissReason.IO_ERROR
            await world.engine.removal.evict(world.space, None, TierName.HOST)
        world.disk.plan.clear()
        await world.settle()
        assert len(world.engine.tickets) == 0
        index = world.engine.index
        assert (index.host_held, index.disk_held) == (0, 0)
        assert all(not b.host_refs and not b.disk_refs for b in world.space.blocks.values())
        assert world.host.usage().used_bytes == 0
        check(world.engine, quiet=True)
        assert await player.load(keys) == 8

    make_world(wrap=Faulty).run(story, seconds=200)
