"""Pins: blocks whose last copy, and one on disk, must stay, durably, until unpinned or expired.

Every owner (a chat session, an agent; or nobody in particular) has pins of its own, and a block stays
as long as anybody's pin does. A pin with an owner always expires, so that an owner that is gone keeps
nothing for ever; pinning again moves the expiry. Time is the daemon's own (`use_times`): no step of the
wall clock ends a pin, or keeps it.

Commit protocol

1. Pinning: the blocks of the run stay from now on, so that none leaves while the store is at work;
   unpinning: they stay until 2 is done.
2. One LMDB transaction puts, or deletes, the run's records; before the first pin that ends, another
   one saves what time it is. If one fails, what was in force before is in force again.
3. Only now the caller hears of it.

Killed before 2 the old pins are there, after it the new ones. Recovery: pins of blocks that are
back are in force; the others, and those that expired, are deleted. A block that leaves takes its
pins with it at once, and their records at the next look at all pins, or before anybody unpins: what
is stored under its key later is nobody's, over a restart too.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.errors import KVStoreError
from kvstore.index import NEVER
from kvstore.index.records import PinRecord, pin_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.engine.store_thread import StoreThread
    from kvstore.engine.use_times import UseTimes
    from kvstore.index import Block, BlockIndex, SpaceIndex

__all__ = ["PinGroup", "Pins"]

log = logging.getLogger(__name__)

# At a time, with a turn of the loop between.
_PART: Final = 4_096

# A pin within its space: key and owner.
_Name = tuple[bytes, str]


@dataclass(slots=True)
class PinGroup:
    """The pins of one owner in one space.

    Attributes:
        blocks: how many.
        first_end: when the first one expires; `NEVER`: none does.
        last_end: when the last one does; `NEVER`: at least one does not.
    """

    space: SpaceIndex
    owner: str
    blocks: int = 0
    first_end: float = NEVER
    last_end: float = 0.0


class Pins:
    """All pins, by space id, key and owner, with their expiry in seconds of the daemon's own time.

    Changes take turns, so that what is stored and what is in force stay the same.
    """

    def __init__(self, index: BlockIndex, store: StoreThread, times: UseTimes) -> None:
        """Start without pins; `restore` brings the stored ones back."""
        self._index = index
        self._store = store
        self._times = times
        self._until: dict[bytes, dict[bytes, dict[str, float]]] = {}
        # Per space, no later than the first expiry; exact after each look at all pins.
        self._first_end: dict[bytes, float] = {}
        # Of blocks that are gone: still stored. Space id and name.
        self._forgotten: list[tuple[bytes, _Name]] = []
        self._turn = asyncio.Lock()

    def counts(self) -> dict[bytes, int]:
        """Return the number of pinned blocks per space id. Any thread."""
        return {space_id: len(pinned) for space_id, pinned in list(self._until.items()) if pinned}

    def first_end(self, space_id: bytes) -> float:
        """Return when a space's first pin expires; `NEVER`: none does."""
        return self._first_end.get(space_id, NEVER)

    def unix(self, end: float) -> float:
        """Return the Unix time of an expiry, by the wall clock as it is set now."""
        return end if end == NEVER else self._times.unix(end)

    def owners(self, space_id: bytes, key: bytes) -> list[str]:
        """Return whose pins keep a block."""
        return list(self._until.get(space_id, {}).get(key, ()))

    async def pin(
        self, space: SpaceIndex, run: Sequence[Block], ttl_seconds: float, owner: str = ""
    ) -> int:
        """Pin a run until unpinned, or for a time; durable on return.

        Returns:
            how many blocks: those that are still there when its turn comes.

        Raises:
            StoreDamaged: what is in force is as before.
        """
        until = self._times.now() + ttl_seconds if ttl_seconds else NEVER
        expires = 0.0 if until == NEVER else until
        # At once: nothing of the run may leave while others have their turn, or the store is at work.
        for block in run:
            block.pinned_until = max(until, block.pinned_until)
        try:
            async with self._turn:
                if expires:
                    await self._save_time()
                keys = [block.key for block in run if not block.dead]
                pinned = self._until.setdefault(space.id, {})
                before = {key: pinned[key].get(owner) for key in keys if key in pinned}
                for key in keys:
                    pinned.setdefault(key, {})[owner] = until
                self._first_end[space.id] = min(until, self.first_end(space.id))
                records = [PinRecord(space.id, key, expires, owner) for key in keys]
                try:
                    await self._store.run(self._store.store.put_pins, records)
                except KVStoreError:
                    for key in keys:
                        old = before.get(key)
                        if old is None:
                            self._remove(space.id, (key, owner))
                        elif key in pinned:
                            pinned[key][owner] = old
                    raise
                return len(keys)
        finally:
            # Also when the caller goes before its turn: nothing of it is in force then.
            for block in run:
                self._apply(space.id, block.key)

    async def unpin(
        self, space: SpaceIndex, keys: Iterable[bytes] | None, owner: str | None = None
    ) -> int:
        """Unpin keys, or a whole space; return from how many blocks a pin was taken.

        Args:
            space: whose blocks.
            keys: which; None: all.
            owner: whose pins; None: everybody's.

        Raises:
            StoreDamaged: those that are not unpinned yet are still pinned.
        """
        async with self._turn:
            await self._drop_forgotten()
            pinned = self._until.get(space.id, {})
            wanted = list(pinned if keys is None else dict.fromkeys(keys))
            dropped = 0
            for at in range(0, len(wanted), _PART):
                names = [
                    (key, whose)
                    for key in wanted[at : at + _PART]
                    for whose in pinned.get(key, ())
                    if owner is None or whose == owner
                ]
                await self._drop(space.id, names)
                dropped += len({key for key, _ in names})
                await asyncio.sleep(0)
        return dropped

    async def unpin_owner(self, owner: str) -> int:
        """Take away all pins of an owner, in every space; return from how many blocks.

        Raises:
            StoreDamaged: those that are not unpinned yet are still pinned.
        """
        spaces = [self._index.spaces[i] for i in self.counts() if i in self._index.spaces]
        return sum([await self.unpin(space, None, owner) for space in spaces])

    async def groups(self, space: SpaceIndex | None, owner: str | None) -> list[PinGroup]:
        """Return pins per space and owner.

        Args:
            space: only its pins; None: all spaces'.
            owner: only this one's; None: everybody's.
        """
        found: dict[tuple[bytes, str], PinGroup] = {}
        for space_id in [space.id] if space is not None else list(self._until):
            listed = list(self._until.get(space_id, {}).items())
            for at in range(0, len(listed), _PART):
                for _, owners in listed[at : at + _PART]:
                    for whose, until in owners.items():
                        if owner is not None and whose != owner:
                            continue
                        group = found.get((space_id, whose))
                        if group is None:
                            group = PinGroup(self._index.spaces[space_id], whose)
                            found[space_id, whose] = group
                        group.blocks += 1
                        group.first_end = min(group.first_end, until)
                        group.last_end = max(group.last_end, until)
                await asyncio.sleep(0)
        return list(found.values())

    async def expire(self) -> None:
        """Drop the pins whose time is over.

        Raises:
            StoreDamaged: they stay for now.
        """
        now = self._times.now()
        async with self._turn:
            await self._drop_forgotten()
            for space_id, pinned in list(self._until.items()):
                if self.first_end(space_id) == NEVER:
                    continue
                listed, first = list(pinned.items()), math.inf
                for at in range(0, len(listed), _PART):
                    over: list[_Name] = []
                    for key, owners in listed[at : at + _PART]:
                        for owner, until in owners.items():
                            if until < now:
                                over.append((key, owner))
                            else:
                                first = min(first, until)
                    await self._drop(space_id, over)
                    await asyncio.sleep(0)
                self._first_end[space_id] = first

    def forget(self, block: Block) -> None:
        """The block is gone, and its pins; what is stored of them goes soon."""
        owners = self._until.get(block.space.id, {}).pop(block.key, {})
        self._forgotten += [(block.space.id, (block.key, owner)) for owner in owners]

    def forget_space(self, space: SpaceIndex) -> list[_Name]:
        """The space's blocks are gone; return the pins that `delete_stored` is to delete."""
        pinned = self._until.get(space.id, {})
        names = [(key, owner) for key, owners in pinned.items() for owner in owners]
        pinned.clear()
        self._first_end.pop(space.id, None)
        return names

    async def delete_stored(self, space: SpaceIndex, names: Sequence[_Name]) -> None:
        """Delete what is stored of forgotten pins, unless they were pinned again since.

        Raises:
            StoreDamaged: they are stored still.
        """
        async with self._turn:
            pinned = self._until.get(space.id, {})
            for at in range(0, len(names), _PART):
                part = [(k, o) for k, o in names[at : at + _PART] if o not in pinned.get(k, ())]
                await self._drop(space.id, part)

    def restore(self) -> None:
        """Pin again what is still there; forget the other pins. Before serving: it blocks."""
        lost, gone = [], 0
        now = self._times.now()
        for pin in self._store.store.pins():
            space = self._index.spaces.get(pin.space_id)
            block = None if space is None else space.blocks.get(pin.key)
            until = pin.expires_unix or NEVER
            if block is None or until < now:
                lost.append((pin.space_id, pin_name(pin.key, pin.owner)))
                gone += until >= now
            else:
                block.pinned_until = max(until, block.pinned_until)
                pinned = self._until.setdefault(pin.space_id, {})
                pinned.setdefault(pin.key, {})[pin.owner] = until
                self._first_end[pin.space_id] = min(until, self.first_end(pin.space_id))
                self._times.needed = self._times.needed or until != NEVER
        if lost:
            self._store.store.delete_pins(lost)
        if gone:
            log.warning("%d pins are gone: their blocks are not there any more", gone)

    async def _save_time(self) -> None:
        """See to it that the next start, and this daemon from now on, keep the time."""
        self._times.needed = True
        record = None if self._times.stored else self._times.record()
        if record is not None:
            try:
                await self._store.run(self._store.store.put_uses, record)
            except KVStoreError:
                self._times.unsaved()
                raise

    async def _drop_forgotten(self) -> None:
        """Delete what is stored of forgotten pins, unless they were pinned again since."""
        while self._forgotten:
            part = self._forgotten[:_PART]
            by_space: dict[bytes, list[_Name]] = {}
            for space_id, (key, owner) in part:
                if owner not in self._until.get(space_id, {}).get(key, ()):
                    by_space.setdefault(space_id, []).append((key, owner))
            for space_id, names in by_space.items():
                await self._drop(space_id, names)
            # Only now: if the store fails, they are tried again.
            del self._forgotten[: len(part)]

    async def _drop(self, space_id: bytes, names: Sequence[_Name]) -> None:
        if not names:
            return
        stored = [(space_id, pin_name(*name)) for name in names]
        await self._store.run(self._store.store.delete_pins, stored)
        for name in names:
            self._remove(space_id, name)
            self._apply(space_id, name[0])

    def _remove(self, space_id: bytes, name: _Name) -> None:
        key, owner = name
        pinned = self._until.get(space_id, {})
        owners = pinned.get(key)
        if owners is not None:
            owners.pop(owner, None)
            if not owners:
                del pinned[key]

    def _apply(self, space_id: bytes, key: bytes) -> None:
        """Bring a block in line with its pins."""
        space = self._index.spaces.get(space_id)
        block = None if space is None else space.blocks.get(key)
        if block is not None:
            owners = self._until.get(space_id, {}).get(key, {})
            block.pinned_until = max(owners.values(), default=0.0)
            if not block.pinned_until:
                self._index.offer(block)
