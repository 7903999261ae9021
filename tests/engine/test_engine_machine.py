"""A small engine under every kind of use at once, checked from scratch after each step."""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_invariants import check
from engine_world import Player, World, chain, spec_of, until
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.index import SpaceIndex
from kvstore.tiers.base import Slot, TierName
from kvstore.tiers.faulty import Fault, FaultKind, Faulty

ROOT = Path("/dev/shm")
HOST, DISK = 12, 16

chains = st.integers(0, 3)
lengths = st.integers(1, 6)


def inside(method: Callable[..., None]) -> Callable[..., None]:
    """Run a rule on the loop's thread while it runs, as everything in the engine expects."""

    @functools.wraps(method)
    def on_loop(self: EngineMachine, *args: Any, **kwargs: Any) -> None:
        async def call() -> None:
            method(self, *args, **kwargs)

        self.run(call())

    return on_loop


class EngineMachine(RuleBasedStateMachine):
    """Rules are what clients and operators do; the engine's own tasks run in between."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore-machine-", dir=ROOT))
        self.pools = self.directory / "pools"
        self.pools.mkdir()
        self.world: World
        self.players: list[Player] = []
        self.spaces: list[SpaceIndex] = []
        self.leases: list[tuple[Player, int]] = []
        # Granted and not settled: (owner, writers, grant, slots, keys, parent, space).
        self.open: list[tuple[Player, list[Player], int, list[Slot], list[bytes], Any, Any]] = []

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 20))

    @initialize(through=st.booleans())
    def start(self, through: bool) -> None:
        self.world = World(
            self.directory,
            self.pools,
            host_blocks=HOST,
            disk_blocks=DISK,
            flush_on_commit=through,
            wrap=Faulty,
        )
        self.run(self._start())

    async def _start(self) -> None:
        await self.world.start()
        self.world.engine.host.want(self.world.space.shape, HOST)
        two = await self.world.engine.open_space(spec_of("two", (4096, 4096)))
        self.spaces = [self.world.space, two]
        self.players = [self.player(n) for n in range(2)]

    def player(self, who: int) -> Player:
        return self.world.player(f"p{who}")

    def keys(self, name: int, length: int, space: SpaceIndex) -> list[bytes]:
        # Chains 2 and 3 share their first two blocks with 0 and 1.
        own = chain(f"{name}", length)
        return [*chain(f"{name - 2}", 2), *own[2:]][:length] if name >= 2 else own

    @rule(who=st.integers(0, 1), name=chains, length=lengths, wide=st.booleans())
    def put(self, who: int, name: int, length: int, wide: bool) -> None:
        space = self.spaces[wide]
        keys = self.keys(name, length, space)
        self.run(self.players[who].put(keys, step=2, deadline=0.02, space=space))

    @rule(who=st.integers(0, 1), name=chains, length=lengths, both=st.booleans())
    def reserve(self, who: int, name: int, length: int, both: bool) -> None:
        space = self.spaces[both]
        owner = self.players[who]
        writers = self.players[:2] if both else [owner]
        keys = self.keys(name, length, space)
        grant, slots, _ = self.run(
            owner.reserve(length, writers=writers, deadline=0, protect=keys[:1], space=space)
        )
        if slots:
            entry = (owner, writers, grant, slots, keys[: len(slots)], None, space)
            self.open.append(entry)

    # What is there to choose from depends on time: nothing may be drawn by it.
    @rule(which=st.integers(0, 7), shard=st.integers(0, 1), whole=st.booleans())
    @inside
    def commit(self, which: int, shard: int, whole: bool) -> None:
        if not self.open:
            return
        owner, writers, grant, slots, keys, parent, space = self.open[which % len(self.open)]
        writer = writers[shard % len(writers)]
        part = slice(None) if whole else slice(0, 1)
        only = None if len(writers) == 1 else shard
        writer.write(slots[part], keys[part], None if only is None else [only], space)
        writer.commit(
            grant, slots[part], keys[part], parent=parent, shard=only, owner=owner, space=space
        )
        self.forget_settled()

    @rule(which=st.integers(0, 7), everything=st.booleans())
    @inside
    def abort(self, which: int, everything: bool) -> None:
        if not self.open:
            return
        owner, writers, grant, slots, *_ = self.open[which % len(self.open)]
        self.world.engine.abort(
            owner.attachment if everything else writers[-1].attachment,
            owner.attachment.id,
            grant,
            None if everything else slots[:1],
            all_shards=everything,
        )
        self.forget_settled()

    def forget_settled(self) -> None:
        find = self.world.engine.grants.find
        self.open = [
            (owner, writers, grant, list(found.slots), keys[: len(found.slots)], parent, space)
            for owner, writers, grant, _, keys, parent, space in self.open
            if (found := find(owner.attachment.id, grant)) is not None
        ]

    @rule(
        who=st.integers(0, 1), name=chains, length=lengths, wide=st.booleans(), wait=st.booleans()
    )
    @inside
    def acquire(self, who: int, name: int, length: int, wide: bool, wait: bool) -> None:
        space = self.spaces[wide]
        player = self.players[who]
        keys = self.keys(name, length, space)
        lease, answer = player.acquire(keys, deadline=0.05 if wait else 0.0, space=space)
        assert player.reads_right(keys, answer.slots.slots, space)
        self.leases.append((player, lease))

    @rule(which=st.integers(0, 7))
    @inside
    def read_and_release(self, which: int) -> None:
        if not self.leases:
            return
        player, lease_id = self.leases.pop(which % len(self.leases))
        lease = player.attachment.leases.get(lease_id)
        if lease is not None:
            run = lease.run[: lease.count]
            slots = player.leased_slots(lease_id)
            assert player.reads_right([b.key for b in run], slots, lease.space)
        player.release(lease_id)

    @rule(name=chains, length=lengths, wide=st.booleans())
    def prefetch(self, name: int, length: int, wide: bool) -> None:
        space = self.spaces[wide]
        keys = self.keys(name, length, space)
        self.run(self.world.engine.tickets.prefetch(space, keys, 1 + name, 0.05, 0, 0.01))

    @rule(name=chains, length=lengths, wide=st.booleans())
    def stream(self, name: int, length: int, wide: bool) -> None:
        async def read() -> None:
            space = self.spaces[wide]
            keys = self.keys(name, length, space)
            reading = self.world.engine.start_read(space, keys)
            for at, block in enumerate(reading.run):
                if await reading.wait(at, 0.05):
                    break
                assert block.host is not None
                assert self.players[0].reads_right([block.key], [block.host], space)
                reading.let_go(at)
            reading.close()

        self.run(read())

    @rule(
        name=chains,
        wide=st.booleans(),
        tier=st.sampled_from([None, *TierName]),
    )
    def evict(self, name: int, wide: bool, tier: TierName | None) -> None:
        space = self.spaces[wide]
        self.run(self.world.engine.removal.evict(space, self.keys(name, 6, space), tier))

    @rule(name=chains, length=lengths, wide=st.booleans(), owner=st.sampled_from(["", "a", "b"]))
    def pin(self, name: int, length: int, wide: bool, owner: str) -> None:
        space = self.spaces[wide]
        seconds = 3600.0 if owner else 0.0
        keys = self.keys(name, length, space)
        self.run(self.world.engine.pin(space, keys, seconds, owner))

    @rule(wide=st.booleans(), owner=st.sampled_from([None, "", "a"]))
    def unpin(self, wide: bool, owner: str | None) -> None:
        self.run(self.world.engine.pins.unpin(self.spaces[wide], None, owner))

    @rule(
        wide=st.booleans(),
        tier=st.sampled_from([TierName.HOST, TierName.DISK]),
        blocks=st.sampled_from([None, None, 0, 1, 3, 6]),
    )
    def limit(self, wide: bool, tier: TierName, blocks: int | None) -> None:
        space, name = self.spaces[wide], f"{tier.name.lower()}_bytes"
        changes = {} if blocks is None else {name: blocks * space.shape.block_bytes}
        self.run(self.world.engine.limits.change(space, changes, [] if changes else [name]))

    @rule(wide=st.booleans())
    def expire(self, wide: bool) -> None:
        async def nobody_uses_it() -> None:
            limits, space = self.world.engine.limits, self.spaces[wide]
            await limits.change(space, {"ttl_ms": 1})
            limits.times.mark(apart=0.0)
            await asyncio.sleep(0.003)
            await limits._keep()
            assert space.own is not None
            assert not any(len(queue) and queue.peek() for queue in space.own.values())
            await limits.change(space, {}, ["ttl_ms"])

        self.run(nobody_uses_it())

    @rule()
    def flush(self) -> None:
        _, skipped = self.run(self.world.engine.flush(10))
        assert all(block.disk is None for block in skipped)

    @rule(wide=st.booleans())
    def bump(self, wide: bool) -> None:
        space = self.spaces[wide]
        self.run(self.world.engine.removal.bump_epoch(space))
        assert not space.blocks

    @rule(name=chains, wide=st.booleans(), at=st.integers(0, 5))
    @inside
    def damage(self, name: int, wide: bool, at: int) -> None:
        space = self.spaces[wide]
        block = space.blocks.get(self.keys(name, 6, space)[at])
        if block is not None and block.disk is not None and block.host is None:
            self.world.engine.removal.corrupt(block)

    @rule(operation=st.sampled_from(["read", "write", "sync"]), block=st.integers(0, 2))
    def fault(self, operation: str, block: int) -> None:
        calls = self.world.disk.calls.get(operation, 0)
        self.world.disk.plan[:] = [Fault(FaultKind.IO_ERROR, operation, call=calls, block=block)]

    @rule(who=st.integers(0, 1), kill=st.booleans())
    @inside
    def end_a_process(self, who: int, kill: bool) -> None:
        player = self.players[who]
        if kill:
            player.die()
        else:
            player.detach()
            player.drop_lock()
        self._replace(who)

    @inside
    def replace(self, who: int) -> None:
        self._replace(who)

    def _replace(self, who: int) -> None:
        player = self.players[who]
        self.players[who] = self.player(who)
        self.leases = [(p, lease) for p, lease in self.leases if p is not player]
        self.open = [entry for entry in self.open if entry[0] is not player]
        self.open = [entry for entry in self.open if player not in entry[1]]

    @rule(who=st.integers(0, 1))
    def stop_a_process(self, who: int) -> None:
        player = self.players[who]
        player.hang_up()
        self.run(asyncio.sleep(0.02))
        player.drop_lock()
        self.run(until(lambda: player.attachment.state == "gone"))
        self.replace(who)

    @rule()
    @inside
    def unmap(self) -> None:
        room = self.world.engine.room
        for group in list(room.retiring):
            for player in self.players:
                room.unmapped(player.attachment.id, [group])

    @rule(wide=st.booleans())
    @inside
    def make_room(self, wide: bool) -> None:
        evicted = self.world.counts("evicted_blocks_host")
        made = self.world.engine.make_room(self.spaces[wide].shape)
        assert made.made_bytes <= made.expected_bytes
        assert self.world.counts("evicted_blocks_host") == evicted

    @rule()
    def let_it_work(self) -> None:
        self.run(asyncio.sleep(0.005))

    @invariant()
    def everything_adds_up(self) -> None:
        if self.players:
            check(self.world.engine)

    @rule()
    def settle(self) -> None:
        async def quiet() -> None:
            await self.world.settle()
            await self.world.engine.limits._keep()
            await self.world.settle()
            check(self.world.engine, quiet=True)
            for space in self.spaces:
                for tier in (TierName.HOST, TierName.DISK):
                    # What is too much is there because the rule keeps it.
                    assert space.excess(tier) <= 0 or (space.own and not space.own[tier].peek())

        self.run(quiet())

    def teardown(self) -> None:
        try:
            if self.players:
                self.run(self._end())
        finally:
            self.loop.close()
            shutil.rmtree(self.directory)

    async def _end(self) -> None:
        """In the end everybody leaves, and all that is left are blocks; then they go, too."""
        for player in self.players:
            player.detach()
        for group in list(self.world.engine.room.retiring):
            for attachment in self.world.players:
                self.world.engine.room.unmapped(attachment.attachment.id, [group])
        await self.world.settle()
        check(self.world.engine, quiet=True)
        assert not self.world.engine.leases.count
        assert not len(self.world.engine.grants)
        for space in self.spaces:
            await self.world.engine.removal.bump_epoch(space)
        await self.world.settle()
        assert self.world.host.usage().used_bytes == 0
        assert self.world.disk.usage().used_bytes == 0
        await self.world.stop()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=25,
    stateful_step_count=35,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
