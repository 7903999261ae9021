"""The engine: index, tiers, grants, leases and movers put together. Knows no gRPC.

Every method runs on the event loop's thread. What is not a coroutine does not wait and is atomic
with respect to everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from kvstore.engine.attachments import Attachment, Attachments, State
from kvstore.engine.counters import Counters, UsageCounts
from kvstore.engine.digester import Digester
from kvstore.engine.events import GenerationSlots
from kvstore.engine.flusher import Flusher
from kvstore.engine.grants import Grant, Grants
from kvstore.engine.leases import Acquired, Leases
from kvstore.engine.misses import miss_of
from kvstore.engine.pins import Pins
from kvstore.engine.recovery import recover
from kvstore.engine.room import HostRoom
from kvstore.engine.store_thread import StoreThread
from kvstore.engine.tickets import Tickets
from kvstore.engine.waiting import RunWaiter
from kvstore.errors import InvalidRequest, StaleEpoch, UnknownSpace
from kvstore.index import Block, BlockIndex, SpaceIndex
from kvstore.miss import Miss
from kvstore.outcomes import CommitOutcome, Shortage
from kvstore.prefetch.promoter import Promoter
from kvstore.tiers.base import Slot, TierName
from kvstore.tiers.control import ControlFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.index.lmdb_store import MetaStore
    from kvstore.space import SpaceSpec
    from kvstore.tiers.disk import DiskTier
    from kvstore.tiers.host import HostTier
    from kvstore.tiers.slab import SlabGroup

__all__ = ["Engine"]

log = logging.getLogger(__name__)

# A loop that holds the thread longer than this many blocks' work lets others run.
_YIELD_BLOCKS: Final = 2000
_HOUSEKEEPING_SECONDS: Final = 2.0
_TOUCH_SAVE_SECONDS: Final = 30.0


class Engine:
    """One daemon's state.

    Attributes:
        index: blocks and where they are.
        attachments: processes that use the daemon.
        grants, leases: what they may write and read.
        counters: what happened.
        usage: what clients report, by space id.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        store: MetaStore,
        *,
        flush_on_commit: bool,
        lease_ttl_seconds: float,
        lease_cap_bytes: int,
        grant_cap_bytes: int,
    ) -> None:
        """Compose; `start` opens the tiers.

        Args:
            host: memory pool, not open yet.
            disk: disk tier, not open yet; None: there is none.
            store: open store for spaces, epochs, pins and disk records.
            flush_on_commit: write policy `through`; else `evict`.
            lease_ttl_seconds: silence after which a client's leases expire.
            lease_cap_bytes: most that one client may lease.
            grant_cap_bytes: most that one client may be granted.
        """
        self.host = host
        self.disk = disk
        self.store = store
        self.counters = Counters()
        self.usage: dict[bytes, UsageCounts] = {}
        self.lease_cap_bytes = lease_cap_bytes
        self.grant_cap_bytes = grant_cap_bytes
        self._lease_ttl = lease_ttl_seconds
        self._flush_on_commit = flush_on_commit
        self.index = BlockIndex(self._free_host, self._free_disk)
        self.grants = Grants(self.index, self._free_host, self._committed)
        self._store_thread = StoreThread(store)
        self._digest_threads = ThreadPoolExecutor(2, "digest")
        self.digester = Digester(self.index, host, self._digest_threads)
        self.leases = Leases(
            self.index,
            host,
            self.counters,
            cap_bytes=lease_cap_bytes,
            on_released=lambda: self.room.signal.notify(),
        )
        self.flusher: Flusher | None = None
        self.promoter: Promoter | None = None
        self.draining = False
        self.tickets = Tickets(self.index, self.leases)
        self.pins = Pins(self.index, self._store_thread)
        self._next_put = 0
        self._housekeeper: asyncio.Task[None] | None = None
        self.recovered_blocks = 0

    async def start(self) -> None:
        """Open the tiers, recover the disk's index, begin to serve.

        Raises:
            ConfigError: a tier cannot be opened; nothing is left open.
        """
        await self.host.open()
        try:
            self.control = ControlFile(self.host.directory)
            self.attachments = Attachments(
                self.control,
                lease_ttl_seconds=self._lease_ttl,
                on_silent=self.leases.end_all,
                on_gone=self._gone,
            )
            self.room = HostRoom(self.host, self.index, self.counters, self.attachments)
            self.room.held = lambda: bool(self.grants.slot_count or self.leases.count)
            self.host.on_group = self._new_group
            self.host.on_no_room = self.room.signal.notify
            for record in self.store.spaces():
                space = SpaceIndex(record.spec.fingerprint, record.spec, record.epoch)
                self.index.spaces[space.id] = space
            if self.disk is not None:
                await self._start_disk(self.disk)
            self.pins.restore()
        except BaseException:
            await self.host.close()
            raise
        self.digester.start()
        self.attachments.start()
        self._housekeeper = asyncio.create_task(self._housekeep(), name="housekeeper")

    async def _start_disk(self, disk: DiskTier) -> None:
        await disk.open()
        try:
            loaded = self.store.load_blocks(disk.store_id)
            recovered = recover(self.index, disk, loaded.records)
            await disk.finish_recovery()
            if recovered.dropped:
                self.store.commit_blocks(disk.store_id, [], recovered.dropped)
            disk.free(recovered.freed)
        except BaseException:
            await disk.close()
            raise
        self.recovered_blocks = recovered.blocks
        self.counters.counts["recovery_dropped_blocks"] += len(recovered.dropped) + loaded.damaged
        self.flusher = Flusher(
            self.index,
            self.host,
            disk,
            self._store_thread,
            self.digester,
            self.counters,
            self.room.signal,
        )
        self.promoter = Promoter(
            self.index, disk, self.room, on_corrupt=self._corrupt, on_read=self._read
        )
        self.room.flusher = self.flusher
        self.room.flush_on_evict = not self._flush_on_commit
        self.leases.promoter = self.promoter
        self.tickets.promoter = self.promoter
        self.flusher.start()
        self.promoter.start()

    async def quiesce(self, flush_timeout: float) -> None:
        """Before a stop: grant nothing more, and flush what there is time for."""
        self.draining = True
        try:
            _, skipped = await self.flush(flush_timeout)
            if skipped:
                log.warning("stop: %d blocks are not on disk (no room)", len(skipped))
        except TimeoutError:
            log.warning("stop: the flush did not finish within %.1f s", flush_timeout)

    async def farewell(self, reason: str) -> None:
        """Tell the clients that this boot ends; their streams end with it."""
        if self._housekeeper is not None:
            self._housekeeper.cancel()
            await asyncio.gather(self._housekeeper, return_exceptions=True)
        await self.attachments.stop(reason)

    async def close(self) -> None:
        """Close everything, after `farewell` if there was time for it."""
        await self.farewell("closed")
        await self.digester.stop()
        if self.promoter is not None:
            await self.promoter.stop()
        if self.flusher is not None:
            for space in self.index.spaces.values():
                await self.flusher.save_touches(list(space.blocks.values()))
            await self.flusher.stop()
        if self.disk is not None:
            await self.disk.close()
        self._store_thread.close()
        self._digest_threads.shutdown()
        self.control.close()
        await self.host.close()

    def _free_host(self, slot: Slot) -> None:
        self.room.free(slot)

    def _free_disk(self, block: Block, slot: Slot) -> None:
        assert self.flusher is not None
        self.flusher.deleted(block, slot)

    def _new_group(self, group: SlabGroup) -> None:
        self.attachments.announce(group)
        self.room.signal.notify()

    def _committed(self, block: Block) -> None:
        """A block got its host copy from a client."""
        self.counters.counts["stored_blocks"] += 1
        if self.flusher is not None and self._flush_on_commit:
            self.flusher.committed(block)
        else:
            self.digester.add(block)

    def _corrupt(self, block: Block) -> None:
        """A block's only copy is damaged: it goes, and what hangs on it."""
        self.counters.counts["corrupt_blocks"] += 1
        log.error("block %s of space %s is damaged", block.key.hex(), block.space.id.hex()[:12])
        if block.dead:
            return
        below = self.index.descendants(block.space, [block])
        for child in reversed(below):
            self.index.discard(child, "corrupt", TierName.DISK)
        self.index.discard(block, "corrupt", TierName.DISK)

    def _read(self, blocks: int, seconds: float) -> None:
        self.counters.counts["promoted_blocks"] += blocks
        self.counters.record("promote_batch", seconds)
        self.room.signal.notify()

    def _gone(self, attachment: Attachment) -> None:
        self.leases.end_all(attachment)
        self.grants.gone(attachment)
        self.room.unmapped(attachment.id)

    async def _housekeep(self) -> None:
        """Expire pins, try a degraded disk again, save the LRU order now and then."""
        saved = time.monotonic()
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            await self.pins.expire()
            self.tickets.expire()
            await self._try_disk_again()
            if self.flusher is not None and time.monotonic() - saved > _TOUCH_SAVE_SECONDS:
                saved = time.monotonic()
                for space in list(self.index.spaces.values()):
                    blocks = list(space.blocks.values())
                    for at in range(0, len(blocks), _YIELD_BLOCKS):
                        await self.flusher.save_touches(blocks[at : at + _YIELD_BLOCKS])

    async def _try_disk_again(self) -> None:
        if self.disk is None or self.flusher is None or self.disk.state == "ok":
            return
        if await self.disk.probe():
            log.info("disk tier works again")
            self.flusher.retry_refused()

    async def open_space(self, spec: SpaceSpec) -> SpaceIndex:
        """Return the space of a spec; a new one is durable before this returns.

        Raises:
            InvalidRequest: no block of this size fits the host pool.
        """
        space_id = spec.fingerprint
        space = self.index.spaces.get(space_id)
        capacity = self.host.usage().capacity_bytes
        if spec.shape.block_bytes > capacity:
            raise InvalidRequest(
                "shard_bytes",
                f"a block takes {spec.shape.block_bytes} bytes, the host pool has {capacity}",
            )
        if space is None:
            record = await self._store_thread.run(self.store.put_space, spec)
            # Another call may have been faster while this one waited.
            space = self.index.spaces.setdefault(space_id, SpaceIndex(space_id, spec, record.epoch))
        self.host.want(space.shape, 1)
        return space

    def space(self, space_id: bytes, epoch: int) -> SpaceIndex:
        """Return an open space.

        Raises:
            UnknownSpace: nobody has opened it since the daemon started, or ever.
            StaleEpoch: its epoch was bumped.
        """
        if len(space_id) != 32:
            raise InvalidRequest("space", f"id has {len(space_id)} bytes, not 32")
        space = self.index.spaces.get(space_id)
        if space is None:
            raise UnknownSpace(f"space {space_id.hex()[:12]} is unknown: open it")
        if space.epoch != epoch:
            raise StaleEpoch(
                f"space {space_id.hex()[:12]} is at epoch {space.epoch}, not {epoch}: "
                "its earlier blocks are gone"
            )
        return space

    def lookup(self, space: SpaceIndex, keys: Iterable[bytes]) -> tuple[bytes, Miss]:
        """Return the fastest tier (`TierName`) of each block of the leading run; touch nothing."""
        blocks = space.blocks
        tiers = bytearray()
        for key in keys:
            block = blocks.get(key)
            if block is None:
                return bytes(tiers), miss_of(self.index, space, key)
            tiers.append(TierName.DISK if block.host is None else TierName.HOST)
        return bytes(tiers), Miss()

    def acquire(
        self,
        attachment: Attachment,
        space: SpaceIndex,
        lease_id: int,
        keys: Sequence[bytes],
        deadline_seconds: float,
        priority: int = 0,
    ) -> Acquired:
        """Lease a leading run; see `Leases.acquire`."""
        if attachment.state is State.SILENT:
            self.attachments.heard(attachment)
        return self.leases.acquire(attachment, space, lease_id, keys, deadline_seconds, priority)

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
        """Grant up to `count` slots; wait for the first one until the deadline."""
        existing = self.grants.find(owner.id, grant_id)
        if existing is not None:
            return existing.all_slots, Shortage.NONE
        shards = space.shape.shards
        writing = list(writers) or [owner] * shards
        if len(writing) != shards:
            raise InvalidRequest("writers", f"names {len(writing)}, the space has {shards} shards")
        affordable = (self.grant_cap_bytes - owner.granted_bytes) // space.shape.block_bytes
        if self.draining:
            return (), Shortage.DRAINING
        if affordable <= 0:
            return (), Shortage.CLIENT_CAP
        wanted = min(count, affordable)
        slots, shortage = await self._take(space, wanted, deadline_seconds, protect)
        # Anything may have happened meanwhile.
        lost = any(w.state in (State.GONE, State.PRESUMED_DEAD) for w in [owner, *writing])
        if lost or self.index.spaces.get(space.id) is not space:
            for slot in slots:
                self._free_host(slot)
            return (), Shortage.BUSY
        if slots:
            grant = self.grants.add(grant_id, owner.id, space, writing, slots)
            self.grants.own(grant, owner)
        if shortage is Shortage.NONE and wanted < count:
            shortage = Shortage.CLIENT_CAP
        return slots, shortage

    async def _take(
        self, space: SpaceIndex, count: int, deadline_seconds: float, protect: Sequence[bytes]
    ) -> tuple[list[Slot], Shortage]:
        """Take slots, waiting for the first; the protected chains stay."""
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
                self.index.hold_host(block)
            try:
                slots = self.room.take(space.shape, count)
            finally:
                for block in held:
                    self.index.release_host(block)
            if len(slots) == count:
                return slots, Shortage.NONE
            if slots:
                return slots, Shortage.BUSY
            if not self.room.may_come(space.shape):
                return slots, Shortage.NO_ROOM
            if not await self.room.room(min(deadline - loop.time(), 0.5)) and (
                loop.time() >= deadline
            ):
                return slots, Shortage.BUSY

    def commit(
        self,
        writer: Attachment,
        owner_id: int,
        grant_id: int,
        shards: int | None,
        items: Sequence[tuple[Slot, bytes, bytes | None]],
        space: SpaceIndex,
    ) -> list[CommitOutcome]:
        """Commit one writer's shards (bit mask; None: all it writes) of some slots.

        Answers per item also after the space's epoch was bumped, so that the slots come back.
        """
        grant = self.grants.find(owner_id, grant_id)
        if grant is None:
            return [CommitOutcome.UNKNOWN_SLOT] * len(items)
        if grant.space is not space:
            raise InvalidRequest("space", "is not the one that the grant was made for")
        mine = self.grants.shards_of(grant, writer.id)
        wanted = mine if shards is None else shards
        if not wanted or wanted & ~mine:
            raise InvalidRequest("shard", f"attachment {writer.id} does not write it")
        return self.grants.commit(grant, wanted, items)

    def abort(
        self,
        caller: Attachment,
        owner_id: int,
        grant_id: int,
        slots: Sequence[Slot] | None,
        *,
        all_shards: bool,
    ) -> None:
        """Settle slots as not written by the caller, or, for an owner, by anybody."""
        grant = self.grants.find(owner_id, grant_id)
        if grant is None:
            return
        if all_shards and owner_id != caller.id:
            raise InvalidRequest("all_shards", "only the owner of a grant may abort all shards")
        shards = (1 << len(grant.writers)) - 1
        if not all_shards:
            shards = self.grants.shards_of(grant, caller.id)
        self.grants.abort(grant, shards, slots)

    def new_put(self, space: SpaceIndex, slots: Sequence[Slot]) -> Grant:
        """Grant slots to the daemon itself, for bytes that arrive by a stream."""
        self._next_put += 1
        return self.grants.add(self._next_put, 0, space, (), slots)

    async def take_for_put(
        self, space: SpaceIndex, deadline_seconds: float, parent: bytes | None
    ) -> Slot | None:
        """Return one slot for a streamed block; None when there is no room in time."""
        if self.draining:
            return None
        protect = [] if parent is None else [parent]
        slots, _ = await self._take(space, 1, deadline_seconds, protect)
        return slots[0] if slots else None

    def start_read(
        self, space: SpaceIndex, keys: Sequence[bytes], priority: int = 0
    ) -> tuple[list[Block], RunWaiter, Miss]:
        """Begin to read a leading run: hold host copies, promote the others.

        The caller closes the waiter (which lets go of promoted blocks) and calls `end_read` for
        the blocks that were in host from the start, which are those not in `waiter.pending` now.
        """
        run, miss = self.leases.find_run(space, keys)
        self.index.touch(run)
        cold = [b for b in run if b.host is None]
        for block in run:
            block.uses += 1
        waiter = RunWaiter(self.index, cold, hold=True)
        if cold and self.promoter is not None:
            self.promoter.request(cold, waiter, priority)
        return run, waiter, miss

    def hold(self, block: Block) -> None:
        """Keep a host copy in place."""
        self.index.hold_host(block)

    def let_go(self, block: Block) -> None:
        """Undo one `hold`."""
        self.index.release_host(block)
        self.room.signal.notify()

    def end_read(self, waiter: RunWaiter) -> None:
        """Stop waiting and let go of promoted blocks."""
        if waiter.pending and self.promoter is not None:
            self.promoter.cancel(list(waiter.pending), waiter)
        waiter.close()
        self.room.signal.notify()

    async def pin(self, space: SpaceIndex, keys: Sequence[bytes], ttl_seconds: float) -> int:
        """Pin the leading run, durably; return its length."""
        run, _ = self.leases.find_run(space, keys)
        await self.pins.pin(space, run, ttl_seconds)
        return len(run)

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
            blocks = [b for b in map(space.blocks.get, keys) if b is not None]
        tiers = (TierName.HOST, TierName.DISK) if tier is None else (tier,)
        removed = skipped = 0
        for which in tiers:
            host = which is TierName.HOST
            left = [b for b in blocks if (b.host if host else b.disk) is not None]
            while left:
                again: list[Block] = []
                for i, block in enumerate(reversed(left)):
                    if i % _YIELD_BLOCKS == _YIELD_BLOCKS - 1:
                        await asyncio.sleep(0)
                    if block.dead or (block.host if host else block.disk) is None:
                        continue
                    if self.index.evict(block, which):
                        removed += 1
                    else:
                        again.append(block)
                if len(again) == len(left):
                    break
                # Children that went may have been what kept their parents.
                left = again[::-1]
            skipped += len(left)
        self.counters.counts["evicted_by_request"] += removed
        return removed, skipped

    async def bump_epoch(self, space: SpaceIndex) -> int:
        """Make every block of the space unreachable, durably; return the new epoch."""
        epoch = await self._store_thread.run(self.store.bump_epoch, space.id)
        if epoch <= space.epoch:
            return space.epoch  # a concurrent bump did it
        space.epoch = epoch
        self.grants.void(space)
        for attachment in self.attachments.snapshot():
            self.leases.revoke_space(attachment, space)
        self.index.discard_space(space)
        self.pins.forget_space(space)
        return epoch

    async def flush(self, timeout: float) -> tuple[int, list[Block]]:
        """Make everything that is committed now durable on disk.

        Returns:
            how many blocks were not there before, and those that are skipped (no room).

        Raises:
            TimeoutError: not done in time.
        """
        if self.flusher is None:
            return 0, []
        todo = [
            b
            for space in self.index.spaces.values()
            for b in space.blocks.values()
            if b.disk is None
        ]
        skipped = await self.flusher.flush(todo, timeout)
        return len(todo) - len(skipped), skipped

    async def drain(self, timeout: float) -> tuple[bool, int]:
        """Grant nothing more, wait for grants, flush; return whether all is done, grants left."""
        self.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while len(self.grants) and loop.time() < deadline:
            await self.room.room(min(0.2, max(0.0, deadline - loop.time())))
        done = not len(self.grants)
        with contextlib.suppress(TimeoutError):
            await self.flush(max(0.0, deadline - loop.time()))
            return done, len(self.grants)
        return False, len(self.grants)

    def report_usage(self, space_id: bytes, counts: UsageCounts) -> None:
        """Add what a client says it reused."""
        if space_id in self.index.spaces:
            self.usage.setdefault(space_id, UsageCounts()).add(counts)

    def dirty_blocks(self) -> int:
        """Blocks that wait for the disk."""
        return 0 if self.flusher is None else self.flusher.dirty_blocks

    def with_generations(self, slots: Sequence[Slot]) -> GenerationSlots:
        """Return host slots with their generations."""
        return GenerationSlots(slots, self.host.generations(slots))
