"""A batch on its way to the GPU pool that meets a fault of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from engine_invariants import check
from engine_world import World, chain

from kvstore.index import Block
from kvstore.tiers.base import TierName


def test_a_batch_that_cannot_begin_is_over_for_those_who_wait(
    make_world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it hold host memory any longer, or keep its blocks from coming later."""

    async def story(world: World) -> None:
        assert world.engine.gpu_side is not None
        room = world.engine.gpu_side.room
        admit = room.admit

        def broken(blocks: Iterable[Block]) -> set[Block]:
            room.admit = admit  # type: ignore[method-assign]
            raise RuntimeError("a fault of our own")

        keys = chain("a", 4)
        assert await world.player().put(keys) == 4
        room.admit = broken  # type: ignore[method-assign]
        for expected in (0, 4):
            blocks, done, _ = await world.engine.tickets.prefetch(
                world.space, keys, 77 + expected, 0, 0, 60, TierName.GPU
            )
            assert done
            assert blocks == expected
        await world.settle()
        check(world.engine, quiet=True)

    make_world(gpu_blocks=8).run(story)
    assert "a fault of our own" in caplog.text
