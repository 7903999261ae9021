"""What the engine is put together from: its parts, and how they start and end.

Every method runs on the event loop's thread. What is not a coroutine does not wait and is atomic
with respect to everything else.
"""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvstore.engine.adoption import adopt, fitting
from kvstore.engine.afterwards import Afterwards
from kvstore.engine.arrivals import Arrivals
from kvstore.engine.attachments import Attachment, Attachments
from kvstore.engine.counters import Counters, UsageCounts
from kvstore.engine.digester import Digester
from kvstore.engine.disk_shrinker import DiskShrinker
from kvstore.engine.flusher import Flusher
from kvstore.engine.gpu_side import GpuSide
from kvstore.engine.grants import Grants
from kvstore.engine.host_index import remove_host_index
from kvstore.engine.host_shrinker import HostShrinker
from kvstore.engine.hot_prefixes import HotPrefixes
from kvstore.engine.housekeeper import Housekeeper
from kvstore.engine.leases import Leases
from kvstore.engine.limits import Limits
from kvstore.engine.pins import Pins
from kvstore.engine.quarantine import Quarantine
from kvstore.engine.read import Read
from kvstore.engine.recovery import recover_durably
from kvstore.engine.removal import Removal
from kvstore.engine.reservations import Reservations
from kvstore.engine.resizer import Resizer
from kvstore.engine.room import HostRoom
from kvstore.engine.scrubber import Scrubber
from kvstore.engine.store_thread import StoreThread
from kvstore.engine.tickets import Tickets
from kvstore.engine.use_times import UseTimes
from kvstore.engine.verifier import Verifier
from kvstore.engine.warm_up import WarmUp
from kvstore.engine.worth import Worth
from kvstore.index import Block, BlockIndex, Flush, SpaceIndex, SpaceLimits
from kvstore.prefetch.promoter import Promoter
from kvstore.syncpoint import reach
from kvstore.tiers.base import Slot, TierName
from kvstore.tiers.control import ControlFile

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.engine.budget import DiskBudget
    from kvstore.engine.host_index import HostIndex
    from kvstore.engine.recorder import Recorder
    from kvstore.engine.speeds import Speeds
    from kvstore.engine.steady_clock import SteadyClock
    from kvstore.index.lmdb_store import MetaStore
    from kvstore.tiers.disk import DiskTier
    from kvstore.tiers.gpu import GpuTier
    from kvstore.tiers.gpu_reader import GpuReader
    from kvstore.tiers.host import HostTier
    from kvstore.tiers.slab import SlabGroup

__all__ = ["Assembly"]

log = logging.getLogger(__name__)


