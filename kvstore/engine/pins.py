"""Pins: blocks whose last copy must stay, durably, until unpinned or expired."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from kvstore.errors import KVStoreError
from kvstore.index import NEVER
from kvstore.index.records import PinRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.store_thread import StoreThread
    from kvstore.index import Block, BlockIndex, SpaceIndex

__all__ = ["Pins"]


class Pins:
    """All pins, by (space id, key), with their expiry in Unix seconds.

    Changes take turns, so that what is stored and what is in force stay the same.
    """

    def __init__(self, index: BlockIndex, store: StoreThread) -> None:
        """Start without pins; `restore` brings the stored ones back."""
        self._index = index
        self._store = store
        self._until: dict[tuple[bytes, bytes], float] = {}
        self._turn = asyncio.Lock()

    def counts(self) -> dict[bytes, int]:
        """Return the number of pinned blocks per space id."""
        counts: dict[bytes, int] = {}
        for space_id, _ in self._until:
            counts[space_id] = counts.get(space_id, 0) + 1
        return counts

    async def pin(self, space: SpaceIndex, run: Sequence[Block], ttl_seconds: float) -> None:
        """Pin a run until unpinned, or for a time; durable on return.

        Raises:
            StoreDamaged: what is in force is as before.
        """
        until = time.time() + ttl_seconds if ttl_seconds else NEVER
        expires = 0.0 if until == NEVER else until
        names = [(space.id, block.key) for block in run]
        # At once: nothing of the run may leave while the store is at work.
        for block in run:
            block.pinned_until = max(until, block.pinned_until)
        async with self._turn:
            before = {name: self._until[name] for name in names if name in self._until}
            self._until.update(dict.fromkeys(names, until))
            try:
                await self._store.run(
                    self._store.store.put_pins, [PinRecord(*name, expires) for name in names]
                )
            except KVStoreError:
                for name in names:
                    self._until.pop(name, None)
                self._until.update(before)
                raise
            finally:
                for name in names:
                    self._apply(name)

    async def unpin(self, space: SpaceIndex, keys: Sequence[bytes] | None) -> int:
        """Unpin keys, or a whole space; return how many were pinned.

        Raises:
            StoreDamaged: they are still pinned.
        """
        wanted = None if keys is None else set(keys)
        async with self._turn:
            names = [
                n for n in self._until if n[0] == space.id and (wanted is None or n[1] in wanted)
            ]
            await self._drop(names)
        return len(names)

    async def expire(self) -> None:
        """Drop the pins whose time is over.

        Raises:
            StoreDamaged: they stay for now.
        """
        now = time.time()
        async with self._turn:
            await self._drop([name for name, until in self._until.items() if until < now])

    def forget(self, block: Block) -> None:
        """The block is gone; a stored pin is dropped at the next start, if it is not back."""
        self._until.pop((block.space.id, block.key), None)

    def forget_space(self, space: SpaceIndex) -> list[tuple[bytes, bytes]]:
        """The space's blocks are gone; return the pins that `delete_stored` is to delete."""
        names = [n for n in self._until if n[0] == space.id]
        for name in names:
            del self._until[name]
        return names

    async def delete_stored(self, names: Sequence[tuple[bytes, bytes]]) -> None:
        """Delete what is stored of forgotten pins, unless they were pinned again since.

        Raises:
            StoreDamaged: they are stored still.
        """
        async with self._turn:
            await self._drop([name for name in names if name not in self._until])

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
        await self._store.run(self._store.store.delete_pins, list(names))
        for name in names:
            self._until.pop(name, None)
            self._apply(name)

    def _apply(self, name: tuple[bytes, bytes]) -> None:
        """Bring a block in line with its pin."""
        space = self._index.spaces.get(name[0])
        block = None if space is None else space.blocks.get(name[1])
        if block is not None:
            block.pinned_until = self._until.get(name, 0.0)
            if not block.pinned_until:
                self._index.offer(block)
