"""Housekeeping: what is looked after every few seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from kvstore.tiers.pool_copy import undisturbed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.engine.flusher import Flusher
    from kvstore.engine.limits import Limits
    from kvstore.engine.pins import Pins
    from kvstore.engine.tickets import Tickets
    from kvstore.engine.worth import Worth
    from kvstore.index import BlockIndex
    from kvstore.tiers.disk import DiskTier

__all__ = ["Housekeeper"]

log = logging.getLogger(__name__)

_INTERVAL_SECONDS: Final = 2.0
_TOUCH_SAVE_SECONDS: Final = 30.0
# Blocks looked at in one go.
_CHUNK: Final = 2000


class Housekeeper:
    """Expires pins and tickets, tries a degraded disk again, saves the LRU order and speeds."""

    def __init__(
        self, index: BlockIndex, pins: Pins, tickets: Tickets, limits: Limits, worth: Worth
    ) -> None:
        """Compose; `disk` and `flusher` are set afterwards when there is a disk tier."""
        self._limits = limits
        self._worth = worth
        self._index = index
        self._pins = pins
        self._tickets = tickets
        self.disk: DiskTier | None = None
        self.flusher: Flusher | None = None
        self._saved = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name="housekeeper")

    async def stop(self) -> None:
        """End. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        duties: list[Callable[[], Awaitable[None]]] = [
            self._pins.expire,
            self._expire_tickets,
            self._try_disk_again,
            self._save_touches_in_time,
        ]
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            for duty in duties:
                try:
                    await duty()
                except Exception:
                    # The boundary of a duty: one that fails must not end the others.
                    log.exception("housekeeping failed; it goes on")

    async def _expire_tickets(self) -> None:
        self._tickets.expire()

    async def _try_disk_again(self) -> None:
        if self.disk is None or self.flusher is None or self.disk.state == "ok":
            return
        if await self.disk.probe():
            log.info("disk tier works again")
            self.flusher.retry_refused()

    async def _save_touches_in_time(self) -> None:
        if time.monotonic() - self._saved > _TOUCH_SAVE_SECONDS:
            self._saved = time.monotonic()
            await self.save_touches()
            await self.save_speeds()

    async def save_speeds(self) -> None:
        """Save what was learned about speeds, as far as that works."""
        speeds, promoter = self._worth.speeds, self._worth.promoter
        if self.disk is not None and promoter is not None and promoter.path.measured:
            path = promoter.path
            speeds.read_from(self.disk.store_id, path.bytes_per_second, path.latency_seconds)
        line = speeds.line()
        if line is not None:
            try:
                await undisturbed(asyncio.ensure_future(asyncio.to_thread(speeds.write, line)))
            except OSError as error:
                log.info("speeds are not saved: %s", error)

    async def save_touches(self) -> None:
        """Save the LRU order of what is on disk, then when that was."""
        if self.flusher is not None:
            for space in list(self._index.spaces.values()):
                blocks = list(space.blocks.values())
                for at in range(0, len(blocks), _CHUNK):
                    await self.flusher.records.save_touches(blocks[at : at + _CHUNK])
                    await asyncio.sleep(0)
        # Also without a disk: host memory may be there for the next start.
        await self._limits.save_times()
