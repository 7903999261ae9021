"""What a GPU pool does for clients. On simulated devices."""

from __future__ import annotations

import asyncio
from typing import Any

from engine_invariants import check
from engine_world import World, chain, spec_of, until
from gpu_stories import GPU, HOST, MakeWorld, Obstinate, bring_up, on_gpu

from kvstore.engine.events import SlabEvent
from kvstore.miss import MissReason
from kvstore.tiers.gpu_slab import FIRST_GPU_GROUP
from kvstore.tiers.simulated_device import SimulatedDevice


def test_what_was_loaded_from_host_comes_from_the_gpu_next(make_world: MakeWorld) -> None:
    async def story(world: World) -> None:
        keys = chain("a", 6)
        sees, blind = world.player(), world.player()
        sees.sees_gpus()
        assert await sees.put(keys) == 6
        lease, answer = sees.acquire(keys)
        assert answer.tiers == bytes([HOST] * 6)
        sees.release(lease)
        await world.settle()
        assert on_gpu(world, keys) == "gggggg"
        lease, answer = sees.acquire(keys)
        assert answer.tiers == bytes([GPU] * 6)
        slots = answer.slots.slots
        assert all(slot.group >= FIRST_GPU_GROUP for slot in slots)
        assert sees.reads_right(keys, slots)
        assert world.gpu is not None
        assert answer.slots.generations.tolist() == world.gpu.generations(slots).tolist()
        # The same lease again, by another name: the same slots; who cannot open the device: host.
        assert sees.acquire(keys, lease_id=lease)[1].slots.slots == slots
        other, answer = blind.acquire(keys)
        assert answer.tiers == bytes([HOST] * 6)
        assert blind.reads_right(keys, answer.slots.slots)
        blind.release(other)
        # What is read on the GPU may leave host, if it is on disk, and nothing else.
        await world.evict_host(keys)
        assert world.tiers(keys) == "dddddd"
        await world.engine.removal.evict(world.space, keys, None)
        assert world.tiers(keys) == "dddddd"
        assert on_gpu(world, keys) == "gggggg"
        assert not blind.heard_of(SlabEvent)[-1].group.group >= FIRST_GPU_GROUP
        assert sees.heard_of(SlabEvent)[-1].group.group >= FIRST_GPU_GROUP
        sees.release(lease)
        await world.engine.removal.evict(world.space, keys, None)
        assert world.tiers(keys) == on_gpu(world, keys) == "------"
        await world.settle()
        check(world.engine, quiet=True)

    make_world(gpu_blocks=8).run(story)


def test_shards_lie_on_the_devices_in_turn_and_a_rank_needs_only_its_own(
    make_world: MakeWorld,
) -> None:
    async def story(world: World) -> None:
        assert world.gpu is not None
        space = await world.engine.open_space(spec_of("four", (4096,) * 4))
        keys = chain("a", 3)
        scheduler, rank, stranger = world.player(), world.player(), world.player()
        scheduler.sees_gpus()
        first, second = (device.uuid for device in world.gpu.devices)
        for player, device, shards in ((rank, second, {1, 3}), (stranger, first, {1})):
            player.attachment.shards = frozenset(shards)
            world.engine.attachments.set_devices(player.attachment, frozenset([device]))
        await scheduler.put(keys, space=space)
        lease, _ = scheduler.acquire(keys, space=space)
        scheduler.release(lease)
        await world.settle()
        answers = [p.acquire(keys, space=space)[1] for p in (scheduler, rank, stranger)]
        assert [a.tiers for a in answers] == [bytes([t] * 3) for t in (GPU, GPU, HOST)]
        assert scheduler.reads_right(keys, answers[0].slots.slots, space)
        [group] = world.gpu.groups()
        assert [slab.device_uuid for slab in group.slabs] == [first, second] * 2
        assert [slab.offset for slab in group.slabs] == [0, 0, group.slots * 4096] * 1 + [
            group.slots * 4096
        ]

    make_world(gpu_blocks=48, gpu_devices=lambda: [SimulatedDevice(0), SimulatedDevice(1)]).run(
        story
    )


def test_a_chain_longer_than_the_pool_keeps_its_head_there(make_world: MakeWorld) -> None:
    async def story(world: World) -> None:
        player = world.player()
        player.sees_gpus()
        keys = chain("a", 12)
        await player.put(keys)
        for _ in range(2):
            assert await player.load(keys) == 12
            await world.settle()
            assert on_gpu(world, keys) == "gggg--------"
        # A shorter one that is used as often, and later, takes its place, tail first.
        other = chain("b", 2)
        await player.put(other)
        for _ in range(2):
            assert await player.load(other) == 2
            await world.settle()
        assert on_gpu(world, other) == "gg"
        assert on_gpu(world, keys) == "gg----------"

    make_world(gpu_blocks=4).run(story)


