"""What is durable of the disk tier: records of blocks, and deletes of those that left.

One transaction at a time, in the order in which they are asked for:

1. the caller has made the blocks' bytes durable;
2. names of records to delete are taken as of now: a block that came back under the same key has a
   record of its own, which stays;
3. LMDB commits deletes and records together. If that fails, nothing counts as durable, and the
   deletes are tried again, in the same order;
4. only now the slots of deleted records are free.

Killed before 3 the old records are there, and slots that no record names; killed after it the new
ones, and the victims' slots are free at the next start, which goes by the records.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvstore.engine.disk_room import Deletes
from kvstore.errors import KVStoreError
from kvstore.index import Block
from kvstore.index.records import BlockRecord
from kvstore.syncpoint import reach

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine.counters import Counters
    from kvstore.engine.store_thread import StoreThread
    from kvstore.space import BlockShape
    from kvstore.tiers.base import Slot
    from kvstore.tiers.disk import DiskTier

__all__ = ["DiskRecords", "record_of"]

log = logging.getLogger(__name__)


class DiskRecords:
    """Commits records and deletes.

    Attributes:
        deletes: blocks that left the disk, whose records are to go.
        problem: why the last commit failed; empty after one that did not.
        rewriting: held from a look at where blocks lie until records that say so are committed, by
            whoever commits records of blocks that have one.
    """

    def __init__(
        self,
        disk: DiskTier,
        store: StoreThread,
        counters: Counters,
        on_committed: Callable[[bool], None],
    ) -> None:
        """Compose.

        Args:
            disk: gets the slots back.
            store: takes the records.
            counters: what happened.
            on_committed: called after each commit; with whether slots became free.
        """
        self._disk = disk
        self._store = store
        self._counters = counters
        self._on_committed = on_committed
        self.deletes = Deletes()
        self.problem = ""
        self.rewriting = asyncio.Lock()

    async def commit(
        self, records: Sequence[BlockRecord], deletes: Sequence[tuple[Block, Slot]]
    ) -> bool:
        """Commit one transaction, then free the slots of what was deleted.

        Returns:
            False when it failed: the deletes stay queued, and each record may be there all the same.
        """
        if not records and not deletes:
            return True
        names = self.deletes.names(deletes)
        try:
            await self._store.run(
                self._store.store.commit_blocks, self._disk.store_id, list(records), names
            )
        except Exception as error:
            # The boundary of the store's thread. Whatever it met, nothing counts as durable.
            expected = isinstance(error, KVStoreError)
            problem = str(error) or type(error).__name__
            if problem != self.problem:  # it is tried every few seconds
                log.warning("index commit failed: %s", error, exc_info=not expected)
            self._counters.counts["index_commit_failures"] += 1
            self.deletes.failed(deletes)
            self.problem = problem
            return False
        if self.problem:
            log.info("the index can be committed again")
        self.problem = ""
        reach("flush.committed")
        self._disk.free(self.deletes.done(deletes))
        reach("flush.freed")
        self._on_committed(bool(deletes))
        return True

    async def commit_deletes(self) -> bool:
        """Commit deletes that no group comes for."""
        return await self.commit([], self.deletes.take())

    async def save_touches(self, blocks: Sequence[Block]) -> None:
        """Rewrite the records of blocks whose place in the LRU order has changed."""
        async with self.rewriting:
            # A dead one is on disk while somebody reads it still: its record would name the epoch
            # that its space has now, or replace that of the block which has its key by now.
            changed = [b for b in blocks if not b.dead and b.sequence != b.recorded]
            records = {b: record_of(b, b.disk) for b in changed if b.disk is not None}
            if records and await self.commit(list(records.values()), []):
                for block, record in records.items():
                    block.recorded = record.sequence

    async def rewrite(self, records: Sequence[BlockRecord]) -> bool:
        """Commit records in the place of those that are there; the caller holds `rewriting`.

        Returns:
            False when that failed: each record may be the old one or the new one.
        """
        return await self.commit(records, [])

    def freeing(self, shape: BlockShape) -> int:
        """Return how many slots on disk will be free when their deletes are durable."""
        return self.deletes.freeing[shape]


def record_of(block: Block, slot: Slot) -> BlockRecord:
    """Return what LMDB keeps of a block on disk."""
    assert block.digests is not None
    return BlockRecord(
        space_id=block.space.id,
        key=block.key,
        parent=None if block.parent is None else block.parent.key,
        epoch=block.space.epoch,
        segment=slot.group,
        slot=slot.index,
        digests=block.digests,
        sequence=block.sequence,
    )
