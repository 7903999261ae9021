"""Leases: the right of an attached process to read some slots.

A lease holds a leading run of copies in memory in place: on the GPU where the holder can read them
there, else in host. With a deadline it waits for what follows on
disk, and grows in order as blocks land; blocks that land early are held too, so that eviction
cannot take them before their turn. It ends by release, by silence of its holder, or by force
(epoch bump); the holder finds out by comparing generations.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.engine.events import (
    GenerationSlots,
    LeaseDoneEvent,
    LeaseGrownEvent,
    LeasesRevokedEvent,
)
from kvstore.engine.misses import NO_MISS, miss_of
from kvstore.engine.recent import Forecast, RecentAcquire, RecentAcquires
from kvstore.engine.worth import REVIEW_SECONDS
from kvstore.errors import InvalidRequest
from kvstore.miss import Miss, MissReason
from kvstore.tiers.base import TierName
from kvstore.tiers.gpu_slab import FIRST_GPU_GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine.arrivals import Arrivals
    from kvstore.engine.attachments import Attachment
    from kvstore.engine.counters import Counters
    from kvstore.engine.gpu_side import GpuSide
    from kvstore.engine.worth import Pending, Worth
    from kvstore.index import Block, BlockIndex, SpaceIndex
    from kvstore.tiers.base import Slot
    from kvstore.tiers.host import HostTier

__all__ = ["Acquired", "Lease", "Leases"]

# About 1 µs each, and the loop does nothing else meanwhile.
_MOST_BLOCKS: Final = 16_384
_NO_SLOTS: Final = GenerationSlots((), np.empty(0, np.uint64))


@dataclass(frozen=True, slots=True)
class Acquired:
    """Answer to an acquire.

    Attributes:
        blocks: leased now.
        slots: their slots.
        tiers: per block, the tier (`TierName`) that held it when asked.
        growing: more may come by events.
        miss: why the run ends here, when it is not growing.
        present: leading blocks that were in any tier when asked.
    """

    blocks: int
    slots: GenerationSlots
    tiers: bytes
    growing: bool
    miss: Miss
    present: int = 0


@dataclass(eq=False, slots=True)
class Lease:
    """One lease. It is the waiter of its promotions.

    Attributes:
        run: the blocks it covers or waits for, in chain order.
        count: leading blocks that the holder has been told about.
        held: indices of blocks of which it holds a copy: in host, or on the GPU if `on_gpu` has it.
        on_gpu: indices of blocks whose GPU copy it holds.
        where: position of each awaited block in `run`.
        miss: why the run ends after its last block.
        recent: what is remembered of it when it has ended.
        present: leading blocks that were in any tier when asked.
        holding: of the promoter's waiters: it holds what lands.
        pending: what was decided about its wait; None when it did not have to wait.
        review: when that is looked at again.
    """

    id: int
    owner: Leases
    attachment: Attachment
    space: SpaceIndex
    run: list[Block]
    tiers: bytes
    miss: Miss
    recent: RecentAcquire
    present: int
    count: int = 0
    held: set[int] = field(default_factory=set)
    on_gpu: set[int] = field(default_factory=set)
    where: dict[Block, int] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    review: asyncio.TimerHandle | None = None
    pending: Pending | None = None
    ended: bool = False
    holding: bool = True

    @property
    def growing(self) -> bool:
        """Whether it still waits for blocks."""
        return bool(self.where)

    def landed(self, block: Block) -> None:
        """A block that it waits for may be read in host now."""
        self.owner.landed(self, block)

    def failed(self, block: Block, reason: MissReason) -> None:
        """A block that it waits for is not coming."""
        at = self.where.get(block)
        if at is not None:
            self.owner.cut(self, block, Miss(reason, self.tier(at)))

    def tier(self, at: int) -> str:
        """Return the tier that held a block of the run when it was asked for."""
        return TierName(self.tiers[at]).name.lower()


class Leases:
    """All leases."""

    def __init__(
        self,
        index: BlockIndex,
        host: HostTier,
        counters: Counters,
        arrivals: Arrivals,
        worth: Worth,
        *,
        cap_bytes: int,
        on_released: Callable[[], None],
    ) -> None:
        """Compose."""
        self._index = index
        self._host = host
        self._counters = counters
        self.cap_bytes = cap_bytes
        self._on_released = on_released
        self._arrivals = arrivals
        self._worth = worth
        self.count = 0
        self._growing: set[Lease] = set()
        self.recent = RecentAcquires()
        # Set when there is a GPU tier.
        self.gpu: GpuSide | None = None

    @property
    def waiting(self) -> int:
        """How many leases wait for blocks."""
        return len(self._growing)

    def held_waiting(self) -> int:
        """Return how many references are held by leases that still wait for blocks."""
        return sum(len(lease.held) for lease in self._growing)

    def find_run(
        self, space: SpaceIndex, keys: Sequence[bytes], parent: bytes | None = None
    ) -> tuple[list[Block], Miss]:
        """Return the leading run of blocks present in any tier, and why it ends.

        `parent` is that of `SpaceIndex.run`.

        Raises:
            InvalidRequest: a key is named twice: that is no chain.
        """
        if len(set(keys)) != len(keys):
            raise InvalidRequest("keys", "names a key twice")
        run = space.run(keys, parent)
        if len(run) < len(keys):
            return run, miss_of(self._index, space, keys[len(run)])
        return run, NO_MISS

    def acquire(
        self,
        attachment: Attachment,
        space: SpaceIndex,
        lease_id: int,
        keys: Sequence[bytes],
        deadline_seconds: float,
        priority: int,
        prefill_tokens_per_second: float | None = 0.0,
        parent: bytes | None = None,
        request_id: str = "",
        queued_seconds: float = 0.0,
    ) -> Acquired:
        """Lease the leading run in host memory; wait for the rest if there is a deadline.

        What more than `_MOST_BLOCKS` keys name beyond these is left to another lease, as what is
        beyond the client's cap: a lease is made and ended in one slice of the loop.

        Args:
            attachment: of the client.
            space: the keys' space.
            lease_id: chosen by the client.
            keys: a chain.
            deadline_seconds: how long it waits at most; 0: not at all.
            priority: of what it waits for.
            prefill_tokens_per_second: how fast the client computes: it waits only while that is
                predicted to take longer. 0: it waits in any case; None: it does not know, what
                others have reported for the space counts.
            parent: key before the first one; see `SpaceIndex.run`.
            request_id: what the lease is for, in the client's words.
            queued_seconds: for how long waiting costs the client nothing.

        Raises:
            InvalidRequest: as for `find_run`.
        """
        existing = attachment.leases.get(lease_id)
        if existing is not None:
            return self._answer(existing, 0)
        if lease_id in attachment.released_early:
            # Its release has overtaken it: nobody would ever release it again.
            return Acquired(0, _NO_SLOTS, b"", False, Miss(MissReason.LEASE_LOST))
        rate = self._rate(space, len(keys), prefill_tokens_per_second)
        run, miss = self.find_run(space, keys[:_MOST_BLOCKS], parent)
        present = len(run)
        if len(run) == _MOST_BLOCKS < len(keys):
            miss = Miss(MissReason.LEASE_CAP)
        block_bytes = space.shape.block_bytes
        affordable = max(0, (self.cap_bytes - attachment.leased_bytes) // block_bytes)
        if len(run) > affordable:
            del run[affordable:]
            miss = Miss(MissReason.LEASE_CAP)
        gpu = self.gpu is not None and self.gpu.may_read(attachment, space.shape)
        ready = next(
            (i for i, b in enumerate(run) if not (b.readable or (gpu and b.gpu is not None))),
            len(run),
        )
        if ready < len(run) and deadline_seconds <= 0:
            late = run[ready:]
            miss = Miss(MissReason.DEADLINE, "disk" if late[0].host is None else "host")
            self._arrivals.hurry(late)
            del run[ready:]
        pending, forecast, used = None, None, run
        if ready < len(run):
            seconds = 0.0
            if rate > 0:
                seconds = space.spec.block_tokens / rate
            here = [b.host is not None or (gpu and b.gpu is not None) for b in run]
            worth, pending = self._worth.choose(
                run, here, seconds, deadline_seconds, priority, queued_seconds
            )
            if worth < len(run):
                miss = self._worth.declined()
                forecast = self._worth.forecast(run[worth:], here[worth:], seconds, priority)
                run = run[:worth]
        # What is declined is used as well, by computing it.
        self._index.touch(used)
        tiers = bytes(
            TierName.GPU
            if gpu and b.gpu is not None
            else TierName.HOST
            if b.host is not None
            else TierName.DISK
            for b in run
        )
        recent = RecentAcquire(
            request_id, lease_id, attachment, space, len(keys), deadline_seconds, time.time()
        )
        recent.ends(len(run), keys[len(run)] if len(run) < len(keys) else b"", miss, forecast)
        self.recent.add(recent)
        lease = Lease(lease_id, self, attachment, space, run, tiers, miss, recent, present)
        for i, block in enumerate(run):
            block.uses += 1
            if tiers[i] == TierName.GPU:
                self._index.hold_gpu(block)
                lease.held.add(i)
                lease.on_gpu.add(i)
            elif block.readable:
                self._index.hold_host(block)
                lease.held.add(i)
            else:
                lease.where[block] = i
        lease.count = ready
        attachment.leases[lease_id] = lease
        attachment.leased_bytes += len(run) * block_bytes
        self.count += 1
        self._count_hits(space, tiers[:ready])
        if lease.where:
            self._growing.add(lease)
            loop = asyncio.get_running_loop()
            lease.timer = loop.call_later(deadline_seconds, self._expire, lease)
            lease.pending = pending
            if rate > 0:
                lease.review = loop.call_later(REVIEW_SECONDS, self._review, lease)
            deadline = loop.time() + deadline_seconds
            slack = math.inf if pending is None else pending.slack_bytes
            self._arrivals.request(list(lease.where), lease, priority, deadline, slack)
        # What follows the run; what it loses while it grows is counted then.
        self._counters.miss(miss.reason.value, len(keys) - len(run), space.spec.block_tokens)
        return self._answer(lease, 0)

    def _rate(self, space: SpaceIndex, blocks: int, reported: float | None) -> float:
        tokens = blocks * space.spec.block_tokens
        if reported is None:
            return self._worth.speeds.prefill(space.id, tokens)
        if reported:
            self._worth.speeds.computed(space.id, tokens, reported)
        return reported

    def _answer(self, lease: Lease, first: int) -> Acquired:
        return Acquired(
            blocks=lease.count,
            slots=self._slots(lease, first),
            tiers=lease.tiers[first : lease.count],
            growing=lease.growing,
            miss=NO_MISS if lease.growing else lease.miss,
            present=lease.present,
        )

    def _slots(self, lease: Lease, first: int) -> GenerationSlots:
        """Return the slots of a lease's ready blocks from `first` on."""
        slots: list[Slot] = []
        for at in range(first, lease.count):
            block = lease.run[at]
            slot = block.gpu if at in lease.on_gpu else block.host
            assert slot is not None
            slots.append(slot)
        if not lease.on_gpu or self.gpu is None:
            return GenerationSlots(slots, self._host.generations(slots))
        on_gpu = np.fromiter(
            (slot.group >= FIRST_GPU_GROUP for slot in slots), np.bool_, len(slots)
        )
        generations = np.empty(len(slots), np.uint64)
        generations[on_gpu] = self.gpu.tier.generations(
            [slot for slot in slots if slot.group >= FIRST_GPU_GROUP]
        )
        generations[~on_gpu] = self._host.generations(
            [slot for slot in slots if slot.group < FIRST_GPU_GROUP]
        )
        return GenerationSlots(slots, generations)

    def _let_go(self, lease: Lease, at: int) -> None:
        """Release the copy that a lease holds of one of its blocks."""
        if at in lease.on_gpu:
            self._index.release_gpu(lease.run[at])
        else:
            self._index.release_host(lease.run[at])

    def _count_hits(self, space: SpaceIndex, tiers: bytes) -> None:
        counts = self._counters.counts
        for tier in TierName:
            blocks = tiers.count(tier)
            if blocks:
                name = tier.name.lower()
                counts[f"hit_blocks_{name}"] += blocks
                counts[f"hit_tokens_{name}"] += blocks * space.spec.block_tokens

    def landed(self, lease: Lease, block: Block) -> None:
        """Hold a promoted block, and tell the holder if the run got longer."""
        at = lease.where.pop(block, None)
        if at is None or lease.ended:
            return
        self._index.hold_host(block)
        lease.held.add(at)
        first = lease.count
        while lease.count < len(lease.run) and lease.count in lease.held:
            lease.count += 1
        if lease.count > first:
            tiers = lease.tiers[first : lease.count]
            self._count_hits(lease.space, tiers)
            slots = self._slots(lease, first)
            lease.attachment.send(LeaseGrownEvent(lease.id, first, slots, tiers))
        self._finish_if_complete(lease)

    def cut(self, lease: Lease, block: Block, miss: Miss) -> None:
        """End the run before a block that is not coming."""
        at = lease.where.get(block)
        if at is not None and not lease.ended:
            self._truncate(lease, at, miss)
            self._finish_if_complete(lease)

    def _truncate(
        self, lease: Lease, at: int, miss: Miss, forecast: Forecast | None = None
    ) -> None:
        dropped = lease.run[at:]
        if dropped:
            lease.recent.ends(at, dropped[0].key, miss, forecast)
        for i in range(at, len(lease.run)):
            if i in lease.held:
                lease.held.discard(i)
                self._let_go(lease, i)
                lease.on_gpu.discard(i)
        waiting = [b for b in dropped if lease.where.pop(b, None) is not None]
        if waiting:
            self._arrivals.cancel(waiting, lease)
        del lease.run[at:]
        lease.miss = miss
        freed = len(dropped) * lease.space.shape.block_bytes
        lease.attachment.leased_bytes -= freed
        tokens = lease.space.spec.block_tokens
        self._counters.miss(miss.reason.value, len(dropped), tokens)
        self._on_released()

    def _finish_if_complete(self, lease: Lease) -> None:
        if lease.where:
            return
        if lease.pending is not None:
            self._worth.ended(lease.pending, cut=False)
            lease.pending = None
        self._stop_waiting(lease)
        lease.attachment.send(LeaseDoneEvent(lease.id, lease.count, lease.miss))

    def _stop_waiting(self, lease: Lease) -> None:
        self._growing.discard(lease)
        for timer in (lease.timer, lease.review):
            if timer is not None:
                timer.cancel()
        lease.timer = lease.review = None

    def _review(self, lease: Lease) -> None:
        """Look again whether what a lease waits for is worth it."""
        lease.review = None
        if lease.ended or not lease.where or lease.pending is None:
            return
        worth = len(lease.run)
        if not self._worth.as_predicted(lease.pending):
            here = [at in lease.held for at in range(len(lease.run))]
            worth = self._worth.still(lease.pending, lease.run, here, lease)
            shape, pending = lease.space.shape, lease.pending
            self._arrivals.spare(lease, shape, pending.priority, pending.slack_bytes)
        if worth < len(lease.run):
            self._worth.ended(lease.pending, cut=True)
            at, seconds = max(worth, lease.count), lease.pending.block_seconds
            forecast = self._worth.forecast(
                lease.run[at:], here[at:], seconds, lease.pending.priority
            )
            self._worth.given_up(lease.run[at:], seconds)
            # What is left is still looked at: it was chosen as things are now.
            self._truncate(lease, at, self._worth.declined(), forecast)
            self._finish_if_complete(lease)
        if lease.where:
            loop = asyncio.get_running_loop()
            lease.review = loop.call_later(REVIEW_SECONDS, self._review, lease)

    def _expire(self, lease: Lease) -> None:
        """The deadline passed: what has arrived in order is what there is."""
        lease.timer = None
        if not lease.ended and lease.where:
            late = Miss(MissReason.DEADLINE, lease.tier(lease.count))
            self._truncate(lease, lease.count, late)
            self._finish_if_complete(lease)

    def release(self, attachment: Attachment, lease_id: int) -> None:
        """End a lease; unknown ids are late or double releases and change nothing."""
        lease = attachment.leases.pop(lease_id, None)
        if lease is None:
            attachment.released_early.append(lease_id)
            return
        self._end(lease)

    def _end(self, lease: Lease) -> None:
        attachment = lease.attachment
        self._stop_waiting(lease)
        lease.ended = True
        self.count -= 1
        attachment.leased_bytes -= len(lease.run) * lease.space.shape.block_bytes
        if lease.where:
            self._arrivals.cancel(list(lease.where), lease)
        for i in lease.held:
            self._let_go(lease, i)
        if self.gpu is not None:
            self.gpu.lease_ended(lease)
        self._on_released()

    def end_all(self, attachment: Attachment) -> None:
        """End all leases of an attachment, telling it if it still listens."""
        ids = tuple(attachment.leases)
        self._revoke(attachment, ids)

    def revoke_space(self, attachment: Attachment, space: SpaceIndex) -> None:
        """End an attachment's leases on a space whose epoch was bumped."""
        ids = tuple(i for i, lease in attachment.leases.items() if lease.space is space)
        self._revoke(attachment, ids)

    def _revoke(self, attachment: Attachment, ids: tuple[int, ...]) -> None:
        for lease_id in ids:
            lease = attachment.leases.pop(lease_id)
            self._end(lease)
            if not lease.recent.miss:
                lost = Miss(MissReason.LEASE_LOST, unix_seconds=time.time())
                lease.recent.ends(lease.count, lease.recent.key, lost)
        if ids:
            self._counters.counts["leases_revoked"] += len(ids)
            attachment.send(LeasesRevokedEvent(ids))
