"""Flushing: host → disk in groups, and deleting what leaves the disk.

Commit protocol, for each group of blocks of one shape, parents before children

1. Take disk slots; where there are none, choose victims, whose deletes ride on this group's
   commit and whose slots serve a later group.
2. Hold the host copies, compute missing digests, check adopted bytes against theirs.
3. Write the blocks, then sync the segments (`group_writer`).
4. Commit, in one LMDB transaction, the deletes of blocks that left the disk and the records of
   the blocks of this group whose parent is on disk by now (`disk_records`).
5. Only now: the blocks are on disk in the index, and the deleted blocks' slots may be reused.

Killed before 4 the group's slots hold bytes that no record names; killed after it the records are
right. Without power the same, because of the sync in 3: a record never names bytes that the device
may not have. A slot is never written while a durable record still names it, because of 5.

Two groups overlap: one writes while the other syncs and commits. Commits happen in order, so a
child never becomes durable before its parent; if the parent's group fails, the child is refused.

Recovery is `recovery`'s: slots are those that records name, and all others are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from kvstore import tracing
from kvstore.engine.disk_records import DiskRecords, record_of
from kvstore.engine.disk_room import DiskRoom
from kvstore.engine.flush_queue import FlushQueue, is_lost, is_under_way
from kvstore.engine.group_writer import GROUP_BYTES, Group, GroupWriter, group_limit
from kvstore.engine.refused import RefusedBlocks
from kvstore.engine.wake import Signal
from kvstore.index import Block, Flush
from kvstore.tiers.base import Outcome, Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine.budget import DiskBudget
    from kvstore.engine.counters import Counters
    from kvstore.engine.digester import Digester
    from kvstore.engine.store_thread import StoreThread
    from kvstore.engine.verifier import Verifier
    from kvstore.index import BlockIndex
    from kvstore.index.records import BlockRecord
    from kvstore.space import BlockShape
    from kvstore.tiers.disk import DiskTier
    from kvstore.tiers.host import HostTier

__all__ = ["Flusher"]

log = logging.getLogger(__name__)

_GROUPS_AT_ONCE: Final = 2
# A queue that cannot go on is looked at again after this long.
_RETRY_SECONDS: Final = 2.0
# Blocks dealt with in one go of the loop.
_ENQUEUED_AT_ONCE: Final = 2000
# How often it is looked whether the budget has something again.
_BUDGET_SECONDS: Final = 30.0
# Slots are made free ahead of need, but never more than this part of the disk.
_AHEAD_PART: Final = 32


class Flusher:
    """Writes blocks to disk and deletes them there.

    Attributes:
        records: what is durable of the disk.
        room: what leaves the disk to make some.
        budget: limits what is written.
        over_budget: it is spent; blocks that were refused for that are tried again later.
    """

    def __init__(
        self,
        index: BlockIndex,
        host: HostTier,
        disk: DiskTier,
        store: StoreThread,
        digester: Digester,
        verifier: Verifier,
        counters: Counters,
        on_room: Callable[[BlockShape | None], None],
        budget: DiskBudget | None = None,
    ) -> None:
        """Compose; `start` begins to serve.

        Args:
            index: knows the blocks.
            host: holds their bytes.
            disk: takes them.
            store: takes their records.
            digester: computes digests that are missing.
            verifier: checks bytes that were adopted.
            counters: what happened.
            on_room: called when blocks may leave host that could not before; with the shape of
                those that are on disk now.
            budget: limits what is written; None: nothing does.
        """
        self.budget = budget
        # Blocks were refused because it is spent.
        self.over_budget = False
        self._index = index
        self._disk = disk
        self.writer = GroupWriter(host, disk, digester, verifier)
        self._counters = counters
        self._on_room = on_room
        self._refused = RefusedBlocks()
        self._queue = FlushQueue(index, self._refused, counters)
        self._stuck_since: float | None = None
        self.records = DiskRecords(disk, store, counters, self._recorded)
        self._deletes = self.records.deletes
        self._disk_room = self.room = DiskRoom(index, disk, self._deletes, counters)
        self._progress = Signal()
        self._work = asyncio.Event()
        self._groups = asyncio.Semaphore(_GROUPS_AT_ONCE)
        self._last_group: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._writing = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to serve the queue."""
        self._disk.on_room = self._work.set
        self._task = asyncio.create_task(self._run(), name="flusher")

    async def stop(self) -> None:
        """Finish the groups under way and commit pending deletes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)
        while self._deletes and await self._commit_deletes():
            pass
        if self.budget is not None:
            await self.budget.close()

    @property
    def index_problem(self) -> str:
        """Why the last commit failed; empty after one that did not."""
        return self.records.problem

    @property
    def busy(self) -> bool:
        """Whether blocks are on their way, so that waiting for room can help."""
        return bool(self._queue or self._writing)

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way to the disk or off it."""
        return not (self._queue or self._running or any(self._deletes.freeing.values()))

    @property
    def dirty_blocks(self) -> int:
        """Blocks that wait for the disk or are on their way."""
        return len(self._queue) + self._writing

    def enqueue(self, block: Block) -> int:
        """Queue a block for the disk, after those of its ancestors that are not there yet.

        Returns:
            how many blocks were queued.
        """
        queued = self._queue.enqueue(block)
        self._work.set()
        return queued

    def reused(self, run: Sequence[Block]) -> None:
        """A run in chain order was used again under `reused`: on to the disk, if it is not there.

        What was refused waits for what it was refused for.
        """
        for block in reversed(run):
            if block.disk is not None or block.flush in (Flush.QUEUED, Flush.WRITING):
                return  # so are its ancestors
            if block.flush is Flush.NONE and not block.dead:
                self.enqueue(block)
                return

    def committed(self, block: Block) -> None:
        """A new block under `through`: on to the disk, unless its parent was refused there."""
        parent = block.parent
        if parent is not None and is_lost(parent):
            block.flush = Flush.REFUSED
            self._counters.counts[f"flush_skipped_{self._why_lost(block)}_blocks"] += 1
            self._refused.add(block)
            self._index.offer(block)
        else:
            self.enqueue(block)

    def again(self, blocks: Sequence[Block]) -> None:
        """Write blocks again whose copies on disk were lost: before those queued below them.

        Args:
            blocks: parents first; what the first ones hang on is on disk.
        """
        self._queue.again(blocks)
        self._work.set()

    def deleted(self, block: Block, slot: Slot) -> None:
        """A block left the disk: delete its record, then reuse its slot."""
        self._deletes.add(block, slot)
        self._work.set()

    def wake(self) -> None:
        """Look again: something may have let go of the disk."""
        self._work.set()

    def retry_refused(self) -> None:
        """Give blocks that were refused another chance (room was made, or the disk is back)."""
        refused = self._refused.take()
        self._index.disk_room_hint = bool(self._refused)
        for block in refused:
            if block.flush is not Flush.REFUSED:
                continue  # it went along with one of its children
            if self._disk_room.within_quota(block):
                self.enqueue(block)
            else:
                self._refused.add(block)

    async def flush(self, blocks: Sequence[Block], timeout: float) -> list[Block]:
        """Return when each block is on disk, gone, or refused; the last are returned.

        Raises:
            TimeoutError: not all of them were by then.
        """
        for i, block in enumerate(blocks):
            if block.disk is None and not block.dead and block.host is not None:
                self.enqueue(block)
            if i % _ENQUEUED_AT_ONCE == _ENQUEUED_AT_ONCE - 1:
                await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        waiting = list(blocks)
        while True:
            # The last ones are mostly the last to arrive: each block is looked at about once.
            while waiting and not is_under_way(waiting[-1]):
                waiting.pop()
            if not waiting:
                break
            left = deadline - loop.time()
            if left <= 0:
                raise TimeoutError
            await self._progress.wait(min(left, 0.5))
        return [b for b in blocks if b.flush is Flush.REFUSED and not b.dead]

    async def _run(self) -> None:
        while True:
            try:
                await self._step()
            except Exception:
                # The boundary of flushing: one fault must not end it for all.
                log.exception("the flusher failed; it goes on")
                await asyncio.sleep(_RETRY_SECONDS)

    async def _step(self) -> None:
        """Start one group, or wait until there may be one."""
        now = asyncio.get_running_loop().time()
        if self.over_budget and self._may_spend():
            self.over_budget = False
            self._index.disk_room_hint = True
        retry = self._index.disk_room_hint and not self.over_budget
        if self._refused and retry and now >= self._refused.retry_at:
            self._refused.pause(now)
            self.retry_refused()
        await self._charge()
        await self._groups.acquire()
        # Before the look: what comes up during it is looked at again.
        self._work.clear()
        group = None
        try:
            with tracing.using(self._queue.asker):
                group = self._select()
        finally:
            if group is None:
                self._groups.release()
        if group is None:
            await self._idle()
            return
        self._stuck_since = None
        self._writing += len(group.blocks)
        task = asyncio.create_task(self._flush_group(group), name="flush-group")
        self._last_group = task
        self._running.add(task)
        task.add_done_callback(self._group_done)

    async def _idle(self) -> None:
        """Wait for work; commit deletes that no group comes for."""
        now = asyncio.get_running_loop().time()
        waits: list[float] = []
        if self._deletes and not self._running:
            if now >= self._deletes.due:
                await self._commit_deletes()
                return
            waits.append(self._deletes.due - now)
        if self._queue:
            waits.append(_RETRY_SECONDS)
        if self.over_budget:
            waits.append(_BUDGET_SECONDS)
        elif self._refused and self._index.disk_room_hint:
            waits.append(self._refused.retry_at - now)
        # Not `wait_for`: that loses a cancellation which comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(waits, default=None)):
                await self._work.wait()

    def _group_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._last_group is task:
            self._last_group = None
        self._groups.release()
        self._work.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("flush group failed", exc_info=task.exception())

    def _select(self) -> Group | None:
        """Take queued blocks of one shape for which there are disk slots now."""
        while self._queue and self._queue.head.dead:
            self._queue.settle(self._queue.popleft(), Flush.NONE)
            self._progress.notify()
        if not self._queue:
            return None
        shape = self._queue.head.space.shape
        wanted = self._queue.leading(shape, group_limit(shape))
        if self._index.disk_quotas:
            # What a refused block kept on disk is its own ancestors: no room for it.
            hint = self._index.disk_room_hint
            wanted = self._queue.within_quotas(shape, wanted, _ENQUEUED_AT_ONCE, self._disk_room)
            self._index.disk_room_hint = hint
        if not wanted:
            self._work.set()
            self._tell()
            return None
        if self.budget is not None:
            wanted = min(wanted, self.budget.affordable(shape.block_bytes))
            if not wanted and self.budget.left_bytes < shape.block_bytes:
                self._refuse_for_budget(shape)
            if not wanted:
                # Else what was charged is too little for the block that is first by now.
                self._work.set()
                return None
        self._disk.want(shape, 2 * wanted)
        slots = self._disk.allocate(shape, wanted)
        self._make_room(shape, wanted - len(slots), needed=not slots)
        if not slots:
            return None
        blocks: list[Block] = []
        while self._queue and self._queue.head.space.shape == shape and len(blocks) < len(slots):
            block = self._queue.popleft()
            if block.dead:
                self._queue.settle(block, Flush.NONE)
            elif block.parent is not None and is_lost(block.parent):
                self._queue.refuse(block, self._why_lost(block))
            else:
                block.flush = Flush.WRITING
                block.space.disk_arriving += 1
                self._index.hold_host(block)
                blocks.append(block)
        if len(slots) > len(blocks):
            self._disk.free(slots[len(blocks) :])
        if not blocks:
            self._work.set()
            self._tell()
            return None
        if self.budget is not None:
            self.budget.spend(len(blocks) * shape.block_bytes)
        return Group(blocks, slots[: len(blocks)], self._last_group)

    async def _charge(self) -> None:
        """Have a group's bytes of the budget at hand."""
        if self.budget is not None and self._queue:
            block_bytes = self._queue.head.space.shape.block_bytes
            await self.budget.charge(max(GROUP_BYTES, block_bytes))

    def _may_spend(self) -> bool:
        """Return whether a block that was refused for the budget may be written now."""
        block = self._refused.first()
        if self.budget is None or block is None:
            return True
        return self.budget.left_bytes >= block.space.shape.block_bytes

    def _why_lost(self, block: Block) -> str:
        if self.over_budget:
            return "budget"
        return "no_room" if block.space.disk_room > 0 else "quota"

    def _refuse_for_budget(self, shape: BlockShape) -> None:
        """Refuse the queue's head: the day's bytes are written."""
        self.over_budget = True
        self._queue.refuse_leading(shape, _ENQUEUED_AT_ONCE, "budget")
        if self._queue:
            self._work.set()
        self._tell()

    def _make_room(self, shape: BlockShape, missing: int, *, needed: bool) -> None:
        """Choose blocks to leave the disk, some ahead; refuse the queue's head when none can."""
        disk = self._disk
        ahead = min(group_limit(shape), disk.capacity_bytes // shape.block_bytes // _AHEAD_PART)
        more = missing + max(0, ahead - disk.free_blocks(shape))
        coming = more > 0 and self._disk_room.evict(shape, more)
        # What leaves the disk frees its slots once that is durable: never, while the index fails.
        fails = bool(self.records.problem)
        if not needed or self._writing:
            return
        if not fails and (coming or self._disk_room.reclaim_segment(shape)):
            return
        # Only ancestors of queued blocks are left, or copies that promotions hold. Those may be
        # over soon, but one that waits for memory, which waits for this queue, never is.
        now = asyncio.get_running_loop().time()
        self._stuck_since = now if self._stuck_since is None else self._stuck_since
        if not fails and self._index.disk_held and now - self._stuck_since < _RETRY_SECONDS:
            return
        hint = self._index.disk_room_hint
        self._queue.refuse_leading(shape, _ENQUEUED_AT_ONCE, "" if fails else "no_room")
        # What these blocks kept on disk are their own ancestors: no room for them.
        self._index.disk_room_hint = hint
        self._stuck_since = None
        self._refused.pause(now)
        if self._queue:
            self._work.set()
        self._tell()

    def _tell(self, shape: BlockShape | None = None) -> None:
        self._progress.notify()
        self._on_room(shape)

    async def _flush_group(self, group: Group) -> None:
        """Steps 2 to 5."""
        begun = asyncio.get_running_loop().time()
        with self._queue.begin_span(group.blocks) as span:
            await self.writer.write(group)
            if group.predecessor is not None:
                await asyncio.gather(group.predecessor, return_exceptions=True)
            written = await self._commit_group(group)
            if written < len(group.blocks):
                span.fail(f"{len(group.blocks) - written} blocks are not on disk")
        self._counters.record("flush_group", asyncio.get_running_loop().time() - begun)
        self._tell(group.blocks[0].space.shape)

    async def _commit_group(self, group: Group) -> int:
        """Steps 4 and 5; return how many blocks are on disk now."""
        written = 0
        records: dict[Block, BlockRecord] = {}
        for block, slot, outcome in zip(group.blocks, group.slots, group.outcomes, strict=True):
            parent = block.parent
            anchored = parent is None or parent.disk is not None or parent in records
            if outcome is Outcome.OK and not block.dead and anchored:
                records[block] = record_of(block, slot)
        ok = await self.records.commit(list(records.values()), self._deletes.take())
        for block, slot in zip(group.blocks, group.slots, strict=True):
            self._writing -= 1
            block.space.disk_arriving -= 1
            record = records.get(block)
            if record is None:
                self._queue.refuse(block)
                self._disk.free([slot])
                parent = block.parent
                if parent is not None and parent.flush in (Flush.QUEUED, Flush.WRITING):
                    # The parent's copy was lost meanwhile and is on its way again: after it.
                    self.enqueue(block)
            elif not ok:
                # Its record may be durable all the same: it is deleted before the slot is used.
                self._queue.refuse(block)
                self.deleted(block, slot)
            elif block.dead:
                # It died during the commit.
                self._queue.settle(block, Flush.NONE)
                self.deleted(block, slot)
            else:
                self._queue.settle(block, Flush.NONE)
                block.recorded = record.sequence
                self._index.put_disk(block, slot)
                written += 1
                self._counters.counts["flushed_blocks"] += 1
                self._counters.counts["flushed_bytes"] += block.space.shape.block_bytes
            self._index.release_host(block)
        if ok and all(outcome is Outcome.OK for outcome in group.outcomes):
            self._refused.worked()
        else:
            self._refused.failed(asyncio.get_running_loop().time())
            self._index.disk_room_hint = True
        return written

    async def _commit_deletes(self) -> bool:
        done = await self.records.commit_deletes()
        self._tell()
        return done

    def _recorded(self, freed: bool) -> None:
        """Records or deletes are durable."""
        if freed and self._refused:
            self._index.disk_room_hint = True
        self._work.set()
