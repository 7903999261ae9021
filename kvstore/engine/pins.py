"""Pins: blocks whose last copy, and one on disk, must stay, durably, until unpinned or expired.

Commit protocol

1. Pinning: the blocks of the run stay from now on, so that none leaves while the store is at work;
   unpinning: they stay until 2 is done.
2. One LMDB transaction puts, or deletes, the run's records. If it fails, what was in force before
   is in force again.
3. Only now the caller hears of it.

Killed before 2 the old pins are there, after it the new ones. Recovery: pins of blocks that are
back are in force; the others, and those that expired, are deleted. A block that leaves takes its
pin with it at once, and the record at the next start.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from kvstore.errors import KVStoreError
from kvstore.index import NEVER
from kvstore.index.records import PinRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.engine.store_thread import StoreThread
    from kvstore.index import Block, BlockIndex, SpaceIndex

__all__ = ["Pins"]


# At a time, with a turn of the loop between.
_PART: Final = 8_192


class Pins:
    """All pins, by space id and key, with their expiry in Unix seconds.

    Changes take turns, so that what is stored and what is in force stay the same.
    """

    def __init__(self, index: BlockIndex, store: StoreThread) -> None:
        """Start without pins; `restore` brings the stored ones back."""
        self._index = index
        self._store = store
        self._until: dict[bytes, dict[bytes, float]] = {}
        self._turn = asyncio.Lock()

    def counts(self) -> dict[bytes, int]:
        """Return the number of pinned blocks per space id."""
        return {space_id: len(pinned) for space_id, pinned in self._until.items() if pinned}

    async def pin(self, space: SpaceIndex, run: Sequence[Block], ttl_seconds: float) -> None:
        """Pin a run until unpinned, or for a time; durable on return.

        Raises:
            StoreDamaged: what is in force is as before.
        """
        until = time.time() + ttl_seconds if ttl_seconds else NEVER
        expires = 0.0 if until == NEVER else until
        keys = [block.key for block in run]
        # At once: nothing of the run may leave while the store is at work.
        for block in run:
            block.pinned_until = max(until, block.pinned_until)
        async with self._turn:
            pinned = self._until.setdefault(space.id, {})
            before = {key: pinned[key] for key in keys if key in pinned}
            pinned.update(dict.fromkeys(keys, until))
            records = [PinRecord(space.id, key, expires) for key in keys]
            try:
                await self._store.run(self._store.store.put_pins, records)
            except KVStoreError:
                for key in keys:
                    pinned.pop(key, None)
                pinned.update(before)
                raise
            finally:
                for key in keys:
                    self._apply(space.id, key)

    async def unpin(self, space: SpaceIndex, keys: Iterable[bytes] | None) -> int:
        """Unpin keys, or a whole space; return how many were pinned.

        Raises:
            StoreDamaged: those that are not unpinned yet are still pinned.
        """
        async with self._turn:
            pinned = self._until.get(space.id, {})
            wanted = list(pinned if keys is None else dict.fromkeys(keys))
            dropped = 0
            for at in range(0, len(wanted), _PART):
                part = [key for key in wanted[at : at + _PART] if key in pinned]
                await self._drop(space.id, part)
                dropped += len(part)
        return dropped

    async def expire(self) -> None:
        """Drop the pins whose time is over.

        Raises:
            StoreDamaged: they stay for now.
        """
        now = time.time()
        async with self._turn:
            for space_id, pinned in list(self._until.items()):
                listed = list(pinned.items())
                for at in range(0, len(listed), _PART):
                    part = [key for key, until in listed[at : at + _PART] if until < now]
                    await self._drop(space_id, part)
                    await asyncio.sleep(0)

    def forget(self, block: Block) -> None:
        """The block is gone; a stored pin is dropped at the next start, if it is not back."""
        self._until.get(block.space.id, {}).pop(block.key, None)

    def forget_space(self, space: SpaceIndex) -> list[bytes]:
        """The space's blocks are gone; return the pins that `delete_stored` is to delete."""
        pinned = self._until.get(space.id, {})
        keys = list(pinned)
        pinned.clear()
        return keys

    async def delete_stored(self, space: SpaceIndex, keys: Sequence[bytes]) -> None:
        """Delete what is stored of forgotten pins, unless they were pinned again since.

        Raises:
            StoreDamaged: they are stored still.
        """
        async with self._turn:
            pinned = self._until.get(space.id, {})
            for at in range(0, len(keys), _PART):
                part = [key for key in keys[at : at + _PART] if key not in pinned]
                await self._drop(space.id, part)

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
                self._until.setdefault(pin.space_id, {})[pin.key] = until
        if lost:
            self._store.store.delete_pins(lost)

    async def _drop(self, space_id: bytes, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        names = [(space_id, key) for key in keys]
        await self._store.run(self._store.store.delete_pins, names)
        pinned = self._until.get(space_id, {})
        for key in keys:
            pinned.pop(key, None)
            self._apply(space_id, key)

    def _apply(self, space_id: bytes, key: bytes) -> None:
        """Bring a block in line with its pin."""
        space = self._index.spaces.get(space_id)
        block = None if space is None else space.blocks.get(key)
        if block is not None:
            block.pinned_until = self._until.get(space_id, {}).get(key, 0.0)
            if not block.pinned_until:
                self._index.offer(block)
