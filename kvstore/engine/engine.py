"""The engine: what callers ask of index, tiers, grants, leases and movers. Knows no gRPC.

Every method runs on the event loop's thread. What is not a coroutine does not wait and is atomic
with respect to everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from kvstore.engine.adoption import snapshot
from kvstore.engine.assembly import Assembly
from kvstore.engine.attachments import Attachment, State
from kvstore.engine.counters import UsageCounts
from kvstore.engine.events import GenerationSlots
from kvstore.engine.host_index import encode, write_host_index
from kvstore.engine.leases import Acquired
from kvstore.engine.misses import miss_of
from kvstore.engine.read import Read
from kvstore.errors import InvalidRequest, StaleEpoch, UnknownSpace
from kvstore.index import Block, Pressure, SpaceIndex
from kvstore.miss import Miss
from kvstore.outcomes import CommitOutcome
from kvstore.syncpoint import reach
from kvstore.tiers.base import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.engine.recorder import Recorder
    from kvstore.engine.room import Made
    from kvstore.space import BlockShape, SpaceSpec

__all__ = ["Engine"]

log = logging.getLogger(__name__)


# Of the pool, what is taken from the system when a space is opened.
_FIRST_PART: Final = 8


class Engine(Assembly):
    """One daemon's state, and the calls on it."""

    async def open_space(self, spec: SpaceSpec) -> SpaceIndex:
        """Return the space of a spec; a new one is durable before this returns.

        Raises:
            InvalidRequest: no block of this size fits the host pool.
        """
        space_id = spec.fingerprint
        space = self.index.spaces.get(space_id)
        self._check_fits(spec.shape)
        if space is None:
            record = await self._store_thread.run(self.store.put_space, spec)
            # Another call may have been faster while this one waited.
            space = self.index.spaces.get(space_id)
            if space is None:
                space = self.index.spaces[space_id] = SpaceIndex(space_id, spec, record.epoch)
                self.limits.adopt(space)
        # The first prompts come soon, and faster than memory is taken from the system.
        capacity = self.host.capacity_bytes
        begin = min(capacity // _FIRST_PART // space.shape.block_bytes, space.host_quota)
        if not self.room.closed:
            self.host.want(space.shape, max(1, begin))
        return space

    def make_room(self, shape: BlockShape) -> Made:
        """Have the host pool's memory made for blocks of a shape; see `HostRoom.make`.

        Raises:
            InvalidRequest: no block of this size fits the host pool.
        """
        self._check_fits(shape)
        return self.room.make(shape)

    def _check_fits(self, shape: BlockShape) -> None:
        capacity = self.host.capacity_bytes
        if shape.block_bytes > capacity:
            raise InvalidRequest(
                "shard_bytes",
                f"a block takes {shape.block_bytes} bytes, the host pool has {capacity}",
            )

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

    def record(self, recorder: Recorder) -> None:
        """Have what is asked for and stored from now on written down."""
        self.recorder = recorder
        self.grants.on_run = recorder.store

    def lookup(
        self, space: SpaceIndex, keys: Sequence[bytes], parent: bytes | None = None
    ) -> tuple[bytes, Miss]:
        """Return the fastest tier (`TierName`) of each block of the leading run; touch nothing."""
        if self.recorder is not None:
            self.recorder.look(space, keys, parent)
        run = space.run(keys, parent)
        tiers = bytes(block.fastest_tier for block in run)
        complete = len(run) == len(keys)
        return tiers, Miss() if complete else miss_of(self.index, space, keys[len(run)])

    def acquire(
        self,
        attachment: Attachment,
        space: SpaceIndex,
        lease_id: int,
        keys: Sequence[bytes],
        deadline_seconds: float,
        priority: int = 0,
        prefill_tokens_per_second: float | None = 0.0,
        parent: bytes | None = None,
        request_id: str = "",
        queued_seconds: float = 0.0,
    ) -> Acquired:
        """Lease a leading run; see `Leases.acquire`."""
        if attachment.state is State.SILENT:
            self.attachments.heard(attachment)
        # Asked for again, because the answer was lost: it is the same use.
        first = lease_id not in attachment.leases
        if self.recorder is not None and first:
            self.recorder.load(space, keys, parent)
        answer = self.leases.acquire(
            attachment,
            space,
            lease_id,
            keys,
            deadline_seconds,
            priority,
            prefill_tokens_per_second,
            parent,
            request_id,
            queued_seconds,
        )
        lease = attachment.leases.get(lease_id)
        if lease is not None and first:
            self._used_again(space, lease.run, keys)
        return answer

    def _used_again(self, space: SpaceIndex, run: Sequence[Block], keys: Sequence[bytes]) -> None:
        """Count a use; under `reused`, what was stored once and is asked for goes to disk."""
        self.hot_prefixes.used(space, run, keys)
        if self._flush_on_reuse and self.flusher is not None:
            self.flusher.reused(run)

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

    def start_read(
        self, space: SpaceIndex, keys: Sequence[bytes], parent: bytes | None = None
    ) -> Read:
        """Begin to read a leading run; the caller closes it.

        Raises:
            InvalidRequest: a key is named twice.
        """
        run, miss = self.leases.find_run(space, keys, parent)
        if self.recorder is not None:
            self.recorder.load(space, keys, parent)
        self.index.touch(run)
        for block in run:
            block.uses += 1
        self._used_again(space, run, keys)
        read = Read(self.index, self._arrivals, run, miss, self._let_go)
        self._reads.add(read)
        return read

    def _let_go(self, read: Read) -> None:
        if read.closed:
            self._reads.discard(read)
        self._notify()

    async def pin(
        self, space: SpaceIndex, keys: Sequence[bytes], ttl_seconds: float, owner: str = ""
    ) -> int:
        """Pin the leading run, durably; return its length."""
        run, _ = self.leases.find_run(space, keys)
        return await self.pins.pin(space, run, ttl_seconds, owner)

    async def flush(self, timeout: float, *, unused: bool = True) -> tuple[int, list[Block]]:
        """Make everything that is committed now durable on disk.

        Args:
            timeout: seconds.
            unused: also, under `reused`, what nobody has used again.

        Returns:
            how many blocks were not there before and are now, and those that are skipped (no
                room, or the disk fails).

        Raises:
            TimeoutError: not done in time.
        """
        if self.flusher is None:
            return 0, []
        todo = [
            b
            for space in self.index.spaces.values()
            for b in space.blocks.values()
            if b.disk is None and (unused or b.uses or not self._flush_on_reuse)
        ]
        skipped = await self.flusher.flush(todo, timeout)
        return sum(b.disk is not None for b in todo), skipped

    def skip_reason(self, block: Block) -> str:
        """Why a flush skips a block now."""
        well = self.disk is None or (self.disk.state == "ok" and not self._index_fails)
        over = self.flusher is not None and self.flusher.over_budget
        if well and not over and block.space.disk_room <= 0:
            return str(Pressure.QUOTA)
        return self.why_skipped

    @property
    def _index_fails(self) -> bool:
        return self.flusher is not None and bool(self.flusher.index_problem)

    @property
    def disk_state(self) -> str:
        """The disk tier's state, which is no better than its index's; empty without one."""
        state = "" if self.disk is None else self.disk.state
        if state == "ok" and self.flusher is not None and self.flusher.index_problem:
            return f"degraded: the index cannot be committed: {self.flusher.index_problem}"
        return state

    @property
    def why_skipped(self) -> str:
        """Why a flush skips blocks now."""
        if self.disk is None:
            return "this daemon has no disk tier"
        if self.disk.state != "ok":
            return self.disk.state
        if self.flusher is not None and self.flusher.index_problem:
            return f"the index cannot be committed: {self.flusher.index_problem}"
        over = self.flusher is not None and self.flusher.over_budget
        return "the disk budget of 24 hours is spent" if over else "no room on disk"

    async def drain(self, timeout: float) -> tuple[bool, int, list[Block]]:
        """Grant nothing more, wait for grants, flush.

        Returns:
            whether all is done, grants left, and blocks that are not on disk.
        """
        self.reservations.closed = True
        log.info("drain: nothing more is stored until the next start")
        if self.afterwards is not None:
            await self.afterwards.stop()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while len(self.grants) and loop.time() < deadline:
            await self.room.room(min(0.2, max(0.0, deadline - loop.time())))
        done = not len(self.grants)
        with contextlib.suppress(TimeoutError):
            _, skipped = await self.flush(max(0.0, deadline - loop.time()))
            return done, len(self.grants), self.without_disk() or skipped
        return False, len(self.grants), []

    def without_disk(self) -> list[Block]:
        """Return every block of a daemon without a disk tier, none of another."""
        if self.disk is not None:
            return []
        return [block for space in self.index.spaces.values() for block in space.blocks.values()]

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

    async def quiesce(
        self, timeout: float, host_index: Path | None = None, machine: str = ""
    ) -> None:
        """Before a stop: grant nothing more, save the host index, flush what there is time for.

        Args:
            timeout: for all of it, seconds.
            host_index: file to save the host's index to, so that its slabs are kept; None: they
                are removed.
            machine: id of the kernel's boot.
        """
        self.reservations.closed = True
        self.room.closed = True
        self.host.stop_growing()
        deadline = asyncio.get_running_loop().time() + timeout
        await self._stop_upkeep()
        if host_index is not None:
            try:
                await self._save_host(host_index, machine, timeout)
            except (OSError, ValueError) as error:
                log.warning("stop: the host index is not saved: %s", error)
        try:
            left = deadline - asyncio.get_running_loop().time()
            _, skipped = await self.flush(max(0.0, left), unused=False)
            if skipped:
                log.warning("stop: %d blocks are not on disk (%s)", len(skipped), self.why_skipped)
        except TimeoutError:
            log.warning("stop: the flush did not finish within %.1f s", timeout)
            if self.flusher is not None:
                self.flusher.writer.give_up()

    async def _save_host(self, path: Path, machine: str, timeout: float) -> None:
        """Save the host index and see to it that the slabs stay.

        Raises:
            OSError, ValueError: it is not saved.
        """
        blocks = [b for space in self.index.spaces.values() for b in space.blocks.values()]
        await self.digester.complete([b for b in blocks if b.digests is None], timeout)
        saved = snapshot(self.index, self.host, self.grants, self.quarantine, self.control, machine)
        if not saved.blocks and not saved.busy:
            return
        await asyncio.to_thread(lambda: write_host_index(path, encode(saved)))
        reach("host_index.saved")
        self.host.keep = True
        log.info("saved the index of %d blocks in host memory", saved.blocks)
