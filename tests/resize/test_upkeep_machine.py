"""The engine's machine with an operator in it: capacities change, disks rot and are checked."""

from __future__ import annotations

import asyncio
from typing import Any

from engine_invariants import check
from engine_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from test_engine_machine import DISK, HOST, EngineMachine, chains

from kvstore.errors import Busy, ConfigError
from kvstore.tiers.base import TierName
from kvstore.tiers.faulty import Faulty
from kvstore.tiers.segment import HEADER_BYTES, segment_name

BLOCK = 4096


class UpkeepMachine(EngineMachine):
    """Whatever is done to the tiers, what is read is right and every slot has one owner."""

    @initialize(policy=st.sampled_from(["through", "reused", "evict"]))
    def start(self, policy: str) -> None:
        self.world = World(
            self.directory,
            self.pools,
            host_blocks=HOST,
            disk_blocks=DISK,
            flush_on_commit=policy == "through",
            flush_on_reuse=policy == "reused",
            wrap=Faulty,
        )
        self.run(self._start())

    @rule(disk=st.booleans(), blocks=st.integers(1, 20), wait=st.sampled_from([0.0, 0.03, 0.3]))
    def resize(self, disk: bool, blocks: int, wait: float) -> None:
        tier = TierName.DISK if disk else TierName.HOST
        try:
            resized = self.run(self.world.engine.resizer.resize(tier, blocks * BLOCK, wait))
        except ConfigError:
            # A block of two shards does not fit into one block's bytes.
            assert blocks == 1
            return
        usage = (self.world.disk if disk else self.world.host).usage()
        assert usage.capacity_bytes == blocks * BLOCK
        assert resized.capacity_bytes >= blocks * BLOCK
        if resized.done and not disk:
            assert usage.allocated_bytes <= blocks * BLOCK

    @rule(name=chains, wide=st.booleans(), at=st.integers(0, 5), byte=st.integers(0, BLOCK - 1))
    def rot(self, name: int, wide: bool, at: int, byte: int) -> None:
        """Change a byte of a block on disk."""
        space = self.spaces[wide]
        block = space.blocks.get(self.keys(name, 6, space)[at])
        if block is None or block.disk is None:
            return
        path = self.directory / "disk" / segment_name(block.disk.group)
        where = HEADER_BYTES + block.disk.index * space.shape.block_bytes + byte
        with path.open("r+b") as file:
            file.seek(where)
            old = file.read(1)
            file.seek(where)
            file.write(bytes([old[0] ^ 1]))

    @rule(fraction=st.sampled_from([0.3, 1.0]), wait=st.booleans())
    def scrub(self, fraction: float, wait: bool) -> None:
        async def begin() -> None:
            assert self.world.engine.scrubber is not None
            try:
                scrub = self.world.engine.scrubber.begin(fraction, 0)
            except Busy:
                return
            while wait and not scrub.over:
                await asyncio.sleep(0.001)
            assert scrub.error is None

        self.run(begin())

    @rule()
    def settle(self) -> None:
        self.run(self._quiet())

    async def _quiet(self) -> None:
        engine = self.world.engine
        assert engine.scrubber is not None
        await engine.scrubber.break_off()
        await engine.resizer.break_off()
        await self.world.settle()
        shrinker: Any = engine.resizer._shrinkers[TierName.DISK]
        while not await shrinker._tidy():
            await asyncio.sleep(0.01)
        await self.world.settle()
        check(engine, quiet=True)

    async def _end(self) -> None:
        await self._quiet()
        await super()._end()


TestUpkeepMachine = UpkeepMachine.TestCase
TestUpkeepMachine.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
