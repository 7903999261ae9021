"""Jobs that are passed over, because there was no room for their kind a moment ago."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvstore.prefetch.host_room import HostRoom
    from kvstore.prefetch.move import Kind

__all__ = ["PassedOver"]

_POLL_SECONDS: Final = 0.05


class PassedOver:
    """Kinds that wait for room, each until something was freed; whoever serves the others does not."""

    def __init__(self, host: HostRoom, on_room: Callable[[], None]) -> None:
        """Pass over nothing. `on_room` is called when that ends for some kinds."""
        self._host = host
        self._on_room = on_room
        self._kinds: set[Kind] = set()
        self._waiting: set[asyncio.Task[None]] = set()

    def __contains__(self, kind: Hashable) -> bool:
        """Return whether a kind waits."""
        return kind in self._kinds

    def __len__(self) -> int:
        """Return how many kinds wait."""
        return len(self._kinds)

    def add(self, kinds: set[Kind]) -> None:
        """Pass over some kinds until there may be room, at most for a moment."""
        self._kinds |= kinds
        task = asyncio.create_task(self._wait(kinds), name="promoter-room")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _wait(self, kinds: set[Kind]) -> None:
        await self._host.room(_POLL_SECONDS)
        self._kinds -= kinds
        self._on_room()

    async def stop(self) -> None:
        """Wait no more."""
        waiting = list(self._waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
