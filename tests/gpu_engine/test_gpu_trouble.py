"""What a GPU pool does when readers, devices or settings are not as they should be. Simulated devices."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import numpy as np
import pytest
from engine_invariants import check
from engine_world import Gate, World, chain, spec_of, until
from gpu_stories import GPU, HOST, MakeWorld, Obstinate, bring_up, on_gpu

from kvstore.engine.events import SlabEvent, SlabRetireEvent
from kvstore.errors import ConfigError
from kvstore.miss import MissReason
from kvstore.tiers.base import TierName
from kvstore.tiers.gpu import GpuTier
from kvstore.tiers.gpu_device import DeviceError
from kvstore.tiers.gpu_slab import FIRST_GPU_GROUP, GONE, GpuSlabGroup
from kvstore.tiers.simulated_device import SimulatedDevice


def test_a_reader_that_expired_finds_out_by_the_generation(make_world: MakeWorld) -> None:
    async def story(world: World) -> None:
        assert world.gpu is not None
        player = world.player()
        player.sees_gpus()
        keys = chain("a", 4)
        await player.put(keys)
        assert await bring_up(world, keys) == (4, MissReason.NONE)
        _, answer = player.acquire(keys)
        slots = answer.slots.slots
        groups = {group.group: group for group in world.gpu.groups()}
        files = {
            number: np.memmap(group.generations_path, np.uint64, "r")
            for number, group in groups.items()
        }

        def current() -> list[bool]:
            pairs = zip(slots, answer.slots.generations.tolist(), strict=True)
            return [int(files[slot.group][slot.index]) == granted for slot, granted in pairs]

        other = chain("b", 4)
        await player.put(other)
        # Leased copies make no room.
        assert await bring_up(world, other) == (0, MissReason.NO_ROOM)
        assert current() == [True] * 4
        world.engine.leases.end_all(player.attachment)
        assert await bring_up(world, other) == (4, MissReason.NONE)
        assert current() == [False] * 4
        # The memory goes to blocks of another shape: the group is no more, and says so.
        wide = await world.engine.open_space(spec_of("wide", (8192,)))
        await player.put(chain("c", 2), space=wide)
        taken, _, _ = await world.engine.tickets.prefetch(
            wide, chain("c", 2), 5, 0, 0, 60, TierName.GPU
        )
        assert taken
        gone = {number for event in player.heard_of(SlabRetireEvent) for number in event.groups}
        assert gone
        for number, group in groups.items():
            assert (int(files[number][0]) == GONE) == (number in gone)
            assert group.generations_path.exists() == (number not in gone)
        later = [g.group for g in world.gpu.groups() if g.shape == wide.shape]
        assert later
        assert min(later) > max(groups)

    make_world(gpu_blocks=4).run(story)


@pytest.mark.parametrize("bump", [False, True])
def test_a_block_that_goes_while_it_is_copied_keeps_its_slots_until_the_copy_is_done(
    make_world: MakeWorld, bump: bool
) -> None:
    device = Obstinate()

    async def story(world: World) -> None:
        assert world.gpu is not None
        player = world.player()
        player.sees_gpus()
        keys = chain("a", 3)
        await player.put(keys)
        await world.settle()
        device.gate.clear()
        device.copying.clear()
        waiting = asyncio.ensure_future(bring_up(world, keys))
        await until(device.copying.is_set)
        if bump:
            await world.engine.removal.bump_epoch(world.space)
        else:
            world.engine.removal.corrupt(world.block(keys[0]))
        assert world.gpu.usage().used_bytes == 3 * 4096
        assert world.host.usage().used_bytes == 3 * 4096
        device.gate.set()
        blocks, _ = await waiting
        assert blocks == 0
        await until(lambda: not world.gpu or not world.gpu.usage().used_bytes)
        assert world.host.usage().used_bytes == 0
        check(world.engine, quiet=True)

    make_world(gpu_blocks=8, disk_blocks=0, gpu_devices=lambda: [device]).run(story)


def test_a_stop_waits_for_the_bus_and_gives_everything_back(make_world: MakeWorld) -> None:
    device = Obstinate()

    async def story(world: World) -> None:
        player = world.player()
        player.sees_gpus()
        keys = chain("a", 3)
        await player.put(keys)
        assert device.pinned
        assert world.gpu is not None
        files = [group.generations_path for group in world.gpu.groups()]
        device.gate.clear()
        device.copying.clear()
        lease, _ = player.acquire(keys)
        player.release(lease)
        await until(device.copying.is_set)
        closing = asyncio.ensure_future(world.engine.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert device.address
        device.gate.set()
        await closing
        assert not device.address
        assert not device.pinned
        assert not any(path.exists() for path in files)

    make_world(gpu_blocks=8, gpu_devices=lambda: [device]).run(story)


def test_a_device_that_fails_costs_the_pool_and_no_block(make_world: MakeWorld) -> None:
    device = Obstinate()

    async def story(world: World) -> None:
        player = world.player()
        player.sees_gpus()
        keys, more = chain("a", 3), chain("b", 3)
        await player.put(keys)
        assert await bring_up(world, keys) == (3, MissReason.NONE)
        await player.put(more)
        device.broken = True
        assert await bring_up(world, more) == (0, MissReason.IO_ERROR)
        assert world.gpu is not None
        assert world.gpu.state == "degraded: [Errno 5] an uncorrectable error"
        assert on_gpu(world, keys + more) == "------"
        for run in (keys, more):
            lease, answer = player.acquire(run)
            assert answer.tiers == bytes([HOST] * 3)
            assert player.reads_right(run, answer.slots.slots)
            player.release(lease)
        await world.settle()
        assert await bring_up(world, more) == (0, MissReason.IO_ERROR)
        check(world.engine, quiet=True)

    make_world(gpu_blocks=8, gpu_devices=lambda: [device]).run(story)


def test_memory_that_cannot_be_pinned_is_used_all_the_same(make_world: MakeWorld) -> None:
    class Unpinned(SimulatedDevice):
        def pin(self, address: int, length: int) -> None:
            raise DeviceError(errno.ENOMEM, "no")

    async def story(world: World) -> None:
        player = world.player()
        player.sees_gpus()
        keys = chain("a", 3)
        await player.put(keys)
        assert await bring_up(world, keys) == (3, MissReason.NONE)
        assert world.gpu is not None
        assert world.gpu.pin_failures

    make_world(gpu_blocks=8, gpu_devices=lambda: [Unpinned()]).run(story)


def test_a_pool_that_does_not_fit_is_refused_in_one_line(tmp_path: Any) -> None:
    whole = SimulatedDevice(0, 1 << 30)
    small = SimulatedDevice(1, 1 << 26)
    tier = GpuTier(tmp_path, [whole, small], 1 << 28)
    with pytest.raises(ConfigError, match=r"gpu_pool: 256 MiB on simulated 1: only 64 MiB of 64"):
        asyncio.run(tier.open())
    assert not whole.address
    tier = GpuTier(tmp_path, [whole, small], 0.25)

    async def half() -> list[int]:
        await tier.open()
        sizes = [usage.capacity_bytes for usage in tier.device_usage()]
        await tier.close()
        return sizes

    assert asyncio.run(half()) == [1 << 28, 1 << 24]


def test_devices_may_be_named_later_and_taken_back(make_world: MakeWorld) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("a", 2)
        await player.put(keys)
        assert await bring_up(world, keys) == (2, MissReason.NONE)

        def heard() -> list[int]:
            events = player.heard_of(SlabEvent)
            return [e.group.group for e in events if isinstance(e.group, GpuSlabGroup)]

        assert not heard()
        player.sees_gpus()
        player.sees_gpus()
        assert heard() == [FIRST_GPU_GROUP]
        assert player.acquire(keys)[1].tiers == bytes([GPU] * 2)
        world.engine.attachments.set_devices(player.attachment, frozenset())
        assert player.acquire(keys)[1].tiers == bytes([HOST] * 2)

    make_world(gpu_blocks=8).run(story)


@pytest.mark.parametrize("broken", ["device", "host"])
def test_hot_blocks_that_cannot_leave_are_not_asked_to_again_and_again(
    make_world: MakeWorld, broken: str
) -> None:
    """The loop would do nothing else. They are on disk, too; who wants room hears that there is none."""
    device = Obstinate()

    async def story(world: World) -> None:
        player = world.player()
        player.sees_gpus()
        first, second = chain("a", 4), chain("b", 4)
        await player.put(first)
        await world.settle()
        assert await bring_up(world, first) == (4, MissReason.NONE)
        await world.evict_host(first)
        assert world.tiers(first) == "dddd"
        await player.put(second)
        await world.settle()
        device.broken = broken == "device"
        # As at a stop, before what brings blocks up is stopped, too.
        world.engine.room.closed = broken == "host"
        assert await bring_up(world, second) == (0, MissReason.NO_ROOM)
        assert on_gpu(world, first + second) == ("-" * 8 if device.broken else "gggg----")
        assert world.tiers(first) == "dddd"
        world.engine.room.closed = False
        assert await player.load(second, deadline=0) == 4
        await world.settle()
        check(world.engine, quiet=True)

    make_world(gpu_blocks=4, host_blocks=64, gpu_devices=lambda: [device]).run(story)


def test_what_a_wait_is_cut_before_is_held_on_the_gpu_no_more(make_world: MakeWorld) -> None:
    async def story(world: World) -> None:
        keys, player = chain("a", 4), world.player()
        player.sees_gpus()
        assert await player.put(keys) == 4
        assert (await bring_up(world, keys))[0] == 4
        await world.evict_host(keys)
        world.engine.index.drop_gpu(world.block(keys[1]))
        world.disk.closed = True
        lease, answer = player.acquire(keys, deadline=0.05)
        assert (answer.blocks, answer.growing) == (1, True)
        assert (await player.lease_done(lease)).blocks == 1
        check(world.engine)
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        player.release(lease)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(gpu_blocks=8, wrap=Gate).run(story)
