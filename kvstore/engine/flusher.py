"""Flushing: host → disk in groups, and deleting what leaves the disk.

For each group of blocks of one shape, parents before children:

1. take disk slots; where there are none, choose victims, whose deletes ride on this group's
   commit and whose slots serve a later group;
2. hold the host copies and compute missing digests;
3. write the blocks, then sync the segments;
4. commit, in one LMDB transaction, the deletes of blocks that left the disk and the records of
   the blocks of this group whose parent is on disk by now;
5. only now: the blocks are on disk in the index, and the deleted blocks' slots may be reused.

Killed before 4 the group's slots hold bytes that no record names; killed after it the records are
right. A slot is never written while a durable record still names it, because of 5.

Two groups overlap: one writes while the other syncs and commits. Commits happen in order, so a
child never becomes durable before its parent; if the parent's group fails, the child is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.errors import KVStoreError, TierError
from kvstore.index import Block, Flush, disk_evictable, host_evictable
from kvstore.index.records import BlockRecord
from kvstore.tiers.base import Outcome, Slot, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.counters import Counters
    from kvstore.engine.digester import Digester
    from kvstore.engine.room import Signal
    from kvstore.engine.store_thread import StoreThread
    from kvstore.index import BlockIndex
    from kvstore.space import BlockShape
    from kvstore.tiers.disk import DiskTier
    from kvstore.tiers.host import HostTier

__all__ = ["Flusher"]

log = logging.getLogger(__name__)

_GROUP_BYTES: Final = 64 << 20
_GROUP_BLOCKS: Final = 256
_GROUPS_AT_ONCE: Final = 2
_RETRY_SECONDS: Final = 2.0
# Deletes without a group to ride on are committed after this long.
_DELETE_DELAY_SECONDS: Final = 0.02


@dataclass(eq=False, slots=True)
class _Group:
    blocks: list[Block]
    slots: list[Slot]
    predecessor: asyncio.Task[None] | None
    outcomes: list[Outcome] = field(default_factory=list)


class Flusher:
    """Writes blocks to disk and deletes them there."""

    def __init__(
        self,
        index: BlockIndex,
        host: HostTier,
        disk: DiskTier,
        store: StoreThread,
        digester: Digester,
        counters: Counters,
        room: Signal,
    ) -> None:
        """Compose; `start` begins to serve."""
        self._index = index
        self._host = host
        self._disk = disk
        self._store = store
        self._digester = digester
        self._counters = counters
        self._room = room
        self._queue: deque[Block] = deque()
        self._refused: dict[Block, None] = {}
        self._deletes: list[tuple[Block, Slot]] = []
        self._deletes_in_commit = 0
        self._work = asyncio.Event()
        self._groups = asyncio.Semaphore(_GROUPS_AT_ONCE)
        self._last_group: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._writing = 0
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        """Begin to serve the queue."""
        self._disk.on_room = self._work.set
        self._task = asyncio.create_task(self._run(), name="flusher")

    async def stop(self) -> None:
        """Finish the groups under way and commit pending deletes."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)
        if self._deletes:
            await self._commit_deletes()

    @property
    def busy(self) -> bool:
        """Whether blocks are on their way, so that waiting for room can help."""
        return bool(self._queue or self._writing)

    @property
    def dirty_blocks(self) -> int:
        """Blocks that wait for the disk or are on their way."""
        return len(self._queue) + self._writing

    def enqueue(self, block: Block) -> int:
        """Queue a block for the disk, after those of its ancestors that are not there yet.

        Returns:
            how many blocks were queued.
        """
        chain: list[Block] = []
        at: Block | None = block
        while at is not None and at.disk is None and at.flush in (Flush.NONE, Flush.REFUSED):
            chain.append(at)
            at = at.parent
        for member in reversed(chain):
            self._refused.pop(member, None)
            member.flush = Flush.QUEUED
            if member.parent is not None:
                member.parent.queued_children += 1
            self._queue.append(member)
        self._work.set()
        return len(chain)

    def committed(self, block: Block) -> None:
        """A new block under `through`: on to the disk, unless its parent was refused there."""
        parent = block.parent
        if parent is not None and parent.disk is None and parent.flush is Flush.REFUSED:
            block.flush = Flush.REFUSED
            self._refused[block] = None
            self._index.offer(block)
        else:
            self.enqueue(block)

    def deleted(self, block: Block, slot: Slot) -> None:
        """A block left the disk: delete its record, then reuse its slot."""
        self._deletes.append((block, slot))
        self._work.set()

    def retry_refused(self) -> None:
        """Give blocks that were refused another chance (room was made, or the disk is back)."""
        refused, self._refused = list(self._refused), {}
        for block in refused:
            if not block.dead and block.flush is Flush.REFUSED and block.host is not None:
                self.enqueue(block)

    async def flush(self, blocks: Sequence[Block], timeout: float) -> list[Block]:
        """Return when each block is on disk, gone, or refused; the last are returned.

        Raises:
            TimeoutError: not all of them were by then.
        """
        for block in blocks:
            if block.disk is None and not block.dead and block.host is not None:
                self.enqueue(block)
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            open_ = [b for b in blocks if b.flush in (Flush.QUEUED, Flush.WRITING) and not b.dead]
            if not open_:
                break
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise TimeoutError
            await self._room.wait(min(left, 0.5))
        return [b for b in blocks if b.flush is Flush.REFUSED and not b.dead]

    async def _run(self) -> None:
        while True:
            if self._index.disk_room_hint and self._refused:
                self._index.disk_room_hint = False
                self.retry_refused()
            await self._groups.acquire()
            group = self._select()
            if group is not None:
                self._writing += len(group.blocks)
                task = asyncio.create_task(self._flush_group(group), name="flush-group")
                self._last_group = task
                self._running.add(task)
                task.add_done_callback(self._group_done)
                continue
            self._groups.release()
            self._work.clear()
            if self._deletes and not self._running:
                # Nothing to ride on; give a group a moment to come.
                try:
                    await asyncio.wait_for(self._work.wait(), _DELETE_DELAY_SECONDS)
                except TimeoutError:
                    await self._commit_deletes()
                    self._work.set()
                continue
            timeout = _RETRY_SECONDS if self._queue else None
            try:
                await asyncio.wait_for(self._work.wait(), timeout)
            except TimeoutError:
                continue

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._last_group is task:
            self._last_group = None
        self._groups.release()
        self._work.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("flush group failed", exc_info=task.exception())

    def _dequeued(self, block: Block, state: Flush) -> None:
        block.flush = state
        if state is not Flush.WRITING and block.parent is not None:
            block.parent.queued_children -= 1
            self._index.offer(block.parent)

    def _select(self) -> _Group | None:
        """Take queued blocks of one shape for which there are disk slots now."""
        while self._queue and (self._queue[0].dead or self._queue[0].disk is not None):
            self._dequeued(self._queue.popleft(), Flush.NONE)
        if not self._queue:
            return None
        shape = self._queue[0].space.shape
        limit = max(1, min(_GROUP_BLOCKS, _GROUP_BYTES // shape.block_bytes))
        wanted = 0
        for block in self._queue:
            if block.space.shape != shape or wanted == limit:
                break
            wanted += 1
        self._disk.want(shape, 2 * wanted)
        slots = self._disk.allocate(shape, wanted)
        if len(slots) < wanted or self._disk.free_blocks(shape) < limit:
            self._make_room(shape, wanted - len(slots) + limit, needed=not slots)
        if not slots:
            return None
        blocks: list[Block] = []
        while self._queue and len(blocks) < len(slots):
            block = self._queue.popleft()
            if block.dead or block.disk is not None:
                self._dequeued(block, Flush.NONE)
                continue
            if block.space.shape != shape:
                self._queue.appendleft(block)
                break
            parent = block.parent
            if parent is not None and parent.disk is None and parent.flush is Flush.REFUSED:
                self._refuse(block)
                continue
            block.flush = Flush.WRITING
            self._index.hold_host(block)
            blocks.append(block)
        if len(slots) > len(blocks):
            self._disk.free(slots[len(blocks) :])
            slots = slots[: len(blocks)]
        if not blocks:
            self._work.set()
            return None
        return _Group(blocks, slots, self._last_group)

    def _make_room(self, shape: BlockShape, count: int, *, needed: bool) -> None:
        """Choose blocks to leave the disk; refuse the queue's head when nothing else can leave.

        `count` covers what the next group needs too, so that its slots are free in time.
        """
        disk = self._disk
        coming = disk.room_blocks(shape) + self._deletes_in_commit + len(self._deletes)
        missing = count - coming
        queue = self._index.disk_queue(shape)
        evicted = 0
        while evicted < missing:
            victim = queue.pop()
            if victim is None:
                break
            self._index.drop_disk(victim)
            evicted += 1
        self._counters.counts["evicted_blocks_disk"] += evicted
        if not needed or evicted or coming or disk.allocating or self._writing:
            return
        if self._reclaim_segment(shape):
            return
        # Only ancestors of queued blocks are left, or copies that are being read.
        held = any(b.disk_refs for s in self._index.spaces.values() for b in s.blocks.values())
        if not held:
            while self._queue and self._queue[0].space.shape == shape:
                self._refuse(self._queue.popleft())
            self._room.notify()

    def _reclaim_segment(self, shape: BlockShape) -> bool:
        """Drop the blocks of the coldest segment of another shape: once empty it is reused."""
        others = [
            (group, used) for group, other, _, used in self._disk.segments() if other != shape
        ]
        members: dict[int, list[Block]] = {group: [] for group, used in others if used}
        for space in self._index.spaces.values():
            if members and space.shape != shape:
                for block in space.blocks.values():
                    if block.disk is not None and block.disk.group in members:
                        members[block.disk.group].append(block)
        for group in sorted(
            members, key=lambda g: max((b.sequence for b in members[g]), default=-1)
        ):
            blocks = members[group]
            if self._disk.slots_in_use(group) != len(blocks):
                continue  # some of its slots are being written or deleted
            if any(b.disk_refs or b.queued_children for b in blocks):
                continue
            if self._drop_chains(blocks):
                return True
        return False

    def _drop_chains(self, blocks: Sequence[Block]) -> bool:
        """Drop blocks and what hangs on them, children first, as far as the rule allows."""
        left: list[Block] = []
        for space in {b.space: None for b in blocks}:
            roots = [b for b in blocks if b.space is space]
            left += dict.fromkeys(roots + self._index.descendants(space, roots))
        progress = False
        while left:
            again = []
            for block in reversed(left):
                if block.disk is None and host_evictable(block):
                    self._index.drop_host(block)
                    progress = True
                elif disk_evictable(block):
                    self._index.drop_disk(block)
                    self._counters.counts["evicted_blocks_disk"] += 1
                    progress = True
                elif block.disk is not None:
                    again.append(block)
            if len(again) == len(left):
                break
            left = again[::-1]
        return progress

    def _refuse(self, block: Block) -> None:
        self._dequeued(block, Flush.REFUSED)
        if not block.dead:
            self._refused[block] = None
            self._counters.counts["flush_refused_blocks"] += 1
            self._index.offer(block)

    async def _flush_group(self, group: _Group) -> None:
        """Steps 2 to 5."""
        blocks = group.blocks
        begun = asyncio.get_running_loop().time()
        try:
            await self._digester.digest(blocks)
            transfers = [
                Transfer(slot, self._host.views(b.host), b.space.spec.shard_bytes)
                for b, slot in zip(blocks, group.slots, strict=True)
                if b.host is not None
            ]
            group.outcomes = await self._disk.write(transfers)
            await self._disk.sync()
        except TierError as error:
            log.warning("flush failed: %s", error)
            group.outcomes = [Outcome.IO_ERROR] * len(blocks)
        if group.predecessor is not None:
            await asyncio.gather(group.predecessor, return_exceptions=True)
        await self._commit_group(group)
        self._counters.record("flush_group", asyncio.get_running_loop().time() - begun)
        self._room.notify()

    async def _commit_group(self, group: _Group) -> None:
        going: set[Block] = set()
        records: list[BlockRecord] = []
        for block, slot, outcome in zip(group.blocks, group.slots, group.outcomes, strict=True):
            parent = block.parent
            anchored = parent is None or parent.disk is not None or parent in going
            if outcome is not Outcome.OK or block.dead or not anchored:
                continue
            going.add(block)
            records.append(record_of(block, slot))
        deletes, self._deletes = self._deletes, []
        ok = await self._commit(records, deletes)
        for block, slot in zip(group.blocks, group.slots, strict=True):
            self._writing -= 1
            if ok and block in going and not block.dead:
                self._dequeued(block, Flush.NONE)
                block.recorded = block.sequence
                self._index.put_disk(block, slot)
                self._counters.counts["flushed_blocks"] += 1
            elif ok and block in going:
                # It died during the commit: its record is durable, so the slot must wait.
                self._dequeued(block, Flush.NONE)
                self.deleted(block, slot)
            else:
                self._refuse(block)
                self._disk.free([slot])
            self._index.release_host(block)

    async def _commit_deletes(self) -> None:
        deletes, self._deletes = self._deletes, []
        await self._commit([], deletes)
        self._room.notify()

    async def _commit(
        self, records: Sequence[BlockRecord], deletes: Sequence[tuple[Block, Slot]]
    ) -> bool:
        """Commit one transaction; on failure the deletes stay queued. Then free the slots."""
        if not records and not deletes:
            return True
        # A block that came back under the same key has a record of its own by now.
        names = [(b.space.id, b.key) for b, _ in deletes if not self._is_back(b)]
        self._deletes_in_commit += len(deletes)
        try:
            await self._store.run(
                self._store.store.commit_blocks, self._disk.store_id, list(records), names
            )
        except KVStoreError as error:
            log.warning("index commit failed: %s", error)
            self._counters.counts["index_commit_failures"] += 1
            self._deletes = list(deletes) + self._deletes
            return False
        finally:
            self._deletes_in_commit -= len(deletes)
        self._disk.free([slot for _, slot in deletes])
        self._work.set()
        return True

    @staticmethod
    def _is_back(block: Block) -> bool:
        current = block.space.blocks.get(block.key)
        return current is not None and current.disk is not None

    async def save_touches(self, blocks: Sequence[Block]) -> None:
        """Rewrite the records of blocks whose place in the LRU order has changed."""
        changed = [b for b in blocks if b.disk is not None and b.sequence != b.recorded]
        records = [record_of(b, b.disk) for b in changed if b.disk is not None]
        if records and await self._commit(records, []):
            for block, record in zip(changed, records, strict=True):
                block.recorded = record.sequence


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
