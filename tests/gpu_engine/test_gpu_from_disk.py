"""Blocks from disk straight to the GPU, and what happens when that way fails. With a stub."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable

import pytest
from engine_invariants import check
from engine_world import World, chain, spec_of
from kvikio_stub import KvikioStub, kvikio_stub

from kvstore.miss import MissReason
from kvstore.tiers.base import TierName
from kvstore.tiers.kvikio_engine import KvikioEngine
from kvstore.tiers.simulated_device import SimulatedDevice

MakeWorld = Callable[..., World]


async def on_disk_only(world: World, keys: list[bytes]) -> None:
    player = world.player()
    await player.put(keys)
    await world.evict_host()
    assert world.tiers(keys) == "d" * len(keys)


async def bring_up(world: World, keys: list[bytes]) -> tuple[int, MissReason]:
    blocks, done, miss = await world.engine.tickets.prefetch(
        world.space, keys, 77, 0, 0, 60, TierName.GPU
    )
    assert done
    return blocks, miss.reason


async def reads_right(world: World, keys: list[bytes]) -> None:
    player = world.player()
    player.sees_gpus()
    _, answer = player.acquire(keys)
    assert answer.tiers == bytes([TierName.GPU] * len(keys))
    assert player.reads_right(keys, answer.slots.slots)
    player.detach()
    await world.settle()
    check(world.engine, quiet=True)


def test_host_memory_is_not_touched(make_world: MakeWorld) -> None:
    async def story(world: World) -> None:
        keys = chain("a", 12)
        await on_disk_only(world, keys)
        assert await bring_up(world, keys) == (12, MissReason.NONE)
        assert world.tiers(keys) == "d" * 12
        assert world.host.usage().used_bytes == 0
        assert world.counts("direct_blocks_gpu") == 12
        reader = world.engine.gpu_reader
        assert reader is not None
        assert (reader.name, reader.read_bytes) == ("cufile-gds", 12 * 4096)
        await reads_right(world, keys)

    with kvikio_stub(KvikioStub()):
        make_world(
            gpu_blocks=32,
            gpu_engine=KvikioEngine,
            gpu_devices=lambda: [SimulatedDevice(0), SimulatedDevice(1)],
        ).run(story)


def test_every_shard_is_checked(make_world: MakeWorld) -> None:
    async def story(world: World) -> None:
        lengths = (4096, 1000, 4095)
        world.space = await world.engine.open_space(spec_of("three", lengths))
        keys = chain("a", 4)
        player = world.player()
        await player.put(keys, space=world.space)
        await world.evict_host()
        block = world.block(keys[2])
        assert block.digests is not None
        block.digests = (*block.digests[:2], block.digests[2] ^ 1)
        assert await bring_up(world, keys) == (2, MissReason.CORRUPT)
        assert world.counts("corrupt_blocks") == 1
        assert world.tiers(keys) == "dd--"
        world.engine.attachments.detach(player.attachment)
        sees = world.player()
        sees.sees_gpus()
        _, answer = sees.acquire(keys, space=world.space)
        assert sees.reads_right(keys, answer.slots.slots, world.space)
        assert answer.blocks == 2

    with kvikio_stub(KvikioStub()):
        make_world(gpu_blocks=64, host_blocks=32, gpu_engine=KvikioEngine).run(story)


@pytest.mark.parametrize("how", ["raises", "short"])
def test_what_fails_there_comes_through_host_memory(
    make_world: MakeWorld, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    stub = KvikioStub()

    async def story(world: World) -> None:
        keys = chain("a", 8)
        await on_disk_only(world, keys)
        if how == "raises":
            stub.fault = RuntimeError("cuFile error: internal error")
        else:
            stub.short = 512
        assert await bring_up(world, keys) == (8, MissReason.NONE)
        reader = world.engine.gpu_reader
        assert reader is not None
        assert reader.failures
        assert (reader.usable, reader.name) == (False, "host")
        assert "through host memory" in caplog.text
        tried = stub.transfers
        other = chain("b", 4)
        await on_disk_only(world, other)
        assert await bring_up(world, other) == (4, MissReason.NONE)
        assert stub.transfers == tried
        await reads_right(world, other)

    with caplog.at_level(logging.WARNING), kvikio_stub(stub):
        make_world(gpu_blocks=16, gpu_engine=KvikioEngine).run(story)


def test_a_way_that_is_measured_to_be_slower_is_not_taken(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage driver in its compatibility mode may be slower than going through host memory."""
    monkeypatch.setattr("kvstore.prefetch.route.LEAST_BYTES", 2 * 4096)

    async def story(world: World) -> None:
        side = world.engine.gpu_side
        assert side is not None
        assert side.direct is not None
        assert world.engine.promoter is not None
        now = asyncio.get_running_loop().time()
        for path, seconds in (
            (side.direct.path, 1e-1),
            (side.mover.path, 1e-4),
            (world.engine.promoter.path, 1e-4),
        ):
            for _ in range(20):
                path.end(path.begin(8 * 4096, now - seconds), 8 * 4096, now)
        # What is too little to choose for goes straight; what is more does not.
        for name, blocks, straight in (("a", 1, 1), ("b", 8, 1)):
            keys = chain(name, blocks)
            await on_disk_only(world, keys)
            assert await bring_up(world, keys) == (blocks, MissReason.NONE)
            assert world.counts("direct_blocks_gpu") == straight
        # Long ago: it is measured again, with a little of what there is to move.
        side.direct.path.observed_at -= 3600
        keys = chain("c", 8)
        await on_disk_only(world, keys)
        assert await bring_up(world, keys) == (8, MissReason.NONE)
        assert world.counts("direct_blocks_gpu") == 1 + 2
        await reads_right(world, keys)

    with kvikio_stub(KvikioStub()):
        make_world(gpu_blocks=32, gpu_engine=KvikioEngine).run(story)


def test_without_kvikio_blocks_come_through_host_memory(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)

    async def story(world: World) -> None:
        keys = chain("a", 4)
        await on_disk_only(world, keys)
        assert await bring_up(world, keys) == (4, MissReason.NONE)
        reader = world.engine.gpu_reader
        assert reader is not None
        assert (reader.name, reader.failures) == ("host", 1)
        assert "kvikio does not work" in caplog.text
        await reads_right(world, keys)

    with caplog.at_level(logging.WARNING):
        make_world(gpu_blocks=16, gpu_engine=KvikioEngine).run(story)
