"""Removal: blocks that go because somebody says so, because they are damaged, or outdated.

Bumping an epoch

1. The new epoch is appended to the epochs file and synced, then committed to LMDB
   (`kvstore.index.epoch_log`, `kvstore.index.lmdb_store`).
2. In one go of the loop: the space is at the new epoch, its grants are void, its leases revoked, its
   blocks forgotten. Only now the caller hears of it.
3. Records and pins of the old blocks are deleted, and then their slots are free.

Killed before 1 is done the epoch is the old one or the new one; after that it is the new one. Old
records that 3 did not get to name another epoch: recovery drops them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvstore.errors import KVStoreError
from kvstore.index import Pressure
from kvstore.syncpoint import reach
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.attachments import Attachments
    from kvstore.engine.counters import Counters
    from kvstore.engine.flusher import Flusher
    from kvstore.engine.grants import Grants
    from kvstore.engine.leases import Leases
    from kvstore.engine.pins import Pins
    from kvstore.engine.store_thread import StoreThread
    from kvstore.index import Block, BlockIndex, SpaceIndex

__all__ = ["Removal"]

log = logging.getLogger(__name__)

# Blocks removed in one go: about 10 ms of the loop.
_CHUNK: Final = 1000
# Blocks looked at in one go.
_LOOKED_AT: Final = 10_000


class Removal:
    """Takes blocks out of the index other than for room."""

    def __init__(
        self,
        index: BlockIndex,
        store: StoreThread,
        attachments: Attachments,
        grants: Grants,
        leases: Leases,
        pins: Pins,
        counters: Counters,
    ) -> None:
        """Compose; `flusher` is set afterwards when there is a disk tier."""
        self._index = index
        self._store = store
        self._attachments = attachments
        self._grants = grants
        self._leases = leases
        self._pins = pins
        self._counters = counters
        self.flusher: Flusher | None = None
        self._bumps: set[asyncio.Task[int]] = set()

    async def stop(self) -> None:
        """Wait for the bumps under way."""
        while self._bumps:
            await asyncio.wait(self._bumps)

    async def evict(
        self, space: SpaceIndex, keys: Sequence[bytes] | None, tier: TierName | None
    ) -> tuple[int, int]:
        """Remove copies as far as the rule allows, children first.

        Returns:
            copies removed, and copies that had to stay.
        """
        if keys is None:
            blocks = list(space.blocks.values())
        else:
            blocks = list(filter(None, map(space.blocks.get, dict.fromkeys(keys))))
        tiers = tuple(TierName) if tier is None else (tier,)
        removed = skipped = 0
        for which in tiers:
            left: list[Block] = []
            for at in range(0, len(blocks), _LOOKED_AT):
                part = blocks[at : at + _LOOKED_AT]
                left += [block for block in part if block.slot(which) is not None]
                await asyncio.sleep(0)
            while left:
                again: list[Block] = []
                for i, block in enumerate(reversed(left)):
                    if i % _CHUNK == _CHUNK - 1:
                        await asyncio.sleep(0)
                    if block.dead or block.slot(which) is None:
                        continue
                    if self._index.evict(block, which, Pressure.REQUEST):
                        removed += 1
                    else:
                        again.append(block)
                if len(again) == len(left):
                    break
                # Children that went may have been what kept their parents.
                left = again[::-1]
            skipped += len(left)
        self._counters.counts["evicted_by_request"] += removed
        return removed, skipped

    def corrupt_in_host(self, block: Block) -> None:
        """A block's copy in host is damaged. It goes; if it was the last, with what hangs on it."""
        if block.disk is None or block.dead:
            self.corrupt(block, TierName.HOST)
            return
        self._counters.counts["corrupt_blocks"] += 1
        log.error(
            "block %s of space %s is damaged in host; it is on disk",
            block.key.hex(),
            block.space.id.hex()[:12],
        )
        self._index.drop_host(block)

    def corrupt(self, block: Block, tier: TierName = TierName.DISK) -> None:
        """A block's only copy is damaged: it goes, and what hangs on it."""
        self._counters.counts["corrupt_blocks"] += 1
        log.error("block %s of space %s is damaged", block.key.hex(), block.space.id.hex()[:12])
        if block.dead:
            return
        below = self._index.descendants([block])
        for gone in (*reversed(below), block):
            self._index.discard(gone, "corrupt", tier)
            self._pins.forget(gone)
        if self.flusher is not None:
            self.flusher.wake()

    def damaged_on_disk(self, block: Block, *, kept: bool) -> tuple[int, int]:
        """A block's copy on disk is damaged: it goes, and the copies of those below it there.

        What host memory holds without a gap stays, and goes to disk again.

        Args:
            block: is on disk.
            kept: its host copy is whole.

        Returns:
            disk copies dropped, and blocks that are in no tier any more.
        """
        self._counters.counts["corrupt_blocks"] += 1
        log.error("block %s of space %s is damaged", block.key.hex(), block.space.id.hex()[:12])
        below = self._index.descendants([block])
        staying = {block} if kept and block.host is not None and not block.disk_refs else set()
        for child in below:
            if child.parent in staying and child.host is not None and not child.disk_refs:
                staying.add(child)
        dropped = 0
        again: list[Block] = []
        for gone in (*reversed(below), block):
            dropped += gone.disk is not None
            if gone not in staying:
                self._index.discard(gone, "corrupt", TierName.DISK)
                self._pins.forget(gone)
            elif gone.disk is not None:
                self._index.drop_disk(gone)
                again.append(gone)
        if self.flusher is not None:
            self.flusher.again(again[::-1])
        return dropped, 1 + len(below) - len(staying)

    async def bump_epoch(self, space: SpaceIndex) -> int:
        """Make every block of the space unreachable, durably; return the new epoch.

        Once begun it runs to its end, also when the caller is cancelled: an epoch must not be
        durable and unknown.

        Raises:
            StoreDamaged: the epoch is still the old one.
        """
        task = asyncio.create_task(self._bump(space), name="bump-epoch")
        self._bumps.add(task)
        task.add_done_callback(self._bumps.discard)
        return await asyncio.shield(task)

    async def _bump(self, space: SpaceIndex) -> int:
        epoch = await self._store.run(self._store.store.bump_epoch, space.id)
        reach("epoch.durable")
        if epoch <= space.epoch:
            return space.epoch  # a later bump was faster
        space.epoch = epoch
        self._grants.void(space)
        for attachment in self._attachments.snapshot():
            self._leases.revoke_space(attachment, space)
        blocks = self._index.discard_space(space)
        pins = self._pins.forget_space(space)
        for at in range(0, len(blocks), _CHUNK):
            self._index.free_discarded(blocks[at : at + _CHUNK])
            await asyncio.sleep(0)
        if self.flusher is not None:
            self.flusher.wake()
        try:
            await self._pins.delete_stored(space, pins)
        except KVStoreError as error:
            # They pin nothing: their blocks are gone.
            log.warning("stored pins of an earlier epoch stay until the next start: %s", error)
        return epoch
