"""Slots that an earlier daemon granted to somebody who may still be writing.

The grant ended with the daemon that made it, and no commit of it is taken. But a stopped process
may have a copy in flight: its slots are nobody's until each writer's lock is gone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvstore.engine.grants import OpenSlots
from kvstore.engine.host_index import BusySlot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.tiers.base import Slot
    from kvstore.tiers.control import ControlFile

__all__ = ["Quarantine"]

log = logging.getLogger(__name__)

# As for attachments: F_OFD_GETLK costs 1.5 µs, and slots wait for the answer.
_POLL_SECONDS: Final = 0.01


class Quarantine:
    """Keeps slots out of circulation while their writers live."""

    def __init__(self, control: ControlFile, free: Callable[[Slot], None]) -> None:
        """Compose; `free` gets the slots."""
        self._control = control
        self._free = free
        self._busy: dict[Slot, tuple[int, set[int]]] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, slots: Iterable[tuple[BusySlot, int]]) -> None:
        """Take over slots, each with its block's bytes; before `start`."""
        for (slot, writers), block_bytes in slots:
            self._busy[slot] = (block_bytes, set(writers))
        self._look()
        if self._busy:
            log.warning("%d slots wait for writers of an earlier daemon", len(self._busy))

    def start(self) -> None:
        """Begin to watch."""
        if self._busy:
            self._task = asyncio.create_task(self._watch(), name="quarantine")

    async def stop(self) -> None:
        """Stop watching. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._busy)

    @property
    def stuck(self) -> OpenSlots:
        """Slots and bytes that wait."""
        return OpenSlots(len(self._busy), sum(size for size, _ in self._busy.values()))

    def busy(self) -> list[BusySlot]:
        """Return what waits, for a daemon to come."""
        return [BusySlot(slot, tuple(sorted(who))) for slot, (_, who) in self._busy.items()]

    async def _watch(self) -> None:
        while self._busy:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                self._look()
            except Exception:
                # The boundary of the watch: what cannot be told now may be later.
                log.exception("looking for writers of an earlier daemon failed; it goes on")

    def _look(self) -> None:
        """Free the slots whose writers are all gone."""
        writers = set().union(*(who for _, who in self._busy.values()))
        dead = {writer for writer in writers if not self._control.is_alive(writer)}
        if not dead:
            return
        for slot, (_, who) in list(self._busy.items()):
            who -= dead
            if not who:
                del self._busy[slot]
                self._free(slot)
