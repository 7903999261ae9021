"""A real engine on small tiers, and processes that use it, without the network between them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from engine_invariants import check

from kvstore.engine import Engine
from kvstore.engine.budget import DiskBudget
from kvstore.engine.events import Event, LeaseDoneEvent
from kvstore.engine.host_index import HOST_INDEX_NAME, read_host_index
from kvstore.engine.leases import Acquired
from kvstore.engine.speeds import Speeds
from kvstore.engine.steady_clock import SteadyClock
from kvstore.index import Block, SpaceIndex, SpaceLimits
from kvstore.index.lmdb_store import MetaStore
from kvstore.locks import lock_byte
from kvstore.outcomes import CommitOutcome, Shortage
from kvstore.space import SpaceSpec
from kvstore.tiers.base import Slot
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.gpu import GpuTier
from kvstore.tiers.gpu_device import GpuDevice
from kvstore.tiers.gpu_reader import GpuReader
from kvstore.tiers.gpu_slab import FIRST_GPU_GROUP
from kvstore.tiers.host import HostTier
from kvstore.tiers.io_engine import IoEngine
from kvstore.tiers.simulated_device import SimulatedDevice

SLOT_BYTES = 4096
NEVER = 3600.0

E = TypeVar("E")
Chain = list[bytes]


def chain(name: str, blocks: int) -> Chain:
    """Return keys of a chain; equal names give equal keys."""
    return [hashlib.md5(f"{name}/{i}".encode()).digest() for i in range(blocks)]


def content(key: bytes, shard: int, length: int) -> bytes:
    """Return the bytes that a block's shard must have."""
    seed = key + shard.to_bytes(4, "little")
    return (seed * (length // len(seed) + 1))[:length]


def spec_of(model: str = "m", shards: Sequence[int] = (SLOT_BYTES,)) -> SpaceSpec:
    """Return the spec of a space."""
    return SpaceSpec(model=model, dtype="bfloat16", block_tokens=16, shard_bytes=tuple(shards))


class World:
    """Describes an engine; `run` gives it life for one story."""

    def __init__(
        self,
        directory: Path,
        pools: Path,
        *,
        host_blocks: int = 64,
        disk_blocks: int = 64,
        flush_on_commit: bool = True,
        lease_ttl: float = 10.0,
        lease_cap_blocks: int = 1 << 20,
        grant_cap_blocks: int = 1 << 20,
        block_bytes: int = SLOT_BYTES,
        wrap: Callable[[Any], Any] = lambda disk: disk,
        store_class: type[MetaStore] = MetaStore,
        flush_on_reuse: bool = False,
        budget: Callable[[Path], DiskBudget] | None = None,
        warm_up_blocks: int = 0,
        gpu_blocks: int = 0,
        gpu_devices: Callable[[], Sequence[GpuDevice]] = lambda: [SimulatedDevice()],
        gpu_engine: Callable[[], IoEngine] | None = None,
        default_limits: SpaceLimits | None = None,
        clock: Callable[[], SteadyClock] = lambda: SteadyClock(start=time.time()),
    ) -> None:
        self.directory = directory
        self.pools = pools
        self.host_blocks, self.disk_blocks = host_blocks, disk_blocks
        self.block_bytes = block_bytes
        self.flush_on_commit = flush_on_commit
        self.lease_ttl = lease_ttl
        self.lease_cap = lease_cap_blocks * block_bytes
        self.grant_cap = grant_cap_blocks * block_bytes
        self.wrap = wrap
        self.store_class = store_class
        self.flush_on_reuse = flush_on_reuse
        self.budget = budget
        self.warm_up_blocks = warm_up_blocks
        self.gpu_blocks, self.gpu_devices = gpu_blocks, gpu_devices
        self.gpu_engine = gpu_engine
        self.default_limits, self.clock = default_limits, clock
        self.gpu: GpuTier | None = None
        self.boots = itertools.count()
        self.host_index = directory / "state" / HOST_INDEX_NAME
        # The next boot checks what it adopts only once `may_check` is set.
        self.hold_checks = False
        self.may_check = threading.Event()
        self.players: list[Player] = []
        self.engine: Engine
        self.disk: Any = None
        self.host: HostTier
        self.store: MetaStore
        self.space: SpaceIndex

    def run(self, *stories: Callable[[World], Awaitable[None]], seconds: float = 120.0) -> None:
        """Run stories, each in a boot of its own, one after the other on the same disk."""
        for story in stories:
            asyncio.run(asyncio.wait_for(self._live(story), seconds))

    async def _live(self, story: Callable[[World], Awaitable[None]]) -> None:
        async with self.boot():
            await story(self)
            check(self.engine)

    @asynccontextmanager
    async def boot(self) -> AsyncIterator[None]:
        """Start the engine, and stop it without a flush."""
        await self.start()
        try:
            yield
        finally:
            await self.stop()

    async def start(self) -> None:
        state = self.directory / "state"
        state.mkdir(exist_ok=True)
        store, _ = self.store_class.open_or_reset(state)
        store.mark_open()
        self.store = store
        saved = read_host_index(self.host_index)
        fresh = self.pools / f"{self.directory.name}-{next(self.boots)}"
        pool = fresh if saved is None else saved.pool
        self.gpu = None
        if self.gpu_blocks:
            devices = self.gpu_devices()
            each = self.gpu_blocks * self.block_bytes // len(devices)
            self.gpu = GpuTier(pool, devices, each, min_slab_bytes=self.block_bytes)
        self.host = HostTier(
            pool,
            self.host_blocks * self.block_bytes,
            min_slab_bytes=self.block_bytes,
            pinner=self.gpu,
        )
        self.disk = None
        if self.disk_blocks:
            capacity = self.disk_blocks * self.block_bytes
            self.disk = self.wrap(DiskTier(self.directory / "disk", capacity, threads=2))
        self.engine = Engine(
            self.host,
            self.disk,
            store,
            gpu=self.gpu,
            gpu_reader=self._reader(),
            flush_on_commit=self.flush_on_commit,
            lease_ttl_seconds=self.lease_ttl,
            lease_cap_bytes=self.lease_cap,
            grant_cap_bytes=self.grant_cap,
            flush_on_reuse=self.flush_on_reuse,
            budget=None if self.budget is None else self.budget(state),
            warm_up_bytes=self.warm_up_blocks * self.block_bytes,
            default_limits=self.default_limits,
            clock=self.clock(),
            speeds=Speeds(state / "speeds"),
        )
        self.may_check.clear()
        if self.hold_checks:
            for _ in range(2):  # all threads that could
                self.engine._digest_threads.submit(self.may_check.wait)
        await self.engine.start(saved)
        self.engine.begin(self.host_index)
        self.space = await self.engine.open_space(spec_of())
        if isinstance(self.disk, Gate) and self.engine.promoter is not None:
            # Before a disk was seen at work one read goes alone; here several are let go out of order.
            path = self.engine.promoter.path
            path.end(path.begin(1 << 20, 0.0), 1 << 20, 0.001)

    def _reader(self) -> GpuReader | None:
        if self.gpu is None or self.disk is None or self.gpu_engine is None:
            return None
        return GpuReader(self.disk, self.gpu, self.gpu_engine())

    async def save(self) -> None:
        """Stop as a daemon does on SIGTERM: what `stop` leaves is there for the next boot."""
        await self.engine.quiesce(5, self.host_index, "machine")

    async def stop(self) -> None:
        self.may_check.set()
        await self.engine.close()
        for player in self.players:
            player.drop_lock()
        self.players.clear()
        self.store.mark_clean()
        self.store.close()

    def player(self, name: str = "p") -> Player:
        """Attach another process."""
        player = Player(self, name)
        self.players.append(player)
        return player

    def block(self, key: bytes, space: SpaceIndex | None = None) -> Block:
        return (space or self.space).blocks[key]

    def tiers(self, keys: Sequence[bytes]) -> str:
        """Draw where each block of a chain is: h, d, b (both) or - (nowhere)."""
        drawn = {(False, False): "-", (True, False): "h", (False, True): "d", (True, True): "b"}
        blocks = [self.space.blocks.get(key) for key in keys]
        return "".join(
            "-" if b is None else drawn[(b.host is not None, b.disk is not None)] for b in blocks
        )

    async def settle(self, seconds: float = 60.0) -> None:
        """Wait until nothing moves any more."""
        try:
            await until(lambda: not self._moves(), seconds)
        except AssertionError:
            print(self.describe())
            raise

    def describe(self) -> str:
        """Say what moves."""
        engine = self.engine
        flusher, promoter = engine.flusher, engine.promoter
        lines = [f"host {self.host.usage()} allocating {self.host.allocating}"]
        lines.append(f"digester {engine.digester.busy} promoter {promoter and promoter._moves}")
        if self.disk is not None and flusher is not None:
            lines.append(f"disk {self.disk.usage()} allocating {self.disk.allocating}")
            lines.append(f"{self.disk.segments()} {self.disk.state} held {engine.index.disk_held}")
            lines.append(f"queue {list(flusher._queue)} running {flusher._running}")
            lines.append(f"deletes {flusher._deletes.freeing} writing {flusher._writing}")
            lines.append(f"refused {len(flusher._refused)} hint {engine.index.disk_room_hint}")
            lines += [
                f"room for {s}: {self.disk.room_blocks(s)}" for s in engine.index._host_queues
            ]
        return "\n".join(lines)

    def _moves(self) -> bool:
        engine = self.engine
        flusher, promoter = engine.flusher, engine.promoter
        return bool(
            engine.digester.busy
            or self.host.allocating
            or (self.disk is not None and self.disk.allocating)
            or (flusher is not None and not flusher.idle)
            or (promoter is not None and len(promoter))
            or (engine.gpu_side is not None and engine.gpu_side.busy)
        )

    async def warm(self, blocks: int, space: SpaceIndex | None = None) -> None:
        """Let the pool grow first, so that a grant is not short for want of a moment."""
        self.host.want((space or self.space).shape, blocks)
        await until(lambda: not self.host.allocating)

    async def evict_host(self, keys: Sequence[bytes] | None = None) -> None:
        """Leave blocks on disk only."""
        from kvstore.tiers.base import TierName

        await self.settle()
        await self.engine.removal.evict(self.space, keys, TierName.HOST)

    def slot_bytes(self, slot: Slot, lengths: Sequence[int]) -> Sequence[bytes | memoryview]:
        """Return what a slot of either memory tier holds, one piece a shard."""
        if slot.group < FIRST_GPU_GROUP:
            return self.host.views(slot)
        assert self.gpu is not None
        pieces = []
        for shard, address in enumerate(self.gpu.addresses(slot)):
            piece = np.empty(lengths[shard], np.uint8)
            here, there, size = (
                np.array([n], np.uint64) for n in (piece.ctypes.data, address, len(piece))
            )
            self.gpu.devices[shard % len(self.gpu.devices)].copy(here, there, size)
            pieces.append(piece.tobytes())
        return pieces

    def counts(self, name: str) -> int:
        return self.engine.counters.counts[name]


async def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `what()` is true."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not what():
        assert loop.time() < end, f"still not so after {seconds} s"
        await asyncio.sleep(0.001)


class Player:
    """A client process: its attachment, and a lock on a descriptor of its own."""

    _ids = itertools.count(1)

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.engine = world.engine
        self.attachment = self.engine.attachments.open(name, 1, mapped=True, shards=frozenset())
        self.fd = os.open(self.engine.control.path, os.O_RDWR | os.O_CLOEXEC)
        assert lock_byte(self.fd, self.engine.control.lock_offset(self.attachment.id))
        self.engine.attachments.locked(self.attachment)
        self.heard: list[Event] = []

    def drop_lock(self) -> None:
        """The process is gone: whatever ended it, the kernel drops the lock."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def hang_up(self) -> None:
        """The stream ends without a goodbye."""
        self.engine.attachments.stream_ended(self.attachment)

    def die(self) -> None:
        """Be killed."""
        self.drop_lock()
        self.hang_up()

    def detach(self) -> None:
        """Leave in order."""
        self.engine.attachments.detach(self.attachment)

    def events(self) -> list[Event]:
        """Return everything heard so far."""
        while not self.attachment.outbox.empty():
            event = self.attachment.outbox.get_nowait()
            if event is not None:
                self.heard.append(event)
        return self.heard

    def heard_of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind heard so far."""
        return [event for event in self.events() if isinstance(event, kind)]

    async def lease_done(self, lease_id: int) -> LeaseDoneEvent:
        """Wait for the end of a lease's growth."""

        def done() -> list[LeaseDoneEvent]:
            return [e for e in self.heard_of(LeaseDoneEvent) if e.lease_id == lease_id]

        await until(done)
        [event] = done()
        return event

    async def reserve(
        self,
        count: int,
        *,
        grant_id: int | None = None,
        writers: Sequence[Player] = (),
        deadline: float = 5.0,
        protect: Sequence[bytes] = (),
        space: SpaceIndex | None = None,
    ) -> tuple[int, list[Slot], Shortage]:
        """Return grant id, slots, shortage."""
        grant_id = next(self._ids) if grant_id is None else grant_id
        await self.world.warm(count, space)
        slots, shortage = await self.engine.reservations.reserve(
            self.attachment,
            space or self.world.space,
            grant_id,
            count,
            [w.attachment for w in writers],
            deadline,
            protect,
        )
        return grant_id, list(slots), shortage

    def write(
        self,
        slots: Sequence[Slot],
        keys: Sequence[bytes],
        shards: Sequence[int] | None = None,
        space: SpaceIndex | None = None,
    ) -> None:
        """Copy blocks into granted slots."""
        lengths = (space or self.world.space).spec.shard_bytes
        for slot, key in zip(slots, keys, strict=True):
            for shard, view in enumerate(self.engine.host.views(slot)):
                if shards is None or shard in shards:
                    view[: lengths[shard]] = content(key, shard, lengths[shard])

    def commit(
        self,
        grant_id: int,
        slots: Sequence[Slot],
        keys: Sequence[bytes],
        *,
        parent: bytes | None = None,
        shard: int | None = None,
        owner: Player | None = None,
        space: SpaceIndex | None = None,
    ) -> list[CommitOutcome]:
        """Commit a run of keys."""
        parents = [parent, *keys[:-1]]
        return self.engine.commit(
            self.attachment,
            (owner or self).attachment.id,
            grant_id,
            None if shard is None else 1 << shard,
            list(zip(slots, keys, parents, strict=True)),
            space or self.world.space,
        )

    async def put(
        self,
        keys: Sequence[bytes],
        *,
        at: int = 0,
        step: int = 4,
        deadline: float = 5.0,
        space: SpaceIndex | None = None,
    ) -> int:
        """Store `keys[at:]` of a chain a few at a time; return how many blocks are there now."""
        where = space or self.world.space
        while at < len(keys):
            parent = keys[at - 1] if at else None
            protect = [] if parent is None else [parent]
            grant, slots, shortage = await self.reserve(
                min(step, len(keys) - at), deadline=deadline, protect=protect, space=space
            )
            if not slots:
                print(f"put stopped at {at}: {shortage.name}")
                break
            part = keys[at : at + len(slots)]
            self.write(slots, part, space=space)
            self.commit(grant, slots, part, parent=parent, space=space)
            at += len(part)
        tiers, _ = self.engine.lookup(where, keys)
        return len(tiers)

    def acquire(
        self,
        keys: Sequence[bytes],
        *,
        deadline: float = 0.0,
        lease_id: int | None = None,
        priority: int = 0,
        space: SpaceIndex | None = None,
        rate: float | None = 0.0,
        queued: float = 0.0,
    ) -> tuple[int, Acquired]:
        """Return lease id and answer."""
        lease_id = next(self._ids) if lease_id is None else lease_id
        where = space or self.world.space
        answer = self.engine.acquire(
            self.attachment,
            where,
            lease_id,
            list(keys),
            deadline,
            priority,
            rate,
            queued_seconds=queued,
        )
        return lease_id, answer

    def leased_slots(self, lease_id: int) -> list[Slot]:
        """Return the slots of a lease's ready blocks."""
        lease = self.attachment.leases[lease_id]
        return [
            cast("Slot", block.gpu if at in lease.on_gpu else block.host)
            for at, block in enumerate(lease.run[: lease.count])
        ]

    def sees_gpus(self) -> None:
        """Be able to open every device."""
        assert self.world.gpu is not None
        devices = frozenset(device.uuid for device in self.world.gpu.devices)
        self.engine.attachments.set_devices(self.attachment, devices)

    def release(self, lease_id: int) -> None:
        self.engine.leases.release(self.attachment, lease_id)

    def reads_right(
        self, keys: Sequence[bytes], slots: Sequence[Slot], space: SpaceIndex | None = None
    ) -> bool:
        """Compare what leased slots hold with what it must be."""
        lengths = (space or self.world.space).spec.shard_bytes
        return all(
            bytes(view[: lengths[shard]]) == content(key, shard, lengths[shard])
            for key, slot in zip(keys, slots, strict=False)
            for shard, view in enumerate(self.world.slot_bytes(slot, lengths))
        )

    async def load(self, keys: Sequence[bytes], *, deadline: float = 5.0) -> int:
        """Lease, wait, compare, release; return how many right blocks came."""
        lease_id, answer = self.acquire(keys, deadline=deadline)
        blocks = answer.blocks
        if answer.growing:
            blocks = (await self.lease_done(lease_id)).blocks
        slots = self.leased_slots(lease_id)[:blocks]
        assert self.reads_right(keys[:blocks], slots)
        self.release(lease_id)
        return blocks


class Gate:
    """A disk tier whose reads are let through one by one, by the test's choice."""

    def __init__(self, disk: Any) -> None:
        self.disk = disk
        self.reads: list[tuple[Any, asyncio.Future[None]]] = []
        self.read_slots: list[Slot] = []
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.disk, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("disk", "reads", "read_slots", "closed"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.disk, name, value)

    async def read(self, transfers: Any) -> Any:
        """Wait for the gate, if it is closed; count."""
        self.read_slots += [transfer.slot for transfer in transfers]
        if self.closed:
            pass_ = asyncio.get_running_loop().create_future()
            self.reads.append((transfers, pass_))
            await pass_
        return await self.disk.read(transfers)

    def let(self, at: int) -> None:
        """Let one waiting read through."""
        self.reads.pop(at)[1].set_result(None)

    def open(self) -> Any:
        """Open the tier (`Tier.open`)."""
        return self.disk.open()


def pairs(keys: Sequence[bytes]) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield (key, parent)."""
    for i, key in enumerate(keys):
        yield key, keys[i - 1] if i else None
