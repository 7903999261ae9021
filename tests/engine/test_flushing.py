"""The way to the disk: order, room, faults, and when a slot may be used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engine_invariants import check
from engine_world import World, chain, spec_of, until

from kvstore.engine import disk_room
from kvstore.index import Flush
from kvstore.index.lmdb_store import MetaStore, StoreDamaged
from kvstore.index.records import BlockRecord
from kvstore.tiers.base import Slot, TierName
from kvstore.tiers.faulty import Fault, FaultKind, Faulty
from kvstore.tiers.throttled import Throttled

Make = Callable[..., World]


class Watched(MetaStore):
    """Remembers, per commit, what it put and deleted; may fail."""

    log: list[tuple[list[BlockRecord], list[bytes]]]
    durable: dict[bytes, Slot]
    failing = False

    def commit_blocks(
        self,
        store_id: bytes,
        puts: Sequence[BlockRecord],
        deletes: Sequence[tuple[bytes, bytes]],
    ) -> None:
        if self.failing:
            raise StoreDamaged("here", "input/output error", 5)
        super().commit_blocks(store_id, puts, deletes)
        if not hasattr(self, "log"):
            self.log, self.durable = [], {}
        self.log.append((list(puts), [key for _, key in deletes]))
        for _, key in deletes:
            self.durable.pop(key, None)
        for record in puts:
            self.durable[record.key] = Slot(record.segment, record.slot)


class Honest:
    """A disk tier that refuses to write where a durable record points."""

    def __init__(self, disk: Any) -> None:
        object.__setattr__(self, "disk", disk)
        object.__setattr__(self, "store", None)
        object.__setattr__(self, "synced", set())
        object.__setattr__(self, "written", set())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.disk, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("store", "synced", "written"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.disk, name, value)

    async def write(self, transfers: Any) -> Any:
        taken = set(getattr(self.store, "durable", {}).values())
        for transfer in transfers:
            assert transfer.slot not in taken, "a slot is reused while a durable record names it"
        outcomes = await self.disk.write(transfers)
        self.written.update(transfer.slot for transfer in transfers)
        return outcomes

    async def sync(self) -> None:
        before = set(self.written)
        await self.disk.sync()
        self.synced |= before
        self.written -= before


def _held(world: World) -> dict[bytes, Slot]:
    return {b.key: b.disk for b in world.space.blocks.values() if b.disk is not None}


def test_a_slot_is_not_used_again_before_the_delete_of_its_record_is_durable(
    make_world: Make,
) -> None:
    """Chains that push each other out of a small disk, over and over."""

    async def story(world: World) -> None:
        world.disk.store = store = world.store
        player = world.player()
        for n in range(12):
            assert await player.put(chain(f"churn{n}", 6), step=3) == 6
        await world.settle()
        assert isinstance(store, Watched)
        assert store.durable == _held(world)
        assert len(_held(world)) == 16
        deleted = [key for _, keys in store.log for key in keys]
        assert len(deleted) >= 72 - 16
        # Everything that a record ever named was synced first.
        named = {Slot(r.segment, r.slot) for puts, _ in store.log for r in puts}
        assert named <= world.disk.synced
        check(world.engine, quiet=True)

    make_world(host_blocks=12, disk_blocks=16, store_class=Watched, wrap=Honest).run(story)


@pytest.mark.parametrize("deletes_at_once", [1, 4096])
def test_a_key_that_leaves_and_comes_back_keeps_its_new_record(
    make_world: Make, monkeypatch: pytest.MonkeyPatch, deletes_at_once: int
) -> None:
    # With one a transaction the new record is durable before the delete of the old one.
    monkeypatch.setattr(disk_room, "_DELETES_AT_ONCE", deletes_at_once)

    async def story(world: World) -> None:
        world.disk.store = world.store
        player = world.player()
        keys = chain("back", 4)
        for _ in range(8):
            assert await player.put(keys) == 4
            await until(lambda: "d" in world.tiers(keys) or "b" in world.tiers(keys))
            await world.engine.removal.evict(world.space, None, None)
        assert await player.put(keys) == 4
        await world.settle()
        assert isinstance(world.store, Watched)
        assert world.store.durable == _held(world)
        assert world.tiers(keys) == "bbbb"
        check(world.engine, quiet=True)

    async def after(world: World) -> None:
        assert world.engine.recovered_blocks == 4
        assert await world.player().load(chain("back", 4)) == 4

    world = make_world(disk_blocks=16, store_class=Watched, wrap=Honest)
    world.run(story, after)


def test_a_chain_longer_than_the_disk_keeps_its_head_and_the_rest_stays_in_host(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("longer", 20)
        assert await player.put(keys) == 20
        _, skipped = await world.engine.flush(10)
        assert {b.key for b in skipped} == set(keys[8:])
        assert world.tiers(keys) == "b" * 8 + "h" * 12
        # It is not tried again all the time: nothing else could leave.
        tried = world.counts("flush_refused_blocks")
        await asyncio.sleep(0.1)
        assert world.counts("flush_refused_blocks") == tried
        check(world.engine, quiet=True)

    make_world(disk_blocks=8).run(story)


def test_new_chains_push_out_old_ones_and_no_more_than_they_need(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        old = [chain(f"old{n}", 8) for n in range(4)]
        for keys in old:
            await player.put(keys)
        await world.settle()
        assert world.disk.usage().used_bytes >= 31 * 4096
        await player.put(chain("new", 4))
        await world.settle()
        # A 32nd of the disk is made free ahead of need: one block.
        on_disk = [sum(t in "bd" for t in world.tiers(keys)) for keys in old]
        assert on_disk[1:] == [8, 8, 8]
        assert 2 <= on_disk[0] <= 4
        assert world.tiers(old[0])[: on_disk[0]] == "b" * on_disk[0]
        check(world.engine, quiet=True)

    make_world(disk_blocks=32).run(story)


def test_what_was_refused_goes_to_disk_when_something_else_leaves(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        pinned, keys = chain("pinned", 8), chain("later", 4)
        await player.put(pinned)
        await world.settle()
        await world.engine.pin(world.space, pinned, 0)
        await world.evict_host(pinned)
        await player.put(keys)
        await world.settle()
        assert world.tiers(keys) == "hhhh"
        assert world.block(keys[0]).flush is Flush.REFUSED
        await world.engine.pins.unpin(world.space, None)
        await until(lambda: world.tiers(keys) == "bbbb", 5)
        assert world.tiers(pinned)[4:] == "----"
        await world.settle()
        check(world.engine, quiet=True)

    make_world(disk_blocks=8).run(story)


def test_a_failed_write_refuses_that_block_and_those_below_it(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys, other = chain("torn", 6), chain("fine", 3)
        grant, slots, _ = await player.reserve(9)
        both = [*keys, *other]
        player.write(slots, both)
        items = [
            (slot, key, None if i in (0, 6) else both[i - 1])
            for i, (slot, key) in enumerate(zip(slots, both, strict=True))
        ]
        world.disk.plan.append(Fault(FaultKind.IO_ERROR, "write", call=0, block=2))
        world.engine.commit(
            player.attachment, player.attachment.id, grant, None, items, world.space
        )
        await world.settle()
        assert world.tiers(keys) == "bbhhhh"
        assert world.tiers(other) == "bbb"
        check(world.engine, quiet=True)
        # It is tried again by itself.
        await until(lambda: world.tiers(keys) == "bbbbbb", 8)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(wrap=Faulty).run(story)


def test_a_failed_sync_makes_no_record(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("unsynced", 5)
        world.disk.plan.append(Fault(FaultKind.IO_ERROR, "sync"))
        await player.put(keys)
        _, skipped = await world.engine.flush(5)
        assert len(skipped) == 5
        await world.settle()
        assert world.store.load_blocks(world.disk.store_id).records == []
        assert world.disk.usage().used_bytes == 0
        check(world.engine, quiet=True)
        world.disk.plan.clear()
        assert await world.engine.flush(5) == (5, [])

    make_world(wrap=Faulty).run(story)


def test_a_failed_commit_keeps_slots_out_of_use_until_it_is_known_what_is_durable(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        world.disk.store = store = world.store
        assert isinstance(store, Watched)
        player = world.player()
        keys, gone = chain("uncommitted", 5), chain("gone", 3)
        await player.put(gone)
        await world.settle()
        store.failing = True
        await world.engine.removal.evict(world.space, None, None)
        await player.put(keys)
        _, skipped = await world.engine.flush(5)
        assert len(skipped) == 5
        # Neither the deleted blocks' slots nor those just written are free.
        assert world.disk.usage().used_bytes == 8 * 4096
        assert world.counts("index_commit_failures") > 0
        failures = world.counts("index_commit_failures")
        await asyncio.sleep(0.3)
        assert world.counts("index_commit_failures") <= failures + 1, "a busy loop"
        store.failing = False
        await world.engine.flush(5)
        await world.settle()
        assert store.durable == _held(world)
        assert world.tiers(keys) == "bbbbb"
        assert world.disk.usage().used_bytes == 5 * 4096
        check(world.engine, quiet=True)

    make_world(store_class=Watched, wrap=Honest).run(story)


def test_a_stop_does_not_wait_for_a_slow_disk_beyond_its_time(make_world: Make) -> None:
    rate = [0.001]  # bytes a second: a block takes weeks

    async def stop(world: World) -> None:
        await world.player().put(chain("slow", 6))
        await until(lambda: world.engine.flusher is not None and world.engine.flusher._running)
        await world.engine.quiesce(0.05)

    async def again(world: World) -> None:
        assert world.store.load_blocks(world.disk.store_id).records == []
        assert world.disk.usage().used_bytes == 0
        await world.player().put(chain("slow", 6))
        await world.settle()
        assert world.tiers(chain("slow", 6)) == "bbbbbb"
        check(world.engine, quiet=True)

    world = make_world(wrap=lambda disk: Throttled(disk, rate[0]))
    world.run(stop)
    rate[0] = 1e12
    world.run(again)


def test_a_full_disk_whose_index_fails_does_not_keep_memory(make_world: Make) -> None:
    async def story(world: World) -> None:
        world.disk.store = store = world.store
        assert isinstance(store, Watched)
        player = world.player()
        await player.put(chain("old", 16))
        await world.settle()
        store.failing = True
        # Slots on disk are free once what left is durable; nothing is. Memory goes on.
        for name in ("first", "second", "third"):
            assert await player.put(chain(name, 8), deadline=60.0) == 8
        _, skipped = await world.engine.flush(60)
        assert skipped
        assert "index" in world.engine.why_skipped
        assert world.engine.disk_state == (
            "degraded: the index cannot be committed: here: input/output error"
        )
        check(world.engine)
        store.failing = False
        await until(lambda: world.tiers(chain("third", 8)) == "bbbbbbbb", 60)
        assert world.engine.disk_state == "ok"
        await world.settle()
        assert store.durable == _held(world)
        check(world.engine, quiet=True)

    make_world(store_class=Watched, wrap=Honest, host_blocks=12, disk_blocks=16).run(story)


def test_flush_covers_what_was_committed_before_it_and_nothing_that_comes_after(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        player = world.player()
        before, after = chain("before", 4), chain("after", 4)
        await player.put(before)
        flush = asyncio.create_task(world.engine.flush(5))
        await asyncio.wait_for(world.disk.stalled.wait(), 60)
        await player.put(after)
        world.disk.plan.clear()
        world.disk.resume()
        assert await flush == (4, [])
        await world.settle()

    stall = [Fault(FaultKind.STALL, "write")]
    make_world(wrap=lambda disk: Faulty(disk, stall)).run(story)


def test_flush_gives_up_at_its_deadline(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        await player.put(chain("stuck", 2))
        with pytest.raises(TimeoutError):
            await world.engine.flush(0.1)
        world.disk.plan.clear()
        world.disk.resume()
        assert await world.engine.flush(5) == (2, [])

    stall = [Fault(FaultKind.STALL, "sync")]
    make_world(wrap=lambda disk: Faulty(disk, stall)).run(story)


def test_under_evict_blocks_go_to_disk_when_they_must_leave_host(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        first = chain("first", 8)
        await player.put(first)
        await world.settle()
        assert world.tiers(first) == "h" * 8
        second = chain("second", 8)
        assert await player.put(second, step=2) == 8
        await world.settle()
        assert "-" not in world.tiers(first) + world.tiers(second)
        assert await player.load(first) == 8
        # One chain longer than host, all of whose blocks are protected, still fits on disk.
        long = chain("long", 20)
        assert await player.put(long, step=2) == 20
        assert await player.load(long[:8]) == 8
        _, skipped = await world.engine.flush(5)
        assert skipped == []
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=12, flush_on_commit=False).run(story)


def test_another_block_size_takes_a_segment_of_a_full_disk(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        wide = await world.engine.open_space(spec_of("wide", (8192,)))
        cold, warm = chain("cold", 8), chain("warm", 8)
        await player.put(cold)
        await player.put(warm)
        await world.settle()
        assert await player.load(warm) == 8
        keys = chain("wide", 2)
        assert await player.put(keys, step=1, space=wide) == 2
        await until(lambda: wide.disk_blocks == 2, 5)
        await world.settle()
        # The colder chain paid, tails first; both are still runs.
        cold_left = sum(t in "bd" for t in world.tiers(cold))
        warm_left = sum(t in "bd" for t in world.tiers(warm))
        assert cold_left <= 4
        assert warm_left >= cold_left
        assert cold_left + warm_left >= 8
        check(world.engine, quiet=True)

    make_world(host_blocks=64, disk_blocks=16).run(story)


def test_two_block_sizes_on_a_full_disk_do_not_take_each_other_s_new_segments_for_ever(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        wide = await world.engine.open_space(spec_of("wide", (8192,)))
        disk, small, large = world.disk, world.space.shape, wide.shape
        disk.want(small, 8)
        await until(lambda: disk.free_blocks(small) == 8)
        taken = disk.allocate(small, 6)
        # As the flusher does: it asks at once, and takes when its turn comes on the loop.
        disk.on_room = lambda: disk.want(large, 2)
        disk.want(small, 12)
        disk.want(large, 2)
        await until(lambda: not disk.allocating, 3)
        disk.on_room = lambda: None
        assert max(number for number, *_ in disk.segments()) < 20
        disk.free(taken)

    make_world(disk_blocks=16).run(story)


def test_a_full_disk_of_pinned_blocks_of_another_size_is_left_alone(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        wide = await world.engine.open_space(spec_of("wide", (8192,)))
        keys = chain("keep", 16)
        await player.put(keys)
        await world.settle()
        await world.engine.pin(world.space, keys, 0)
        await world.evict_host()
        await player.put(chain("w", 2), step=1, space=wide)
        _, skipped = await world.engine.flush(5)
        assert len(skipped) == 2
        assert world.tiers(keys) == "d" * 16
        check(world.engine, quiet=True)

    make_world(host_blocks=64, disk_blocks=16).run(story)


def test_promotions_that_wait_for_memory_do_not_stop_the_flush_that_frees_it(
    make_world: Make,
) -> None:
    """All that could leave the disk is held by moves that wait for host slots, and those for it."""

    async def story(world: World) -> None:
        player = world.player()
        old, new = chain("old", 8), chain("new", 8)
        await player.put(old)
        await world.evict_host()
        prefetch = world.engine.tickets.prefetch
        hog = world.player()
        grant, slots, _ = await hog.reserve(8)
        ticket = asyncio.create_task(prefetch(world.space, old, 1, 0.0, 0, 20.0))
        await asyncio.sleep(0.02)
        assert world.block(old[-1]).disk_refs == 1
        hog.write(slots, new)
        hog.commit(grant, slots, new)
        _, skipped = await world.engine.flush(10)
        assert len(skipped) == 8
        _, done, _ = await ticket
        assert done
        await world.settle()
        check(world.engine, quiet=True)

    make_world(host_blocks=8, disk_blocks=8).run(story)


def test_a_stop_just_when_work_comes_up_is_not_forgotten(make_world: Make) -> None:
    async def story(world: World) -> None:
        flusher = world.engine.flusher
        assert flusher is not None
        for _ in range(20):
            await asyncio.sleep(0)
            flusher.wake()
            await asyncio.wait_for(flusher.stop(), 60)
            flusher.start()

    make_world().run(story)


def test_evicting_from_disk_leaves_what_is_below_consistent(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("evict", 6)
        await player.put(keys)
        await world.settle()
        lease, _ = player.acquire(keys[:2])
        removed, skipped = await world.engine.removal.evict(world.space, None, TierName.DISK)
        assert (removed, skipped) == (6, 0)
        assert world.tiers(keys) == "hhhhhh"
        removed, skipped = await world.engine.removal.evict(world.space, None, TierName.HOST)
        assert (removed, skipped) == (4, 2)
        player.release(lease)
        # What left the disk by request goes there again when asked to.
        assert await world.engine.flush(5) == (2, [])
        assert await player.put(keys) == 6
        await world.settle()
        check(world.engine, quiet=True)

    make_world().run(story)
