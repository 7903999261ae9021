"""The wrappers do what their plans say, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import TierUnavailable
from kvstore.space import BlockShape
from kvstore.tiers.base import Outcome, Tier, Transfer
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.faulty import Fault, FaultKind, Faulty
from kvstore.tiers.testing import contents, transfers_for
from kvstore.tiers.throttled import Throttled

SHAPE = BlockShape(4096, 2)
LENGTHS = (4096, 4096)
OK, BAD, CORRUPT = Outcome.OK, Outcome.IO_ERROR, Outcome.CORRUPT


def play(
    directory: Path, wrap: Callable[[Tier], Any], story: Callable[[Any], Awaitable[None]]
) -> None:
    async def run() -> None:
        tier = wrap(DiskTier(directory, 32 * SHAPE.block_bytes))
        await tier.open()
        await tier.finish_recovery()
        tier.want(SHAPE, 4)
        while tier.allocating:
            await asyncio.sleep(0.001)
        try:
            await story(tier)
        finally:
            await tier.close()

    asyncio.run(run())


def blank(written: list[Transfer]) -> list[Transfer]:
    fresh = transfers_for([t.slot for t in written], SHAPE, LENGTHS, None)
    return [
        Transfer(t.slot, f.buffers, t.lengths, t.digests)
        for t, f in zip(written, fresh, strict=True)
    ]


def test_faults_hit_the_call_and_the_block_that_the_plan_names(tmp_path: Path) -> None:
    async def story(tier: Faulty) -> None:
        written = transfers_for(tier.allocate(SHAPE, 3), SHAPE, LENGTHS, 1)
        tier.plan = [
            Fault(FaultKind.NO_SPACE, "write", call=0, block=1),
            Fault(FaultKind.IO_ERROR, "read", call=1, block=0),
            Fault(FaultKind.SHORT_READ, "read", call=2, block=2),
            Fault(FaultKind.BIT_FLIP, "read", call=3, block=1, bit=12_345),
            Fault(FaultKind.UNAVAILABLE, "read", call=4),
            Fault(FaultKind.IO_ERROR, "sync", call=0),
            Fault(FaultKind.NO_SPACE, "allocate", call=1),
        ]
        assert await tier.write(written) == [OK, BAD, OK]
        assert await tier.write(written) == [OK, OK, OK]
        with pytest.raises(TierUnavailable):
            await tier.sync()
        await tier.sync()
        assert await tier.read(blank(written)) == [OK, OK, OK]
        for outcomes, spoiled in (([BAD, OK, OK], 0), ([OK, OK, BAD], 2), ([OK, CORRUPT, OK], 1)):
            got = blank(written)
            assert await tier.read(got) == outcomes
            same = [contents(g) == contents(w) for g, w in zip(got, written, strict=True)]
            assert same == [position != spoiled for position in range(3)]
        with pytest.raises(TierUnavailable):
            await tier.read(blank(written))
        assert await tier.read(blank(written)) == [OK, OK, OK]
        assert tier.allocate(SHAPE, 1) == []
        assert len(tier.allocate(SHAPE, 1)) == 1

    play(tmp_path, Faulty, story)


@pytest.mark.parametrize("kind", [FaultKind.BIT_FLIP, FaultKind.TORN_WRITE])
def test_a_silent_bad_write_is_found_by_the_digest(tmp_path: Path, kind: FaultKind) -> None:
    async def story(tier: Faulty) -> None:
        slots = tier.allocate(SHAPE, 2)
        old = transfers_for(slots, SHAPE, LENGTHS, 1)
        assert await tier.write(old) == [OK, OK]
        new = transfers_for(slots, SHAPE, LENGTHS, 2)
        before = [contents(t) for t in new]
        tier.plan = [Fault(kind, "write", call=1, block=0, bit=5)]
        assert await tier.write(new) == [OK, OK]
        assert [contents(t) for t in new] == before  # the caller's memory is not touched
        got = blank(new)
        assert await tier.read(got) == [CORRUPT, OK]
        if kind is FaultKind.TORN_WRITE:
            assert contents(got[0]) == [contents(new[0])[0], contents(old[0])[1]]

    play(tmp_path, Faulty, story)


def test_a_stalled_call_waits_until_it_is_resumed(tmp_path: Path) -> None:
    async def story(tier: Faulty) -> None:
        written = transfers_for(tier.allocate(SHAPE, 1), SHAPE, LENGTHS, 1)
        assert await tier.write(written) == [OK]
        tier.plan = [Fault(FaultKind.STALL, "read", call=0)]
        reading = asyncio.ensure_future(tier.read(blank(written)))
        await asyncio.wait_for(tier.stalled.wait(), 60)
        assert await tier.read(blank(written)) == [OK]  # others go on
        assert not reading.done()
        tier.resume()
        assert await reading == [OK]

    play(tmp_path, Faulty, story)


def test_calls_at_once_share_the_bandwidth(tmp_path: Path) -> None:
    async def story(tier: Throttled) -> None:
        loop = asyncio.get_running_loop()
        written = transfers_for(tier.allocate(SHAPE, 4), SHAPE, LENGTHS, 1)
        tier.bytes_per_second = SHAPE.block_bytes * 100
        tier.latency_seconds = 0.005
        begun = loop.time()
        ends: list[float] = []

        async def one(transfer: Transfer) -> None:
            assert await tier.write([transfer]) == [OK]
            ends.append(loop.time() - begun)

        await asyncio.gather(*map(one, written))
        # 10 ms of bytes and 5 ms of latency each, one after the other: never sooner.
        for position, end in enumerate(ends):
            assert end >= 0.015 * (position + 1) - 1e-6
        assert tier.busy_until - begun == pytest.approx(0.060, abs=0.005)
        tier.bytes_per_second = 1e12
        tier.latency_seconds = 0.0
        await asyncio.sleep(max(0.0, tier.busy_until - loop.time()))
        begun = loop.time()
        assert await tier.read(blank(written)) == [OK] * 4
        assert tier.busy_until - begun < 0.001

    play(tmp_path, lambda tier: Throttled(tier, 1e12), story)


def test_callbacks_and_extras_reach_the_wrapped_tier(tmp_path: Path) -> None:
    async def story(tier: Faulty) -> None:
        rooms: list[int] = []
        tier.on_room = lambda: rooms.append(1)
        tier.want(SHAPE, 16)
        while tier.allocating:
            await asyncio.sleep(0.001)
        assert rooms
        assert tier.free_blocks(SHAPE) >= 16
        tier.bytes_per_second = 123.0
        assert isinstance(tier.inner, Throttled)
        assert tier.inner.bytes_per_second == 123.0
        assert tier.state == "ok"
        with pytest.raises(AttributeError):
            _ = tier.nonsense

    play(tmp_path, lambda tier: Faulty(Throttled(tier, 1e12)), story)
