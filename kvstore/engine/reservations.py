"""Reservations: who gets empty slots, and how long one waits for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.engine.attachments import State
from kvstore.errors import AttachmentLost, InvalidRequest, StaleEpoch
from kvstore.index import Flush
from kvstore.outcomes import Shortage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.attachments import Attachment
    from kvstore.engine.counters import Counters
    from kvstore.engine.grants import Grant, Grants
    from kvstore.engine.room import HostRoom
    from kvstore.index import Block, BlockIndex, SpaceIndex
    from kvstore.tiers.base import Slot

__all__ = ["Reservations"]

# Who waits looks again after this long, should nobody have said that there is room.
_LOOK_AGAIN_SECONDS = 0.5


class Reservations:
    """Turns room into grants.

    Attributes:
        closed: nothing is granted any more.
        cap_bytes: most that one client may be granted.
    """

    def __init__(
        self,
        index: BlockIndex,
        grants: Grants,
        room: HostRoom,
        counters: Counters,
        *,
        cap_bytes: int,
    ) -> None:
        """Compose."""
        self._counters = counters
        self._index = index
        self._grants = grants
        self._room = room
        self._next_put = 0
        self.cap_bytes = cap_bytes
        self.closed = False

    async def reserve(
        self,
        owner: Attachment,
        space: SpaceIndex,
        grant_id: int,
        count: int,
        writers: Sequence[Attachment],
        deadline_seconds: float,
        protect: Sequence[bytes],
    ) -> tuple[Sequence[Slot], Shortage]:
        """Grant up to `count` slots; wait for the first one until the deadline.

        A repeated id answers what is left of that grant.

        Raises:
            InvalidRequest: not one writer per shard.
            StaleEpoch: the space's epoch was bumped while this waited.
            AttachmentLost: the owner or a writer is gone.
        """
        epoch = space.epoch
        shards = space.shape.shards
        writing = list(writers) or [owner] * shards
        if len(writing) != shards:
            raise InvalidRequest("writers", f"names {len(writing)}, the space has {shards} shards")
        existing = self._grants.find(owner.id, grant_id)
        if existing is not None:
            return tuple(existing.slots), Shortage.NONE
        if self.closed:
            return (), Shortage.DRAINING
        wanted = min(count, self._affordable(owner, space))
        if wanted <= 0:
            return (), Shortage.CLIENT_CAP
        slots, shortage = await self._take(space, wanted, deadline_seconds, protect)
        try:
            # Anything may have happened meanwhile.
            return self._grant(owner, space, epoch, grant_id, writing, slots, shortage, count)
        finally:
            granted = self._grants.find(owner.id, grant_id)
            for slot in slots:
                if granted is None or slot not in granted.slots:
                    self._room.free(slot)

    def _affordable(self, owner: Attachment, space: SpaceIndex) -> int:
        return (self.cap_bytes - owner.granted_bytes) // space.shape.block_bytes

    def _grant(
        self,
        owner: Attachment,
        space: SpaceIndex,
        epoch: int,
        grant_id: int,
        writers: Sequence[Attachment],
        slots: Sequence[Slot],
        shortage: Shortage,
        count: int,
    ) -> tuple[Sequence[Slot], Shortage]:
        """Record what was taken, as far as it may still be granted. The caller frees the rest."""
        for attachment in (owner, *writers):
            if attachment.state in (State.GONE, State.PRESUMED_DEAD):
                raise AttachmentLost(f"attachment {attachment.id} ended while slots were sought")
        if space.epoch != epoch:
            raise StaleEpoch(f"space {space.id.hex()[:12]} was bumped to epoch {space.epoch}")
        existing = self._grants.find(owner.id, grant_id)
        if existing is not None:
            return tuple(existing.slots), Shortage.NONE
        if self.closed:
            return (), Shortage.DRAINING
        slots = slots[: max(0, self._affordable(owner, space))]
        if slots:
            grant = self._grants.add(grant_id, owner.id, space, epoch, writers, slots)
            self._grants.own(grant, owner)
        if shortage is Shortage.NONE and len(slots) < count:
            shortage = Shortage.CLIENT_CAP
        return slots, shortage

    async def take_for_put(
        self, space: SpaceIndex, epoch: int, deadline_seconds: float, parent: bytes | None
    ) -> Grant | None:
        """Grant the daemon itself one slot for a streamed block; None: no room in time.

        Args:
            space: the block's space.
            epoch: under which the client opened it.
            deadline_seconds: how long to wait.
            parent: the block before it: its chain stays.
        """
        if self.closed:
            return None
        protect = [] if parent is None else [parent]
        slots, _ = await self._take(space, 1, deadline_seconds, protect)
        if not slots:
            return None
        self._next_put += 1
        return self._grants.add(self._next_put, 0, space, epoch, (), slots)

    async def _take(
        self, space: SpaceIndex, count: int, deadline_seconds: float, protect: Sequence[bytes]
    ) -> tuple[list[Slot], Shortage]:
        """Take slots, waiting for the first; the protected chains stay."""
        room = self._room
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_seconds
        while True:
            # Holding the last block of a chain keeps what it hangs on. A block that is on disk
            # too may leave host: it stays a parent.
            held = [
                b
                for b in map(space.blocks.get, protect)
                if b is not None and b.host is not None and b.disk is None
            ]
            for block in held:
                self._index.hold_host(block)
            try:
                # Credits taken ahead of need must not push out all that there is.
                most = max(1, space.host_quota // 2) - space.granted
                allowed = room.admit(space, min(count, most)) if most > 0 else 0
                slots = room.take(space.shape, allowed) if allowed else []
            finally:
                for block in held:
                    self._index.release_host(block)
            if len(slots) == count:
                return slots, Shortage.NONE
            if slots:
                return slots, Shortage.BUSY
            self._send_to_disk(held)
            left = deadline - loop.time()
            if not allowed and not (space.host_quota and space.unsettled):
                # Only the protected chains themselves could make room, or nothing ever fits.
                self._counters.counts["quota_refused_blocks"] += count
                return slots, Shortage.QUOTA
            if allowed and not room.may_come(space.shape):
                return slots, Shortage.NO_ROOM
            if left <= 0:
                return slots, Shortage.BUSY
            await room.room(min(left, _LOOK_AGAIN_SECONDS))

    def _send_to_disk(self, protected: Sequence[Block]) -> None:
        """Under `evict`: chains that stay may still leave host once they are on disk."""
        flusher = self._room.flusher
        if flusher is not None and self._room.flush_on_evict:
            for block in protected:
                if block.flush is Flush.NONE and block.disk is None:
                    flusher.enqueue(block)
