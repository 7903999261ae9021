"""Clients that give back what the engine asks them to unmap."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine_world import Player, World

from kvstore.engine.events import SlabRetireEvent


@asynccontextmanager
async def unmapping(world: World, *players: Player) -> AsyncIterator[None]:
    """Let these clients unmap what they are told to."""

    async def unmap() -> None:
        while True:
            for player in players:
                for event in player.heard_of(SlabRetireEvent):
                    world.engine.room.unmapped(player.attachment.id, event.groups)
            await asyncio.sleep(0.001)

    task = asyncio.create_task(unmap())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
