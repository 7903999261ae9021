"""One life of the engine, from its start to its violent end, in a process of its own.

The life starts the engine as a daemon does, compares what it finds with what the oracle says must
be there, and then works: stores, loads, evicts, flushes, pins, bumps epochs, resizes, restarts in
order. It says on a pipe what was acknowledged to it, and what it is about to take away.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import hashlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from crash_oracle import NO, YES, Oracle
from engine_world import Player, World, until

from kvstore import syncpoint
from kvstore.config import pool_prefix
from kvstore.engine import Engine
from kvstore.engine.audit import audit
from kvstore.engine.budget import DiskBudget
from kvstore.engine.events import SlabRetireEvent
from kvstore.engine.host_index import HOST_INDEX_NAME
from kvstore.errors import KVStoreError, StaleEpoch
from kvstore.index import Block, SpaceIndex
from kvstore.index.lmdb_store import MetaStore
from kvstore.server.kept_pool import find_kept_pool
from kvstore.space import SpaceSpec
from kvstore.tiers.base import Slot, TierName
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.io_engine import IoEngine
from kvstore.tiers.pool_directory import remove_stale_pools

__all__ = ["SHARED_MEMORY", "THEMES", "Task", "live"]

SHARED_MEMORY: Final = Path("/dev/shm")
# Deadlines of what takes milliseconds: a machine that is busy must not fail a test.
PATIENCE_SECONDS: Final = 60.0
# What an audit says of a segment whose header was damaged: it is left alone.
STRANGE_FILE: Final = "is no segment's file"
HANG_SECONDS: Final = 150.0
# What is pinned may keep a tier from becoming smaller.
SHRINK_SECONDS: Final = 1.0

KIB: Final = 1 << 10
HOST_BYTES: Final = 384 * KIB
DISK_BYTES: Final = 768 * KIB
DISK_SIZES: Final = (384 * KIB, 576 * KIB, DISK_BYTES)
HOST_SIZES: Final = (192 * KIB, HOST_BYTES)
CHAINS: Final = 9
CHAIN_BLOCKS: Final = 8
# Chains in groups of three begin with the same blocks.
SHARED_BLOCKS: Final = 3
ROUNDS: Final = 10
# Whose pins: nobody's in particular, and two sessions', which expire long after any test.
OWNERS: Final = ("", "session-a", "session-b")
PIN_SECONDS: Final = 36_000.0
# Of a space, on disk; None: no quota.
QUOTA_BLOCKS: Final = (None, None, 0, 6, 12, 24)

SPECS: Final = {
    "small": SpaceSpec(model="small", dtype="bfloat16", block_tokens=16, shard_bytes=(4096,)),
    "large": SpaceSpec(model="large", dtype="bfloat16", block_tokens=16, shard_bytes=(8192, 8100)),
}


def chain_of(space: str, number: int) -> list[bytes]:
    """Return the keys of a chain: the same in every life, whatever the epoch."""
    first = number // 3 * 3
    heads = [(first if i < SHARED_BLOCKS else number, i) for i in range(CHAIN_BLOCKS)]
    return [hashlib.md5(f"{space}/{n}/{i}".encode()).digest() for n, i in heads]


def content(key: bytes, shard: int, length: int, epoch: int) -> bytes:
    """Return what a block's shard holds: other bytes in every epoch."""
    seed = hashlib.sha256(key + bytes([shard]) + epoch.to_bytes(8, "little")).digest()
    return (seed * (length // len(seed) + 1))[:length]


class Writer(Player):
    """A client whose bytes say which epoch they are of."""

    def write(
        self,
        slots: Sequence[Slot],
        keys: Sequence[bytes],
        shards: Sequence[int] | None = None,
        space: SpaceIndex | None = None,
    ) -> None:
        assert space is not None
        for slot, key in zip(slots, keys, strict=True):
            for shard, view in enumerate(self.engine.host.views(slot)):
                length = space.spec.shard_bytes[shard]
                view[:length] = content(key, shard, length, space.epoch)

    def right(self, block: Block) -> bool:
        """Compare a block in host memory with what it must be."""
        lengths, epoch = block.space.spec.shard_bytes, block.space.epoch
        assert block.host is not None
        return all(
            bytes(view[: lengths[shard]]) == content(block.key, shard, lengths[shard], epoch)
            for shard, view in enumerate(self.engine.host.views(block.host))
        )


@dataclass
class Task:
    """What a life is to do.

    Attributes:
        directory: with the state and disk directories.
        machine: id of the kernel's boot.
        seed: of everything that is left to chance in it.
        oracle: what it must find.
        theme: what it does first.
        point: where it stops, to be killed; empty: nowhere.
        hit: the how manyth time.
        damaged: something was damaged since the last life: blocks may be gone, logs may say so.
        scarred: something was damaged before: files that are not ours any more may lie around.
        works: whether it does more than start and compare.
        stops: it stops in order when it is done.
        prepare: called first, in the new process.
    """

    directory: Path
    machine: str
    seed: str
    oracle: Oracle
    theme: str = ""
    point: str = ""
    hit: int = 1
    damaged: bool = False
    scarred: bool = False
    works: bool = True
    stops: bool = False
    prepare: list[Callable[[Life], None]] = field(default_factory=list)


class Life(World):
    """An engine on the task's directories, composed as a daemon composes it."""

    def __init__(self, task: Task, pipe: int) -> None:
        super().__init__(task.directory, SHARED_MEMORY)
        self.task = task
        self.pipe = pipe
        self.random = random.Random(task.seed)
        self.oracle = task.oracle
        self.state = task.directory / "state"
        self.spaces: dict[str, SpaceIndex] = {}
        self.names: dict[bytes, str] = {spec.fingerprint: n for n, spec in SPECS.items()}
        self.hits = 0
        # Of the disk tier; None: the real one.
        self.io_engine: Callable[[], IoEngine] | None = None
        self.damaged = task.damaged

    def tell(self, *event: Any) -> None:
        """Say something to whoever watches, and keep it in mind."""
        os.write(self.pipe, json.dumps(event).encode() + b"\n")
        self.oracle.apply(event)

    def problem(self, kind: str, text: str) -> None:
        self.tell("problem", kind, text)

    def stop_here(self) -> None:
        """Somewhere between two steps: say so, and wait for the end."""
        self.hits += 1
        if self.hits < self.task.hit:
            return
        self.tell("point", self.task.point)
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    async def start(self) -> None:
        """Start as `kvstore.server.daemon.serve` does."""
        self.state.mkdir(exist_ok=True, parents=True)
        self.store, note = MetaStore.open_or_reset(self.state)
        if note is not None and not self.damaged:
            self.problem("lost", f"the index lost something: {note}")
        self.store.mark_open()
        host_index = self.state / HOST_INDEX_NAME
        prefix = pool_prefix(self.state)
        saved = find_kept_pool(self.state, SHARED_MEMORY, prefix, self.task.machine, discard=False)
        fresh = SHARED_MEMORY / f"{prefix}{os.urandom(6).hex()}"
        pool = fresh if saved is None else saved.pool
        remove_stale_pools(SHARED_MEMORY, prefix, pool)
        self.host = HostTier(pool, HOST_BYTES, min_slab_bytes=64 * KIB)
        engine = None if self.io_engine is None else self.io_engine()
        self.disk = DiskTier(self.directory / "disk", DISK_BYTES, threads=2, engine=engine)
        self.engine = Engine(
            self.host,
            self.disk,
            self.store,
            flush_on_commit=self.random.random() < 0.8,
            lease_ttl_seconds=10 * PATIENCE_SECONDS,
            lease_cap_bytes=HOST_BYTES,
            grant_cap_bytes=HOST_BYTES,
            budget=DiskBudget(self.state / "disk-budget", 1 << 40),
        )
        await self.engine.start(saved)
        flusher = self.engine.flusher
        assert flusher is not None
        deleted = flusher.deleted

        def announced(block: Block, slot: Slot) -> None:
            # Before its record can be deleted, and without a wait between.
            self.tell("gone", self.names[block.space.id], block.key.hex())
            deleted(block, slot)

        setattr(flusher, "deleted", announced)  # noqa: B010 - a method, to be wrapped
        self.engine.begin(host_index)
        for name, spec in SPECS.items():
            self.spaces[name] = await self.engine.open_space(spec)
        self.client = Writer(self, "crash")
        self._unmapping = asyncio.create_task(self.unmap(self.client))

    async def restart(self) -> None:
        """Stop in order, and start again."""
        await self.end()
        await self.start()
        await self.check()

    async def end(self) -> None:
        """Stop in order."""
        await self.engine.quiesce(PATIENCE_SECONDS, self.state / HOST_INDEX_NAME, self.task.machine)
        self._unmapping.cancel()
        await asyncio.gather(self._unmapping, return_exceptions=True)
        await self.engine.close()
        self.client.drop_lock()
        self.store.mark_clean()
        self.store.close()

    async def unmap(self, client: Writer) -> None:
        """Let go of slabs when asked to, as every client does."""
        known = 0
        while True:
            for event in client.events()[known:]:
                known += 1
                if isinstance(event, SlabRetireEvent):
                    self.engine.room.unmapped(client.attachment.id, event.groups)
            await asyncio.sleep(0.002)

    async def warm(self, blocks: int, space: SpaceIndex | None = None) -> None:
        """A grant may be short."""

    async def check(self) -> None:
        """Compare what is there with what must be."""
        self.check_epochs()
        await self.settle(PATIENCE_SECONDS)
        for name, space in self.spaces.items():
            self.check_pins(name, space)
            limits = self.oracle.limits.get(name)
            if limits is not None and limits != list(space.limits.values()):
                self.problem("lost", f"the limits {limits} of {name}: {space.limits}")
        served = must = 0
        for name, space in self.spaces.items():
            right = set()
            for number in range(CHAINS):
                right |= {key.hex() for key in await self.load(name, chain_of(name, number))}
            served += len(right)
            must += len(self.oracle.durable[name])
            # What left for others meanwhile was announced.
            for key in self.oracle.durable[name].keys() - right:
                self.problem("lost", f"block {key} of {name}, epoch {space.epoch}")
        await self.look_at_books()
        for name, space in self.spaces.items():
            self.tell("opened", name, space.epoch)
        self.tell("checked", served, must)
        self.damaged = False

    def check_pins(self, name: str, space: SpaceIndex) -> None:
        for pinned, value in list(self.oracle.pins[name].items()):
            key, _, owner = pinned.partition("/")
            block = space.blocks.get(bytes.fromhex(key))
            owners = self.engine.pins.owners(space.id, bytes.fromhex(key))
            if block is None:
                # A pin goes with its block; it was in memory only, perhaps.
                self.tell("pinning", name, [pinned])
            elif value == YES and not (block.pinned_until and owner in owners):
                self.problem("lost", f"the pin of {pinned} in {name}")
            elif value == NO and owner in owners:
                self.problem("lost", f"the unpinning of {pinned} in {name}")
            elif bool(owners) != bool(block.pinned_until):
                self.problem("lost", f"{block} is pinned by {owners}")

    def check_epochs(self) -> None:
        for name, space in self.spaces.items():
            least = self.oracle.epochs.get(name, 1)
            most = least + self.oracle.bumping[name]
            if not least <= space.epoch <= most and not (self.damaged and space.epoch >= least):
                self.problem("epoch", f"{name} is at {space.epoch}, was at {least} to {most}")

    async def look_at_books(self) -> None:
        """Audit, and count what must not happen without damage."""
        await self.engine.resizer.break_off()
        await self.settle(PATIENCE_SECONDS)
        for line in await audit(self.engine):
            if not (self.task.scarred and line.endswith(STRANGE_FILE)):
                self.problem("leak", line)
        corrupt = self.counts("corrupt_blocks")
        if corrupt and not self.damaged:
            self.problem("lost", f"{corrupt} blocks do not match their digests")

    async def load(self, name: str, keys: Sequence[bytes]) -> list[bytes]:
        """Lease a chain, from disk if need be; return the keys of what came, all of it right."""
        space = self.spaces[name]
        lease_id, _ = self.client.acquire(keys, deadline=PATIENCE_SECONDS, space=space)
        leases = self.client.attachment.leases
        lease = leases.get(lease_id)
        if lease is None:
            return []  # nothing to lease
        # It ends early when its space is bumped.
        await until(lambda: lease_id not in leases or not lease.growing, PATIENCE_SECONDS + 30.0)
        if lease_id not in leases:
            return []
        run = lease.run[: lease.count]
        for block in run:
            if not self.client.right(block):
                self.problem("wrong", f"{block} of {name}, epoch {space.epoch}")
        self.client.release(lease_id)
        return [block.key for block in run]

    async def work(self) -> None:
        """Do the theme's steps, then others, until somebody ends it."""
        for step in THEMES.get(self.task.theme, ()):
            await step(self)
        for _ in range(ROUNDS):
            if self.random.random() < 0.08:
                await self.restart()
                continue
            steps = self.random.choices(STEPS, weights=WEIGHTS, k=3)
            await asyncio.gather(*(step(self) for step in steps))
        await self.look_at_books()

    def any_chain(self) -> tuple[str, list[bytes]]:
        name = self.random.choice(list(SPECS))
        keys = chain_of(name, self.random.randrange(CHAINS))
        return name, keys[: self.random.randint(1, CHAIN_BLOCKS)]

    async def put_chain(self, name: str, keys: Sequence[bytes]) -> None:
        space = self.spaces[name]
        there, _ = self.engine.lookup(space, keys)
        with contextlib.suppress(StaleEpoch):
            await self.client.put(keys, at=len(there), deadline=0.05, space=space)

    async def put(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            await self.put_chain(*self.any_chain())

    async def fill(self) -> None:
        """Store much, so that there is something to evict, to move and to lose."""
        for name in SPECS:
            for number in self.random.sample(range(CHAINS), 5):
                await self.put_chain(name, chain_of(name, number))

    async def read(self) -> None:
        await self.load(*self.any_chain())

    async def flush(self) -> None:
        epochs = {name: space.epoch for name, space in self.spaces.items()}
        todo = [b for space in self.spaces.values() for b in space.blocks.values()]
        await self.engine.flush(PATIENCE_SECONDS)
        for name, space in self.spaces.items():
            mine = [b for b in todo if b.space is space and b.disk is not None and not b.dead]
            if space.epoch == epochs[name]:
                self.tell("flushed", name, space.epoch, [b.key.hex() for b in mine])

    async def evict(self) -> None:
        name, keys = self.any_chain()
        tier = self.random.choice([None, TierName.HOST, TierName.DISK])
        await self.engine.removal.evict(self.spaces[name], keys, tier)

    async def cool(self) -> None:
        """Leave what is on disk there, and nothing of it in host."""
        for space in self.spaces.values():
            await self.engine.removal.evict(space, None, TierName.HOST)

    async def bump(self) -> None:
        name = self.random.choice(list(SPECS))
        self.tell("bumping", name)
        epoch = await self.engine.removal.bump_epoch(self.spaces[name])
        self.tell("epoch", name, epoch)

    async def pin(self) -> None:
        name, keys = self.any_chain()
        owner = self.random.choice(OWNERS)
        names = [f"{key.hex()}/{owner}" for key in keys]
        space, epoch = self.spaces[name], self.spaces[name].epoch
        self.tell("pinning", name, names)
        if self.random.random() < 0.7:
            count = await self.engine.pin(space, keys, PIN_SECONDS if owner else 0.0, owner)
            if space.epoch == epoch:
                pinned = zip(names[:count], keys[:count], strict=True)
                self.tell("pinned", name, [n for n, key in pinned if key in space.blocks])
        else:
            await self.engine.pins.unpin(space, keys, owner)
            self.tell("unpinned", name, names)

    async def limit(self) -> None:
        """Set, or clear, what a space may take on disk and how long unused blocks stay."""
        name = self.random.choice(list(SPECS))
        space = self.spaces[name]
        changes: dict[str, int] = {}
        size = self.random.choice(QUOTA_BLOCKS)
        if size is not None:
            changes["disk_bytes"] = size * space.shape.block_bytes
        if self.random.random() < 0.5:
            changes["ttl_ms"] = round(PIN_SECONDS * 1e3)
        cleared = {"disk_bytes", "ttl_ms"} - set(changes)
        self.tell("limiting", name)
        await self.engine.limits.change(space, changes, cleared)
        self.tell("limited", name, list(space.limits.values()))

    async def unpin(self) -> None:
        """Let everything go again: what is pinned for ever takes the room of others."""
        for name, space in self.spaces.items():
            keys = [f"{key.hex()}/{owner}" for key in space.blocks for owner in OWNERS]
            self.tell("pinning", name, keys)
            await self.engine.pins.unpin(space, None)
            self.tell("unpinned", name, keys)

    async def resize(self) -> None:
        if self.random.random() < 0.7:
            tier, size = TierName.DISK, self.random.choice(DISK_SIZES)
        else:
            tier, size = TierName.HOST, self.random.choice(HOST_SIZES)
        await self.engine.resizer.resize(tier, size, 0.2)

    async def shrink(self) -> None:
        await self.engine.resizer.resize(TierName.DISK, DISK_SIZES[0], SHRINK_SECONDS)

    async def grow(self) -> None:
        await self.engine.resizer.resize(TierName.DISK, DISK_SIZES[-1], SHRINK_SECONDS)


Step = Callable[[Life], Coroutine[Any, Any, None]]

STEPS: Final[list[Step]] = [
    Life.put,
    Life.fill,
    Life.read,
    Life.flush,
    Life.evict,
    Life.bump,
    Life.pin,
    Life.unpin,
    Life.resize,
    Life.limit,
]
WEIGHTS: Final = [30, 10, 10, 25, 12, 3, 6, 2, 4, 3]
THEMES: Final[dict[str, list[Step]]] = {
    "start": [],
    "flush": [Life.fill, Life.flush],
    "grow": [Life.fill, Life.flush, Life.shrink, Life.grow, Life.fill, Life.fill, Life.flush],
    "read": [Life.fill, Life.flush, Life.cool, *(8 * [Life.read])],
    "shrink": [Life.fill, Life.flush, Life.shrink],
    "bump": [Life.fill, Life.flush, Life.bump],
    "pin": [Life.fill, Life.flush, Life.pin, Life.pin, Life.pin],
    "limit": [Life.fill, Life.flush, Life.limit, Life.limit, Life.fill, Life.limit],
    "restart": [Life.fill, Life.flush, Life.restart],
}


def _say_what_waits(life: Life) -> None:
    print(life.describe(), file=sys.stderr)
    for waiting in asyncio.all_tasks():
        waiting.print_stack(file=sys.stderr)


async def _live(life: Life) -> None:
    asyncio.get_running_loop().call_later(HANG_SECONDS, _say_what_waits, life)
    try:
        await life.start()
    except (KVStoreError, OSError) as error:
        if not life.damaged:
            raise
        # As the daemon: one line, and it is over.
        life.tell("refused", str(error))
        os._exit(0)
    life.tell("started")
    await life.check()
    if life.task.point and life.task.theme != "start":
        syncpoint.arm(life.task.point, life.stop_here)
    if life.task.works:
        await life.work()
        if not life.task.stops:
            life.tell("idle")
            await asyncio.sleep(PATIENCE_SECONDS)
    await life.end()


def live(task: Task, pipe: int) -> None:
    """Live, in a process that was forked for it; the end is somebody else's, or an exit code."""
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    # What hangs is to say where.
    faulthandler.dump_traceback_later(HANG_SECONDS)
    life = Life(task, pipe)
    for prepare in task.prepare:
        prepare(life)
    if task.point and task.theme == "start":
        syncpoint.arm(task.point, life.stop_here)
    asyncio.run(_live(life))
    life.tell("ended")
