"""With very many blocks, limits are set and kept in small steps: others have their turns between."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable
from typing import Any, cast

from engine_world import chain, spec_of

from kvstore.engine.counters import Counters
from kvstore.engine.limits import Limits
from kvstore.engine.steady_clock import SteadyClock
from kvstore.engine.use_times import UseTimes
from kvstore.index import BlockIndex, Pressure, SpaceIndex, SpaceLimits
from kvstore.tiers.base import Slot, TierName

BLOCKS = int(os.environ.get("KVSTORE_TEST_LIMITED_BLOCKS", "20000"))
CHAIN = 100


class NoStore:
    """Stores limits in no time."""

    store = cast("Any", None)

    def __init__(self) -> None:
        self.store = self
        self.put_limits = "put_limits"

    async def run(self, *_: Any) -> None:
        await asyncio.sleep(0)


class Watch:
    """How much happens between two turns of the loop."""

    def __init__(self, progress: Callable[[], int]) -> None:
        self._progress = progress
        self.most = 0
        self.seconds = 0.0

    async def run(self) -> None:
        last, at = self._progress(), time.thread_time()
        while True:
            await asyncio.sleep(0)
            now, then = self._progress(), time.thread_time()
            self.most = max(self.most, abs(now - last))
            self.seconds = max(self.seconds, then - at)
            last, at = now, then


class Parts:
    """Limits with an index of many chains on disk, as recovery would make it."""

    def __init__(self) -> None:
        self.up = 1000.0
        self.index = BlockIndex(lambda _: None, lambda _, __: None)
        spec = spec_of()
        self.space = SpaceIndex(spec.fingerprint, spec, 1)
        self.index.spaces[self.space.id] = self.space
        parent = None
        keys: list[bytes] = []
        for i in range(BLOCKS):
            if i % CHAIN == 0:
                parent, keys = None, chain(f"many{i}", CHAIN)
            key = keys[i % CHAIN]
            # Heads are used last.
            sequence = i - i % CHAIN + CHAIN - i % CHAIN
            self.index.restore(self.space, key, parent, Slot(0, i), (0,), sequence)
            parent = self.space.blocks[key]
        self.index.restored()
        clock = SteadyClock(clock=lambda: self.up, boot="8d7c5b9e-0000-4000-8000-000000000001")
        times = UseTimes(self.index, clock)
        store = cast("Any", NoStore())
        self.limits = Limits(self.index, store, Counters(), times, SpaceLimits())
        self.limits.shrink[TierName.DISK] = self.shrink
        times.restore(None)

    def shrink(self, space: SpaceIndex, count: int) -> int:
        assert space.own is not None
        gone = 0
        while gone < count and (block := space.own[TierName.DISK].peek()) is not None:
            self.index.drop_disk(block, Pressure.QUOTA)
            gone += 1
        return gone

    async def watched(self, work: Any, progress: Callable[[], int]) -> Watch:
        watch = Watch(progress)
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(0)
        # As a daemon, which collects in small steps.
        gc.disable()
        try:
            await work
        finally:
            gc.enable()
        await asyncio.sleep(0)
        task.cancel()
        return watch


def test_setting_and_keeping_limits_takes_small_steps() -> None:
    async def story() -> None:
        parts = Parts()
        space, limits = parts.space, parts.limits
        half = BLOCKS // 2 * space.shape.block_bytes
        offered = await parts.watched(
            limits.change(space, {"disk_bytes": half}),
            lambda: (
                sum(b.queued >> 4 != 0 for b in space.blocks.values()) if BLOCKS < 50_000 else 0
            ),
        )
        assert offered.most <= 2000
        fitted = await parts.watched(limits._keep(), lambda: space.disk_blocks)
        assert space.disk_blocks == BLOCKS // 2
        assert fitted.most <= 500
        # The coldest chains are gone, tails first; none lost its head before its tail.
        assert all(b.parent is None or b.parent.key in space.blocks for b in space.blocks.values())
        await limits.change(space, {"ttl_ms": 60_000})
        parts.up += 3600.0
        expired = await parts.watched(limits._keep(), lambda: space.disk_blocks)
        assert not space.blocks
        assert expired.most <= 500
        print(
            f"{BLOCKS} blocks: longest slices {offered.seconds * 1e3:.1f} ms setting, "
            f"{fitted.seconds * 1e3:.1f} ms fitting, {expired.seconds * 1e3:.1f} ms expiring"
        )

    asyncio.run(story())


def test_looking_at_ten_thousand_spaces_is_cheap() -> None:
    async def story() -> None:
        index = BlockIndex(lambda _: None, lambda _, __: None)
        times = UseTimes(index)
        defaults = SpaceLimits(host_bytes=1 << 30, ttl_ms=1000)
        limits = Limits(index, cast("Any", NoStore()), Counters(), times, defaults)
        for n in range(10_000):
            spec = spec_of(f"m{n}")
            space = index.spaces[spec.fingerprint] = SpaceIndex(spec.fingerprint, spec, 1)
            limits.adopt(space)
        begun = time.thread_time()
        await limits._keep()
        print(f"10,000 spaces with limits: {(time.thread_time() - begun) * 1e3:.1f} ms a second")
        assert all(space.own is not None for space in index.spaces.values())

    asyncio.run(story())
