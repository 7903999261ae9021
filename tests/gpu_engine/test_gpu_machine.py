"""The engine's machine with a GPU pool beside host and disk, and clients that can open it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from engine_world import Player, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from kvikio_stub import KvikioStub, kvikio_stub
from numpy.typing import NDArray
from test_engine_machine import DISK, HOST, EngineMachine, chains, lengths

from kvstore.tiers.base import TierName
from kvstore.tiers.faulty import Faulty
from kvstore.tiers.gpu_device import DeviceError, GpuDevice
from kvstore.tiers.io_engine import IoEngine
from kvstore.tiers.kvikio_engine import KvikioEngine
from kvstore.tiers.simulated_device import SimulatedDevice

GPU = 8


class GpuMachine(EngineMachine):
    """Whatever moves up and down, what is read is right and every slot has one owner."""

    loads = 0

    def __init__(self) -> None:
        super().__init__()
        self.stub = KvikioStub()
        self.kvikio: contextlib.AbstractContextManager[Any] = kvikio_stub(self.stub)
        self.kvikio.__enter__()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.kvikio.__exit__(None, None, None)

    @initialize(
        policy=st.sampled_from(["through", "evict"]),
        devices=st.integers(1, 2),
        cufile=st.booleans(),
    )
    def start(self, policy: str, devices: int, cufile: bool) -> None:
        self.world = World(
            self.directory,
            self.pools,
            host_blocks=HOST,
            disk_blocks=DISK,
            flush_on_commit=policy == "through",
            wrap=Faulty,
            gpu_blocks=GPU,
            gpu_devices=lambda: self.devices(devices),
            gpu_engine=self.engine if cufile else None,
        )
        self.run(self._start())

    def engine(self) -> IoEngine:
        return KvikioEngine()

    @rule(fault=st.sampled_from([None, RuntimeError("cuFile error")]), short=st.booleans())
    def fault_of_cufile(self, fault: BaseException | None, short: bool) -> None:
        """It fails from now on, or works again."""
        self.stub.fault, self.stub.short = fault, 512 * short
        reader = self.world.engine.gpu_reader
        if reader is not None:
            reader._retry_at = 0.0

    @rule(name=chains, length=lengths, wide=st.booleans())
    def from_disk(self, name: int, length: int, wide: bool) -> None:
        """Store, leave the blocks on disk only, bring them up."""

        async def story() -> None:
            space = self.spaces[wide]
            keys = self.keys(name, length, space)
            await self.players[0].put(keys, step=2, deadline=0.02, space=space)
            await self.world.engine.flush(10)
            for tier in (TierName.GPU, TierName.HOST):
                await self.world.engine.removal.evict(space, keys, tier)
            tickets = self.world.engine.tickets
            await tickets.prefetch(space, keys, 20 + name, 0.2, 0, 0.1, TierName.GPU)

        self.run(story())

    def devices(self, count: int) -> Sequence[GpuDevice]:
        return [SimulatedDevice(n) for n in range(count)]

    def player(self, who: int) -> Player:
        player = super().player(who)
        if not who:
            player.sees_gpus()
        return player

    @rule(name=chains, length=lengths, wide=st.booleans())
    def store_and_load(self, name: int, length: int, wide: bool) -> None:
        """What leases let go of is copied up, and leased from there the next time."""

        async def story() -> None:
            space = self.spaces[wide]
            keys = self.keys(name, length, space)
            await self.players[0].put(keys, step=2, deadline=0.02, space=space)
            for _ in range(2):
                lease, answer = self.players[0].acquire(keys, deadline=0.0, space=space)
                assert self.players[0].reads_right(keys, answer.slots.slots, space)
                self.players[0].release(lease)
                await asyncio.sleep(0.005)

        self.run(story())

    @rule(name=chains, length=lengths, wide=st.booleans(), wait=st.booleans())
    def prefetch_up(self, name: int, length: int, wide: bool, wait: bool) -> None:
        space = self.spaces[wide]
        keys = self.keys(name, length, space)
        seconds = 0.1 if wait else 0.0
        self.run(
            self.world.engine.tickets.prefetch(
                space, keys, 10 + name, 0.2, 0, seconds, TierName.GPU
            )
        )

    @precondition(lambda self: bool(self.players))
    @rule()
    def cancel_prefetch(self) -> None:
        async def cancel() -> None:
            for name in range(4):
                self.world.engine.tickets.cancel(10 + name)

        self.run(cancel())

    async def _end(self) -> None:
        counts = self.world.engine.counters.counts
        assert counts["promoted_blocks_gpu"] >= counts["demoted_blocks"]
        await super()._end()
        assert self.world.gpu is not None
        assert self.world.gpu.usage().allocated_bytes == 0
        assert all(not device.address for device in self.world.gpu.devices)


TestGpuMachine = GpuMachine.TestCase
TestGpuMachine.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class Frail(SimulatedDevice):
    """A device that fails those of the daemon's threads that copy, once it is broken."""

    broken = False

    def copy(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
    ) -> None:
        if self.broken and threading.current_thread() is not threading.main_thread():
            raise DeviceError(errno.EIO, "an uncorrectable error")
        super().copy(destinations, sources, lengths)


class FrailGpuMachine(GpuMachine):
    """The same, with a device that fails at some time, for good."""

    def __init__(self) -> None:
        super().__init__()
        self.frail: list[Frail] = []

    def devices(self, count: int) -> Sequence[GpuDevice]:
        self.frail = [Frail(n) for n in range(count)]
        return self.frail

    @precondition(lambda self: self.frail and not any(device.broken for device in self.frail))
    @rule(which=st.integers(0, 1))
    def fault_of_the_device(self, which: int) -> None:
        self.frail[which % len(self.frail)].broken = True


TestFrailGpuMachine = FrailGpuMachine.TestCase
TestFrailGpuMachine.settings = settings(TestGpuMachine.settings, max_examples=12)


class RealGpuMachine(GpuMachine):
    """The same, with real DMA."""

    def __init__(self) -> None:
        super().__init__()
        # The stub reads into host memory only.
        self.kvikio.__exit__(None, None, None)
        self.kvikio = contextlib.nullcontext()

    def devices(self, count: int) -> Sequence[GpuDevice]:
        from kvstore.tiers.cuda_device import cuda_devices

        return cuda_devices(["0"])


TestRealGpuMachine = pytest.mark.gpu(
    pytest.mark.skipif(find_spec("cupy") is None, reason="there is no CuPy")(
        RealGpuMachine.TestCase
    )
)
TestRealGpuMachine.settings = TestGpuMachine.settings