def test_what_is_used_often_stays_while_others_pass_by_and_comes_back(
    make_world: MakeWorld,
) -> None:
    """A prefix that is asked for again and again, between many that are asked for once."""

    async def story(world: World) -> None:
        player = world.player()
        player.sees_gpus()
        hot = chain("hot", 3)
        await player.put(hot)
        for _ in range(3):
            assert await player.load(hot) == 3
            await world.settle()
        assert on_gpu(world, hot) == "ggg"
        for at in range(6):
            passing = chain(f"passing{at}", 2)
            await player.put(passing)
            assert await player.load(passing) == 2
            await world.settle()
            assert on_gpu(world, hot) == "ggg"
            # What is used as rarely makes room, although the hot ones have been idle for longer.
            assert on_gpu(world, passing) == "g-"
        # Somebody's wish counts for more than a habit.
        wanted = chain("wanted", 4)
        await player.put(wanted)
        assert await bring_up(world, wanted) == (4, MissReason.NONE)
        assert on_gpu(world, hot) == "---"
        # Its next use brings it back, at the cost of what nobody has used.
        assert await player.load(hot) == 3
        await world.settle()
        assert on_gpu(world, hot) == "ggg"
        # What was hot once is not for ever: when much else is used, its count fades.
        for at in range(40):
            await player.put(chain(f"new{at}", 2))
            assert await player.load(chain(f"new{at}", 2)) == 2
            await world.settle()
        assert on_gpu(world, hot) == "---"
        check(world.engine, quiet=True)

    make_world(gpu_blocks=4, host_blocks=32).run(story)


def test_what_is_used_most_comes_up_first_but_after_what_somebody_waits_for(
    make_world: MakeWorld,
) -> None:
    device = Obstinate()

    async def story(world: World) -> None:
        assert world.engine.gpu_side is not None
        mover = world.engine.gpu_side.mover
        player = world.player()
        player.sees_gpus()
        names = ("first", "second", "once", "twice", "wish")
        chains = {name: chain(name, 2) for name in names}
        for keys in chains.values():
            await player.put(keys)
        begun: list[bytes] = []
        take = mover._next

        def note(queue: Any, limit: int) -> Any:
            batch = take(queue, limit)
            begun.extend(ascent.block.key for ascent in batch)
            return batch

        mover._next = note  # type: ignore[method-assign]
        device.gate.clear()
        # Both that move have their hands full; what comes meanwhile queues.
        for name in ("first", "second"):
            assert await player.load(chains[name]) == 2
            await until(lambda: not mover._later)
        begun.clear()
        for name in ("once", "twice", "twice"):
            assert await player.load(chains[name]) == 2
        waiting = asyncio.ensure_future(bring_up(world, chains["wish"]))
        await until(lambda: mover._wanted)
        assert begun == []
        device.gate.set()
        assert await waiting == (2, MissReason.NONE)
        await world.settle()
        assert begun == [*chains["wish"], *chains["twice"], *chains["once"]]
        check(world.engine, quiet=True)

    make_world(gpu_blocks=16, gpu_devices=lambda: [device]).run(story)


def test_prefetch_brings_blocks_from_disk_to_the_gpu(make_world: MakeWorld) -> None:
    async def story(world: World) -> None:
        player = world.player()
        player.sees_gpus()
        keys = chain("a", 20)
        await player.put(keys)
        await world.evict_host()
        assert world.tiers(keys) == "d" * 20
        assert await bring_up(world, keys) == (20, MissReason.NONE)
        # By way of a host pool that is smaller than the chain.
        assert on_gpu(world, keys) == "g" * 20
        lease, answer = player.acquire(keys)
        assert answer.tiers == bytes([GPU] * 20)
        assert player.reads_right(keys, answer.slots.slots)
        player.release(lease)
        assert await bring_up(world, keys) == (20, MissReason.NONE)
        check(world.engine, quiet=True)

    make_world(gpu_blocks=24, host_blocks=8, disk_blocks=32, flush_on_commit=True).run(story)


def test_damage_on_disk_does_not_reach_the_gpu(make_world: MakeWorld) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("a", 4)
        await player.put(keys)
        await world.evict_host()
        # A digest that does not fit stands for a byte that has changed.
        block = world.block(keys[2])
        assert block.digests is not None
        block.digests = (block.digests[0] ^ 1,)
        blocks, reason = await bring_up(world, keys)
        assert (blocks, reason) == (2, MissReason.CORRUPT)
        assert on_gpu(world, keys) == "gg--"

    make_world(gpu_blocks=8).run(story)


def test_a_hot_block_goes_back_to_host_when_there_is_room(make_world: MakeWorld) -> None:
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
        assert await bring_up(world, second) == (4, MissReason.NONE)
        assert on_gpu(world, first) == "----"
        assert world.tiers(first) == "bbbb"
        assert world.counts("demoted_blocks") == 4
        assert await player.load(first, deadline=0) == 4

    make_world(gpu_blocks=4, host_blocks=64).run(story)


def test_a_cold_block_is_dropped_when_host_is_full(make_world: MakeWorld) -> None:
    async def story(world: World) -> None:
        player = world.player()
        first, second = chain("a", 4), chain("b", 8)
        await player.put(first)
        await world.settle()
        assert await bring_up(world, first) == (4, MissReason.NONE)
        await world.evict_host(first)
        await player.put(second)
        await world.settle()
        assert await bring_up(world, second[:4]) == (4, MissReason.NONE)
        assert on_gpu(world, first) == "----"
        assert world.tiers(first) == "dddd"
        assert not world.counts("demoted_blocks")

    make_world(gpu_blocks=4, host_blocks=8).run(story)