class Assembly:
    """The parts of one daemon's state.

    Attributes:
        index: blocks and where they are.
        attachments: processes that use the daemon.
        gpu_side: what the GPU tier adds; None without one.
        grants, leases: what they may write and read.
        reservations: who gets slots to write.
        removal: blocks that go other than for room.
        scrubber: checks what is on disk; None without a disk.
        resizer: changes the tiers' capacities.
        budget: limits what is written to disk; None: nothing does.
        limits: quotas of spaces and how long blocks live.
        counters: what happened.
        hot_prefixes: which prompts' beginnings are asked for most.
        usage: what clients report, by space id.
        recorder: writes down what is asked for; None: nobody does.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        store: MetaStore,
        *,
        gpu: GpuTier | None = None,
        gpu_reader: GpuReader | None = None,
        flush_on_commit: bool,
        lease_ttl_seconds: float,
        lease_cap_bytes: int,
        grant_cap_bytes: int,
        flush_on_reuse: bool = False,
        budget: DiskBudget | None = None,
        warm_up_bytes: int = 0,
        default_limits: SpaceLimits | None = None,
        clock: SteadyClock | None = None,
        speeds: Speeds | None = None,
    ) -> None:
        """Compose; `start` opens the tiers.

        Args:
            host: memory pool, not open yet.
            disk: disk tier, not open yet; None: there is none.
            store: open store for spaces, epochs, pins and disk records.
            gpu: GPU tier, not open yet, which pins the host tier's memory; None: there is none.
            gpu_reader: reads from the disk tier to the GPU tier, not open yet.
            flush_on_commit: write policy `through`; else `evict`, unless `flush_on_reuse`.
            lease_ttl_seconds: silence after which a client's leases expire.
            lease_cap_bytes: most that one client may lease.
            grant_cap_bytes: most that one client may be granted.
            flush_on_reuse: write policy `reused`.
            budget: limits what is written to disk; None: nothing does.
            warm_up_bytes: most that is brought from disk to host at the start.
            default_limits: of spaces that have none of their own.
            clock: by which blocks grow old; None: the machine's.
            speeds: what earlier daemons learned; None: nothing.
        """
        self.host = host
        self.disk = disk
        self.gpu = gpu
        self.gpu_reader = gpu_reader
        self.store = store
        self.counters = Counters()
        self.usage: dict[bytes, UsageCounts] = {}
        self.recorder: Recorder | None = None
        self.lease_cap_bytes = lease_cap_bytes
        self._grant_cap_bytes = grant_cap_bytes
        self._caps = (lease_cap_bytes, grant_cap_bytes)
        self._first_host_bytes = host.capacity_bytes
        self._lease_ttl = lease_ttl_seconds
        self._flush_on_commit = flush_on_commit and not flush_on_reuse
        self._flush_on_reuse = flush_on_reuse
        self.budget = budget
        self._warm_up_bytes = warm_up_bytes
        self._warm_up: WarmUp | None = None
        self.afterwards: Afterwards | None = None
        self.index = BlockIndex(self._free_host, self._free_disk)
        self.hot_prefixes = HotPrefixes(self.index)
        self.grants = Grants(self.index, self._free_host, self._committed)
        self._store_thread = StoreThread(store)
        self._digest_threads = ThreadPoolExecutor(2, "digest")
        self.digester = Digester(self.index, host, self._digest_threads, self._notify)
        self.verifier = Verifier(
            self.index, host, self._digest_threads, self.counters, self._notify
        )
        self._arrivals = Arrivals(self.verifier)
        self.worth = Worth(self.counters, speeds)
        self.leases = Leases(
            self.index,
            host,
            self.counters,
            self._arrivals,
            self.worth,
            cap_bytes=lease_cap_bytes,
            on_released=self._notify,
        )
        self.flusher: Flusher | None = None
        self.promoter: Promoter | None = None
        self.scrubber: Scrubber | None = None
        self.gpu_side: GpuSide | None = None
        self.tickets = Tickets(self.index, self.leases, self._arrivals)
        self.limits = Limits(
            self.index,
            self._store_thread,
            self.counters,
            UseTimes(self.index, clock),
            default_limits or SpaceLimits(),
        )
        self.pins = Pins(self.index, self._store_thread, self.limits.times)
        self._housekeeper = Housekeeper(
            self.index, self.pins, self.tickets, self.limits, self.worth
        )
        self._reads: set[Read] = set()
        self.recovered_blocks = 0
        self.adopted_blocks = 0

    async def start(self, saved: HostIndex | None = None) -> None:
        """Open the tiers, recover the disk's index, adopt the host's, begin to serve.

        Args:
            saved: what an earlier daemon left in the host tier's directory. Nothing takes a host
                slot then before `begin`.

        Raises:
            ConfigError: a tier cannot be opened; nothing is left open.
        """
        async with contextlib.AsyncExitStack() as opened:
            opened.callback(self._shut_threads)
            if self.gpu is not None:
                # Before the host tier, whose memory it pins.
                await self.gpu.open()
                opened.push_async_callback(self.gpu.close)
            if saved is None:
                await self.host.open()
            else:
                saved = fitting(saved, self.host.usage().capacity_bytes)
                await self.host.open_kept(saved.groups, saved.last_group)
                reach("adoption.mapped")
            opened.push_async_callback(self.host.close)
            self._compose()
            opened.callback(self.control.close)
            for record in self.store.spaces():
                space = SpaceIndex(record.spec.fingerprint, record.spec, record.epoch)
                self.index.spaces[space.id] = space
            if self.disk is not None:
                await self.disk.open()
                opened.push_async_callback(self.disk.close)
                self.recovered_blocks = await recover_durably(
                    self.index, self.disk, self.store, self.counters
                )
                self._compose_disk(self.disk)
                if self.gpu_reader is not None and self.gpu_side is not None:
                    assert self.promoter is not None
                    await self.gpu_reader.open()
                    opened.push_async_callback(self.gpu_reader.close)
                    self.gpu_side.add_disk(
                        self.gpu_reader,
                        self.promoter,
                        self._arrivals.request,
                        self.removal.corrupt,
                    )
            if saved is not None:
                self._adopt(saved)
            self.limits.restore()
            self.pins.restore()  # by the time that limits know
            opened.pop_all()
        if self.flusher is not None and self.promoter is not None:
            self.flusher.start()
            self.promoter.start()
        if self.gpu_side is not None:
            self.gpu_side.start()
        self.digester.start()
        self.verifier.start()
        self.quarantine.start()
        self.attachments.start()
        self._housekeeper.start()
        self.limits.start()

    def begin(self, host_index: Path) -> None:
        """Invalidate the saved host index: from here on slots may be granted.

        Raises:
            OSError: it may be there still; nothing is granted.
        """
        reach("adoption.adopted")
        remove_host_index(host_index)
        reach("adoption.invalidated")
        if self.host.keep:
            self.host.remove_strays()
        self.room.closed = False
        self.resizer.start()
        if self.afterwards is not None:
            self.afterwards.start()
        if self._warm_up_bytes and self.promoter is not None:
            self._warm_up = WarmUp(
                self.index, self.host, self.promoter, self.counters, self._warm_up_bytes
            )
            self._warm_up.start()

    def _adopt(self, saved: HostIndex) -> None:
        """Take in what an earlier daemon left in memory."""
        self.room.closed = True
        self.control.skip_to(saved.last_attachment)
        adopted = adopt(self.index, self.host, saved)
        for group in self.host.groups():
            self.attachments.announce(group)
        self.quarantine.add(adopted.busy)
        self.verifier.add(adopted.blocks)
        self.adopted_blocks = len(adopted.blocks)
        self.counters.counts["adopted_blocks"] = len(adopted.blocks)
        self.counters.counts["adoption_dropped_blocks"] = adopted.dropped
        log.info(
            "adopted %d blocks in host memory, %d could not be",
            len(adopted.blocks),
            adopted.dropped,
        )
        if self.flusher is not None and self._flush_on_commit:
            for block in adopted.blocks:
                if block.disk is None:
                    self.flusher.committed(block)

    def _compose(self) -> None:
        """Put together what needs the pool's directory."""
        self.control = ControlFile(self.host.directory)
        self.attachments = Attachments(
            self.control,
            lease_ttl_seconds=self._lease_ttl,
            on_silent=self.leases.end_all,
            on_gone=self._gone,
        )
        self.room = HostRoom(self.host, self.index, self.counters, self.attachments)
        self.room.held = self._may_let_go
        self.quarantine = Quarantine(self.control, self._free_host)
        self.reservations = Reservations(
            self.index, self.grants, self.room, self.counters, cap_bytes=self._grant_cap_bytes
        )
        self.limits.shrink[TierName.HOST] = self.room.evict_own
        self.removal = Removal(
            self.index,
            self._store_thread,
            self.attachments,
            self.grants,
            self.leases,
            self.pins,
            self.counters,
        )
        self.resizer = Resizer(
            self.index,
            self.host,
            HostShrinker(self.host, self.index, self.room),
            self._host_resized,
        )
        self.verifier.on_damaged = self.removal.corrupt_in_host
        if self.gpu is not None:
            self.gpu_side = GpuSide(
                self.gpu,
                self.host,
                self.room,
                self.index,
                self.attachments,
                self.counters,
                loading=self._loading,
                on_released=self._notify,
            )
            self.leases.gpu = self.tickets.gpu = self.gpu_side
            self.limits.shrink[TierName.GPU] = self.gpu_side.room.evict_own
        self.host.on_group = self._new_group
        self.host.on_no_room = self._notify

    def _compose_disk(self, disk: DiskTier) -> None:
        self.flusher = Flusher(
            self.index,
            self.host,
            disk,
            self._store_thread,
            self.digester,
            self.verifier,
            self.counters,
            self.room.made,
            self.budget,
        )
        self.promoter = Promoter(
            self.index, disk, self.room, on_corrupt=self.removal.corrupt, on_read=self._read
        )
        self.room.add_disk(
            self.flusher,
            flush_on_evict=not (self._flush_on_commit or self._flush_on_reuse),
            flush_on_reuse=self._flush_on_reuse,
        )
        self.removal.flusher = self.flusher
        self._arrivals.promoter = self.promoter
        self.afterwards = Afterwards(
            self.index,
            self.room,
            self.promoter,
            self.counters,
            budget_bytes=lambda: self.host.capacity_bytes // 4,
            waiting=lambda: self.leases.waiting,
            stalled=self.worth.stalled_seconds,
        )
        self.worth.add_disk(disk.store_id, self.promoter, self.afterwards)
        self.limits.shrink[TierName.DISK] = self.flusher.room.evict_own
        self.limits.on_room = self._disk_resized
        self._housekeeper.disk = disk
        self._housekeeper.flusher = self.flusher
        self.scrubber = Scrubber(
            self.index,
            self.host,
            disk,
            self.removal,
            self.counters,
            self._digest_threads,
            busy=self._disk_is_busy,
            on_released=self._released,
        )

        shrinker = DiskShrinker(disk, self.index, self.flusher, self.removal, self.counters)
        self.resizer.add_disk(disk, shrinker, self._disk_resized)

    def _host_resized(self) -> None:
        """Caps of clients shrink with the pool, and grow back with it."""
        part = min(1.0, self.host.capacity_bytes / self._first_host_bytes)
        self.lease_cap_bytes = int(self._caps[0] * part)
        self.leases.cap_bytes = self.lease_cap_bytes
        self.reservations.cap_bytes = int(self._caps[1] * part)
        self._notify()

    def _disk_resized(self) -> None:
        """What was refused for want of room may have some now."""
        self.index.disk_room_hint = True
        self._released()

    def _disk_is_busy(self) -> bool:
        """Return whether loads or flushes need the disk now."""
        assert self.promoter is not None
        assert self.flusher is not None
        direct = self.gpu_side is not None and self.gpu_side.busy
        return bool(len(self.promoter)) or self.flusher.busy or direct

    def _loading(self) -> bool:
        """Return whether clients load now, or wait for it."""
        return bool(self.leases.count or (self.promoter is not None and len(self.promoter)))

    def _released(self) -> None:
        """Copies that were only looked at may leave again."""
        self._notify()
        if self.flusher is not None:
            self.flusher.wake()

    async def _stop_upkeep(self) -> None:
        """Break off what goes on besides serving."""
        upkeep = (self.limits, self.resizer, self._warm_up, self.afterwards, self.scrubber)
        for part in upkeep:
            if part is not None:
                await part.stop()

    async def farewell(self, reason: str) -> None:
        """Tell the clients that this boot ends; their streams end with it."""
        await self._housekeeper.stop()
        await self.attachments.stop(reason)

    async def close(self) -> None:
        """Close everything, after `farewell` if there was time for it."""
        await self.farewell("closed")
        await self._stop_upkeep()
        await self.removal.stop()
        await self.digester.stop()
        if self.gpu_side is not None:
            await self.gpu_side.stop()
        if self.gpu_reader is not None:
            await self.gpu_reader.close()
        if self.promoter is not None:
            await self.promoter.stop()
        await self._housekeeper.save_touches()
        await self._housekeeper.save_speeds()
        if self.flusher is not None:
            await self.flusher.stop()
        await self.verifier.stop()
        await self.quarantine.stop()
        if self.disk is not None:
            await self.disk.close()
        self._shut_threads()
        self.control.close()
        await self.host.close()
        if self.gpu is not None:
            await self.gpu.close()

    def _shut_threads(self) -> None:
        self._store_thread.close()
        self._digest_threads.shutdown()

    def _notify(self) -> None:
        self.room.signal.notify()

    def _may_let_go(self, promoting: bool) -> bool:
        """Return whether host slots are in use that may come back; see `HostRoom.held`."""
        # Whoever holds a GPU copy keeps the last other one of its block as well.
        held = self.index.host_held + self.index.gpu_held
        if promoting:
            held -= self.leases.held_waiting() + sum(read.held_waiting for read in self._reads)
        moving = self.promoter is not None and self.promoter.moving
        return bool(self.grants.slot_count or len(self.quarantine) or held or moving)

    def _free_host(self, slot: Slot) -> None:
        self.room.free(slot)

    def _free_disk(self, block: Block, slot: Slot) -> None:
        assert self.flusher is not None
        self.flusher.deleted(block, slot)

    def _new_group(self, group: SlabGroup) -> None:
        self.attachments.announce(group)
        self._notify()

    def _committed(self, block: Block) -> None:
        """A block got its host copy from a client."""
        self.counters.counts["stored_blocks"] += 1
        if block.space.own is not None:
            self._notify()  # its slot counts as granted no more: others may be
        if self.flusher is not None and self._flush_on_commit:
            self.flusher.committed(block)
        if block.flush is not Flush.QUEUED:
            self.digester.add(block)

    def _read(self, blocks: int, seconds: float) -> None:
        self.counters.counts["promoted_blocks"] += blocks
        self.counters.record("promote_batch", seconds)
        self._notify()
        if self.flusher is not None:
            self.flusher.wake()

    def _gone(self, attachment: Attachment) -> None:
        self.leases.end_all(attachment)
        self.grants.gone(attachment)
        self.room.unmapped(attachment.id)
