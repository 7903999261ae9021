"""Clients, operators and faults at the same time, each call broken off anywhere: nothing wrong, nothing left."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest
from engine_invariants import check
from engine_world import SLOT_BYTES, Player, World, chain, spec_of, until
from unmapping_clients import unmapping

from kvstore.engine.attachments import State
from kvstore.errors import KVStoreError
from kvstore.index import Block, SpaceIndex
from kvstore.tiers.base import Slot, TierName
from kvstore.tiers.faulty import Fault, FaultKind, Faulty

Make = Callable[..., World]
Operation = Callable[[random.Random], Awaitable[object]]

WORKERS, CALLS = 6, 40


def bytes_of(key: bytes, epoch: int, shard: int, length: int) -> bytes:
    """Return what a block's shard holds that was computed in an epoch."""
    seed = hashlib.md5(key + bytes([epoch % 256, shard])).digest()
    return (seed * (length // len(seed) + 1))[:length]


class Crowd:
    """Calls that go on at once in one boot."""

    def __init__(self, world: World, seed: int, spaces: Sequence[SpaceIndex]) -> None:
        self.world, self.engine = world, world.engine
        self.seed = seed
        self.spaces = spaces
        self.players = [world.player(f"p{n}") for n in range(3)]
        self.operations: list[tuple[Operation, int]] = [
            (self.put, 14),
            (self.load, 16),
            (self.stream, 6),
            (self.prefetch, 6),
            (self.evict, 5),
            (self.pin, 3),
            (self.unpin, 3),
            (self.limit, 3),
            (self.flush, 2),
            (self.bump, 1),
            (self.save_order, 2),
            (self.resize, 2),
            (self.fault, 2),
            (self.believe, 2),
            (self.leave, 1),
        ]

    def keys(self, draw: random.Random) -> list[bytes]:
        """Return a chain's beginning; some chains share theirs."""
        name = draw.randrange(6)
        keys = chain(f"{name}", 8)
        if name >= 4:
            keys[:3] = chain(f"{name - 4}", 3)
        return keys[: draw.randrange(1, 9)]

    async def put(self, draw: random.Random) -> None:
        player, space, keys = draw.choice(self.players), draw.choice(self.spaces), self.keys(draw)
        at = 0
        while at < len(keys):
            epoch, grant = space.epoch, next(Player._ids)
            slots, _ = await self.engine.reservations.reserve(
                player.attachment,
                space,
                grant,
                min(draw.randrange(1, 5), len(keys) - at),
                [],
                draw.choice([0.0, 0.02, 0.2]),
                keys[at - 1 : at] if at else [],
            )
            if not slots:
                return
            try:
                await asyncio.sleep(draw.choice([0.0, 0.0, 0.01]))
                part = keys[at : at + len(slots)]
                if player.attachment.state is State.GONE:
                    return
                for slot, key in zip(slots, part, strict=True):
                    self._write(space, slot, key, epoch)
                parents = [keys[at - 1] if at else None, *part[:-1]]
                self.engine.commit(
                    player.attachment,
                    player.attachment.id,
                    grant,
                    None,
                    list(zip(slots, part, parents, strict=True)),
                    space,
                )
            finally:
                if player.attachment.state is not State.GONE:
                    self.engine.abort(
                        player.attachment, player.attachment.id, grant, None, all_shards=True
                    )
            at += len(slots)

    def _write(self, space: SpaceIndex, slot: Slot, key: bytes, epoch: int) -> None:
        for shard, view in enumerate(self.world.host.views(slot)):
            length = space.spec.shard_bytes[shard]
            view[:length] = bytes_of(key, epoch, shard, length)

    def _right(self, space: SpaceIndex, epoch: int, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.host is not None
            for shard, view in enumerate(self.world.host.views(block.host)):
                length = space.spec.shard_bytes[shard]
                assert bytes(view[:length]) == bytes_of(block.key, epoch, shard, length)

    async def load(self, draw: random.Random) -> None:
        player, space = draw.choice(self.players), draw.choice(self.spaces)
        epoch = space.epoch
        lease_id, _ = player.acquire(
            self.keys(draw),
            deadline=draw.choice([0.0, 0.01, 0.3]),
            priority=draw.choice([0, 0, -2, 3]),
            space=space,
            rate=draw.choice([0.0, None, 16 / 1e-4, 16 / 0.01, 1.6]),
        )
        leases = player.attachment.leases
        try:
            for _ in range(draw.randrange(1, 20)):
                lease = leases.get(lease_id)
                if lease is None:
                    return  # taken back
                self._right(space, epoch, lease.run[: lease.count])
                await asyncio.sleep(0.003)
        finally:
            if player.attachment.state is not State.GONE:
                self.engine.leases.release(player.attachment, lease_id)

    async def stream(self, draw: random.Random) -> None:
        space = draw.choice(self.spaces)
        epoch = space.epoch
        read = self.engine.start_read(space, self.keys(draw))
        try:
            for at, block in enumerate(read.run):
                if await read.wait(at, draw.choice([0.01, 0.2])):
                    break
                if space.epoch == epoch:
                    self._right(space, epoch, [block])
                await asyncio.sleep(draw.choice([0.0, 0.003]))
                read.let_go(at)
        finally:
            read.close()

    async def prefetch(self, draw: random.Random) -> None:
        ticket, tickets = draw.randrange(1, 6), self.engine.tickets
        space, deadline = draw.choice(self.spaces), draw.choice([0.05, 0.5, 0.0])
        priority, wait = draw.choice([0, -1, 2]), draw.choice([0.0, 0.01, 0.1])
        await tickets.prefetch(space, self.keys(draw), ticket, deadline, priority, wait)
        if draw.random() < 0.4:
            tickets.cancel(ticket)

    async def evict(self, draw: random.Random) -> None:
        tier = draw.choice([None, TierName.HOST, TierName.DISK])
        keys = draw.choice([None, self.keys(draw)])
        await self.engine.removal.evict(draw.choice(self.spaces), keys, tier)

    async def pin(self, draw: random.Random) -> None:
        owner = draw.choice(["", "a", "b"])
        await self.engine.pin(draw.choice(self.spaces), self.keys(draw)[:3], 60.0, owner)

    async def unpin(self, draw: random.Random) -> None:
        owner = draw.choice([None, None, "", "a"])
        await self.engine.pins.unpin(draw.choice(self.spaces), None, owner)

    async def limit(self, draw: random.Random) -> None:
        space, name = draw.choice(self.spaces), draw.choice(["host_bytes", "disk_bytes"])
        blocks = draw.choice([None, None, 0, 1, 3, 6, 12])
        changes = {} if blocks is None else {name: blocks * space.shape.block_bytes}
        await self.engine.limits.change(space, changes, [] if changes else [name])

    async def flush(self, draw: random.Random) -> None:
        await self.engine.flush(draw.choice([0.01, 1.0]))

    async def bump(self, draw: random.Random) -> None:
        await self.engine.removal.bump_epoch(draw.choice(self.spaces))

    async def save_order(self, draw: random.Random) -> None:
        await self.engine._housekeeper.save_touches()

    async def resize(self, draw: random.Random) -> None:
        tier, part = draw.choice([TierName.HOST, TierName.DISK]), draw.choice([0.5, 0.7, 1.0, 1.0])
        most = self.world.host_blocks if tier is TierName.HOST else self.world.disk_blocks
        blocks = max(3, int(most * part))
        await self.engine.resizer.resize(tier, blocks * SLOT_BYTES, draw.choice([0.0, 0.1]))

    async def fault(self, draw: random.Random) -> None:
        operation, disk = draw.choice(["read", "read", "write", "sync"]), self.world.disk
        kind = draw.choice([FaultKind.IO_ERROR, FaultKind.UNAVAILABLE])
        call, block = disk.calls.get(operation, 0), draw.choice([0, 1, None])
        disk.plan[:] = [Fault(kind, operation, call=call, block=block)]

    async def believe(self, draw: random.Random) -> None:
        assert self.engine.promoter is not None
        self.engine.promoter.path.recall(draw.choice([1e5, 1e7, 1e9]), 0.0)

    async def leave(self, draw: random.Random) -> None:
        who = draw.randrange(len(self.players))
        gone, self.players[who] = self.players[who], self.world.player(f"p{who}")
        if draw.random() < 0.5:
            gone.die()
        else:
            gone.detach()
            gone.drop_lock()

    async def call(self, draw: random.Random) -> None:
        """Do something, and perhaps not to its end."""
        operations, weights = zip(*self.operations, strict=True)
        [operation] = draw.choices(operations, weights)
        call = asyncio.ensure_future(operation(draw))
        if draw.random() < 0.25:
            await asyncio.wait({call}, timeout=draw.random() * 0.02)
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
            call.cancel()
        async with asyncio.timeout(60):
            await asyncio.wait({call})
        wrong = None if call.cancelled() else call.exception()
        if wrong is not None and not isinstance(wrong, KVStoreError | TimeoutError):
            raise wrong
        check(self.engine)

    async def worker(self, number: int) -> None:
        draw = random.Random(100 * self.seed + number)
        for _ in range(CALLS):
            await self.call(draw)

    async def unmap(self) -> None:
        """Do what every client's process does by itself."""
        while True:
            await asyncio.sleep(0.002)
            for player in self.players:
                self.engine.attachments.heard(player.attachment)
                self.engine.room.unmapped(player.attachment.id, list(self.engine.room.retiring))

    async def quiet(self) -> None:
        """Wait until nothing goes on any more that was begun."""
        self.world.disk.plan.clear()
        for ticket in range(1, 6):
            self.engine.tickets.cancel(ticket)
        for space in self.spaces:
            await self.engine.pins.unpin(space, None)
            await self.engine.limits.change(space, {}, ["host_bytes", "disk_bytes"])
        for part in (self.engine.afterwards, self.engine._warm_up):
            if part is not None:
                await part.stop()
        await until(lambda: all(task.done() for task in self.engine.resizer._tasks.values()))
        await self.world.settle()
        await until(lambda: not self.engine.room.retiring)


async def _read_back(player: Player, last: Block) -> None:
    """Load a chain up to a block and compare all of it."""
    world, space, run = player.world, last.space, [last]
    while run[-1].parent is not None:
        run.append(run[-1].parent)
    keys = [block.key for block in reversed(run)]
    lease, answer = player.acquire(keys, deadline=60.0, space=space)
    blocks = (await player.lease_done(lease)).blocks if answer.growing else answer.blocks
    assert blocks == len(keys)
    for slot, key in zip(player.leased_slots(lease), keys, strict=True):
        for shard, view in enumerate(world.host.views(slot)):
            length = space.spec.shard_bytes[shard]
            assert bytes(view[:length]) == bytes_of(key, space.epoch, shard, length)
    player.release(lease)


@pytest.mark.parametrize("seed", range(4))
def test_everything_at_once(make_world: Make, seed: int) -> None:
    on_disk: dict[tuple[bytes, bytes], Slot] = {}

    async def story(world: World) -> None:
        spaces = [world.space, await world.engine.open_space(spec_of("two", (4096, 4096)))]
        crowd = Crowd(world, seed, spaces)
        unmapping = asyncio.create_task(crowd.unmap())
        try:
            async with asyncio.TaskGroup() as workers:
                for number in range(WORKERS):
                    workers.create_task(crowd.worker(number))
            await crowd.quiet()
        finally:
            unmapping.cancel()
        engine = world.engine
        check(engine, quiet=True)
        assert engine.promoter is not None
        left = (engine.leases.count, len(engine.grants), len(engine._reads), len(engine.tickets))
        assert left == (0, 0, 0, 0)
        assert (engine.promoter.jobs, engine.promoter.moving) == (0, 0)
        assert not any(block.pinned_until for s in spaces for block in s.blocks.values())
        assert world.store.pins() == []
        for space in spaces:
            for block in space.blocks.values():
                if block.disk is not None:
                    on_disk[space.id, block.key] = block.disk
        records = world.store.load_blocks(world.disk.store_id).records
        assert {(r.space_id, r.key): (r.segment, r.slot) for r in records} == on_disk

    async def next_boot(world: World) -> None:
        spaces = {s.id: s for s in world.engine.index.spaces.values()}
        there = {
            (space.id, block.key): block.disk
            for space in spaces.values()
            for block in space.blocks.values()
        }
        assert there == on_disk
        player = world.player()
        async with unmapping(world, player):
            for space in spaces.values():
                for block in list(space.blocks.values()):
                    await _read_back(player, block)

    draw = random.Random(seed)
    policy = draw.choice(["through", "through", "reused", "evict"])
    world = make_world(
        host_blocks=draw.choice([12, 24, 40]),
        disk_blocks=draw.choice([8, 16, 40]),
        flush_on_commit=policy == "through",
        flush_on_reuse=policy == "reused",
        warm_up_blocks=draw.choice([0, 8]),
        wrap=Faulty,
    )
    world.run(story, next_boot, seconds=300.0)
