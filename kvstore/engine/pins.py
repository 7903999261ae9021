"""Pins: blocks whose last copy must stay, durably, until unpinned or expired."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.index import NEVER
from kvstore.index.records import PinRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.store_thread import StoreThread
    from kvstore.index import Block, BlockIndex, SpaceIndex

__all__ = ["Pins"]


class Pins:
    """All pins, by (space id, key), with their expiry in Unix seconds."""

    def __init__(self, index: BlockIndex, store: StoreThread) -> None:
        """Start without pins; `restore` brings the stored ones back."""
        self._index = index
        self._store = store
        self._until: dict[tuple[bytes, bytes], float] = {}

    def counts(self) -> dict[bytes, int]:
        """Return the number of pinned blocks per space id."""
        counts: dict[bytes, int] = {}
        for space_id, _ in self._until:
            counts[space_id] = counts.get(space_id, 0) + 1
        return counts

    async def pin(self, space: SpaceIndex, run: Sequence[Block], ttl_seconds: float) -> None:
        """Pin a run until unpinned, or for a time; durable on return."""
        until = time.time() + ttl_seconds if ttl_seconds else NEVER
        for block in run:
            block.pinned_until = until
            self._until[(space.id, block.key)] = until
        expires = 0.0 if until == NEVER else until
        records = [PinRecord(space.id, block.key, expires) for block in run]
        await self._store.run(self._store.store.put_pins, records)

    async def unpin(self, space: SpaceIndex, keys: Sequence[bytes] | None) -> int:
        """Unpin keys, or a whole space; return how many were pinned."""
        wanted = None if keys is None else set(keys)
        names = [n for n in self._until if n[0] == space.id and (wanted is None or n[1] in wanted)]
        await self._drop(names)
        return len(names)

    async def expire(self) -> None:
        """Drop the pins whose time is over."""
        now = time.time()
        await self._drop([name for name, until in self._until.items() if until < now])

    def forget_space(self, space: SpaceIndex) -> None:
        """The space's blocks are gone; the stored pins are dropped at the next start."""
        for name in [n for n in self._until if n[0] == space.id]:
            del self._until[name]

    def restore(self) -> None:
        """Pin again what is still there; forget the other pins. Before serving: it blocks."""
        lost = []
        for pin in self._store.store.pins():
            space = self._index.spaces.get(pin.space_id)
            block = None if space is None else space.blocks.get(pin.key)
            until = pin.expires_unix or NEVER
            if block is None or until < time.time():
                lost.append((pin.space_id, pin.key))
            else:
                block.pinned_until = until
                self._until[(pin.space_id, pin.key)] = until
        if lost:
            self._store.store.delete_pins(lost)

    async def _drop(self, names: Sequence[tuple[bytes, bytes]]) -> None:
        if not names:
            return
        for space_id, key in names:
            self._until.pop((space_id, key), None)
            space = self._index.spaces.get(space_id)
            block = None if space is None else space.blocks.get(key)
            if block is not None:
                block.pinned_until = 0.0
                self._index.offer(block)
        await self._store.run(self._store.store.delete_pins, list(names))
