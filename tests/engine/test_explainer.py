"""Every reason for which a run ends is named, and what it was that was in the way."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from engine_world import SLOT_BYTES, Gate, World, chain, spec_of, until
from unmapping_clients import unmapping

from kvstore.engine.explainer import explain_keys, explain_request
from kvstore.engine.explanation import Explanation, miss_words
from kvstore.engine.recent import MOST_RECENT
from kvstore.errors import InvalidRequest
from kvstore.index import GhostList, Pressure
from kvstore.miss import Miss, MissReason
from kvstore.space import SpaceSpec
from kvstore.tiers.base import TierName
from kvstore.tiers.faulty import Fault, FaultKind, Faulty

Make = Callable[..., World]
Story = Callable[[World], Awaitable[None]]


def explained(world: World, keys: list[bytes]) -> Explanation:
    """Explain keys; that must change nothing."""
    index = world.engine.index
    before = index.sequence, world.engine.counters.miss_blocks.copy()
    found = explain_keys(world.engine, world.space, world.space.epoch, keys)
    assert (index.sequence, world.engine.counters.miss_blocks) == before
    return found


def says(found: Explanation, reason: MissReason, blocks: int, *words: str) -> None:
    assert (found.miss.reason, found.blocks) == (reason, blocks)
    text = "\n".join(found.lines)
    for word in words:
        assert word in text, text


def test_what_is_there_and_what_was_never_seen(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("seen", 4)
        await world.player().put(keys[:3])
        says(explained(world, keys[:3]), MissReason.NONE, 3, "3 of 3 blocks", "48 tokens")
        found = explained(world, keys)
        says(found, MissReason.NEVER_SEEN, 3, "block 3", keys[3].hex()[:16], "never seen")
        assert (found.asked, found.key, found.others) == (4, keys[3], [])
        await world.evict_host(keys[1:3])
        says(explained(world, keys[:3]), MissReason.NONE, 3, "1 in host, 2 in disk", "tokens/s")

    make_world().run(story)


def test_what_is_forgotten(make_world: Make) -> None:
    async def story(world: World) -> None:
        world.engine.index.ghosts = GhostList(1)
        keys = chain("old", 3)
        await world.player().put(keys)
        await world.settle()
        await world.engine.removal.evict(world.space, keys, None)
        says(explained(world, keys[2:]), MissReason.FORGOTTEN, 0, "forgotten")

    make_world().run(story)


def test_evictions_name_tier_and_pressure(make_world: Make) -> None:
    async def asked(world: World) -> None:
        keys = chain("asked", 2)
        await world.player().put(keys)
        await world.engine.removal.evict(world.space, keys, None)
        found = explained(world, keys)
        says(found, MissReason.EVICTED, 0, "evicted from host at 20", "asked for its eviction")
        assert found.miss.unix_seconds > 0

    async def crowded(world: World) -> None:
        first = chain("first", 4)
        await world.player().put(first)
        await world.player().put(chain("second", 8))
        found = explained(world, first)
        says(found, MissReason.EVICTED, found.blocks, "from host", "room was needed")

    async def shrunk(world: World) -> None:
        keys = chain("shrunk", 8)
        await world.player().put(keys)
        # The client still maps what is given back: the call would wait for it.
        await world.engine.resizer.resize(TierName.HOST, 4 * SLOT_BYTES, 0.0)
        await until(lambda: len(world.space.blocks) <= 4)
        found = explained(world, keys)
        says(found, MissReason.EVICTED, found.blocks, "from host", "the tier was made smaller")

    async def limited(world: World) -> None:
        await world.engine.limits.change(world.space, {"host_bytes": 4 * SLOT_BYTES})
        first = chain("first", 4)
        for keys in (first, chain("second", 4)):
            await world.player().put(keys)
        found = explained(world, first)
        says(found, MissReason.EVICTED, found.blocks, "from host", "over the quota of its space")

    for story in (asked, crowded, shrunk, limited):
        make_world(host_blocks=8, disk_blocks=0).run(story)


def test_eviction_from_disk(make_world: Make) -> None:
    async def story(world: World) -> None:
        first = chain("first", 4)
        await world.player().put(first)
        await world.evict_host(first)
        for name in ("second", "third"):
            keys = chain(name, 4)
            await world.player().put(keys)
            await world.settle()
        found = explained(world, first)
        says(found, MissReason.EVICTED, found.blocks, "evicted from disk", "room was needed")

    make_world(host_blocks=8, disk_blocks=8).run(story)


def test_an_ended_epoch(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("epoch", 2)
        await world.player().put(keys)
        old = world.space.epoch
        await world.engine.removal.bump_epoch(world.space)
        says(explained(world, keys), MissReason.OTHER_EPOCH, 0, "other epoch")
        found = explain_keys(world.engine, world.space, old, keys)
        says(found, MissReason.OTHER_EPOCH, 0, f"at epoch {old + 1}, not {old}")

    make_world().run(story)


def test_what_is_in_flight_names_the_missing_shards(make_world: Make) -> None:
    async def story(world: World) -> None:
        world.space = space = await world.engine.open_space(spec_of("tp", (4096, 4096, 4096)))
        owner = world.player("owner")
        ranks = [world.player(f"rank{r}") for r in range(3)]
        [key] = chain("flight", 1)
        grant, slots, _ = await owner.reserve(1, writers=ranks, space=space)
        ranks[1].commit(grant, slots, [key], shard=1, owner=owner, space=space)
        found = explained(world, [key])
        says(found, MissReason.NOT_READY, 0, "missing of 3 shards: 0, 2", "rank0", "rank2")
        assert "rank1" not in "".join(found.lines)
        for rank in (0, 2):
            ranks[rank].commit(grant, slots, [key], shard=rank, owner=owner, space=space)
        says(explained(world, [key]), MissReason.NONE, 1)

    make_world().run(story)


def test_damage(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("damaged", 3)
        await world.player().put(keys)
        await world.settle()
        world.engine.removal.corrupt(world.block(keys[1]))
        says(explained(world, keys), MissReason.CORRUPT, 1, "corrupt: damaged in disk")

    make_world().run(story)


def test_a_disk_that_does_not_deliver(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("io", 3)
        player = world.player()
        await player.put(keys)
        await world.evict_host(keys)
        world.disk.plan.append(Fault(FaultKind.IO_ERROR, "read", call=0, block=0))
        lease, _ = player.acquire(keys, deadline=60)
        await player.lease_done(lease)
        found = explain_request(world.engine, str(lease))
        says(found, MissReason.IO_ERROR, 0, "I/O error", "now: block 0 is there, in disk")

    make_world(wrap=Faulty).run(story)


def test_what_was_too_late(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("late", 3)
        player = world.player("engine-7")
        await player.put(keys)
        await world.evict_host(keys[1:])
        lease, _ = player.acquire(keys)
        found = explain_request(world.engine, str(lease))
        says(found, MissReason.DEADLINE, 1, "engine-7", "did not wait", "1 of 3 blocks")
        world.disk.closed = True
        lease, answer = player.acquire(keys, deadline=0.05)
        assert answer.growing
        await player.lease_done(lease)
        found = explain_request(world.engine, str(lease))
        says(found, MissReason.DEADLINE, 1, "in disk and not ready within the client's 50 ms")
        world.disk.closed = False
        await until(lambda: world.disk.reads)
        while world.disk.reads:
            world.disk.let(0)
        await world.settle()

    make_world(wrap=Gate).run(story)


def test_what_was_not_worth_waiting_for_comes_with_the_prediction(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("slow", 3)
        player = world.player()
        await player.put(keys)
        await world.evict_host(keys[1:])
        path = world.engine.promoter.path  # type: ignore[union-attr]
        for at in range(50):  # one second a block
            path.end(path.begin(SLOT_BYTES, at), SLOT_BYTES, at + 1.0)
        lease, _ = player.acquire(keys, deadline=60, rate=16 / 0.001)
        found = explain_request(world.engine, str(lease))
        says(found, MissReason.NOT_WORTH_WAITING, 1, "loading 2 blocks from disk", "2 ms")

    make_world().run(story)


def test_a_client_whose_leases_are_full_and_one_whose_lease_was_revoked(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("cap", 4)
        player = world.player()
        await player.put(keys)
        lease, _ = player.acquire(keys)
        says(explain_request(world.engine, str(lease)), MissReason.LEASE_CAP, 2, "lease cap")
        says(explained(world, keys), MissReason.NONE, 4, "hold 2 blocks at a time")
        player.release(lease)
        lease, _ = player.acquire(keys[:2])
        await world.engine.removal.bump_epoch(world.space)
        says(explain_request(world.engine, str(lease)), MissReason.LEASE_LOST, 2, "revoked")

    make_world(lease_cap_blocks=2).run(story)


def test_a_pool_in_which_nothing_may_make_room(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("noroom", 4)
        await player.put(keys)
        await world.evict_host()
        # Pinned blocks that are nowhere else fill the pool.
        world.disk.plan.append(Fault(FaultKind.NO_SPACE, "write"))
        full = chain("full", 8)
        assert await player.put(full, step=2) == 8
        await world.settle()
        await world.engine.pin(world.space, full, 0)
        lease, _ = player.acquire(keys, deadline=20)
        await player.lease_done(lease)
        found = explain_request(world.engine, str(lease))
        says(found, MissReason.NO_ROOM, 0, "no room", "now: block 0 is there, in disk")

    make_world(host_blocks=8, wrap=Faulty).run(story)


def test_memory_that_went_to_blocks_of_another_size(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        old = [chain(f"old{i}", 8) for i in range(4)]
        for keys in old:
            await player.put(keys)
        wide = await world.engine.open_space(spec_of("wide", (8192,)))
        async with unmapping(world, player):
            for i in range(8):
                await player.put(chain(f"wide{i}", 4), space=wide)
        gone = [explained(world, keys) for keys in old if keys[-1] not in world.space.blocks]
        told = [line for found in gone for line in found.lines]
        assert any("its memory was given to blocks of another size" in line for line in told), told

    make_world(host_blocks=32, disk_blocks=0).run(story)


def test_what_hangs_on_a_damaged_block(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("below", 3)
        await world.player().put(keys)
        await world.settle()
        world.engine.removal.corrupt(world.block(keys[0]))
        says(explained(world, keys[2:]), MissReason.CORRUPT, 0, "below a block that was")

    make_world().run(story)


def test_every_reason_has_words_of_its_own() -> None:
    """A new one must be explained, and in a story above: this list is theirs."""
    told = {reason: miss_words(Miss(reason, "disk", 1e9), Pressure.NONE) for reason in MissReason}
    del told[MissReason.NONE]
    assert len(set(told.values())) == len(told)
    here, limits = Path(__file__), Path(__file__).parents[1] / "limits" / "test_ttl.py"
    source = here.read_text() + limits.read_text()
    for reason in told:
        story = rf"(says\([^\n]*|miss\.reason is )MissReason\.{reason.name}\b"
        assert re.search(story, source), reason
    for pressure in set(Pressure) - {
        Pressure.NONE,
        Pressure.EXPIRED,
    }:  # that is a reason of its own
        words = _TOLD[pressure]
        assert words in pressure.value
        assert source.count(words) > 1, pressure


# Pressures that stories above know by a part of their words.
_TOLD = {
    Pressure.ROOM: "room was needed",
    Pressure.RESIZE: "the tier was made smaller",
    Pressure.REQUEST: "asked for its eviction",
    Pressure.QUOTA: "over the quota of its space",
    Pressure.OTHER_SIZE: "its memory was given to blocks of another size",
}

SPEC = spec_of("model")
OTHERS: dict[str, object] = {
    "model": "other",
    "dtype": "float8",
    "block_tokens": 32,
    "shard_bytes": (8192,),
    "layout": "hnd",
    "weights_version": "v2",
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "pipeline_rank": 1,
    "context_parallel": 2,
    "kv_group": "1",
    "hash_algorithm": "engine-own",
    "root_seed": "7",
    "tenant": "b",
    "key_bytes": 32,
}


def test_every_field_of_a_space_is_tried() -> None:
    assert set(OTHERS) == {field.name for field in fields(SpaceSpec)}


@pytest.mark.parametrize("field", OTHERS)
def test_the_field_that_makes_it_another_space_is_named(make_world: Make, field: str) -> None:
    wanted = OTHERS[field]

    async def story(world: World) -> None:
        changed = {field: wanted, **({"pipeline_parallel": 2} if field == "pipeline_rank" else {})}
        spec: SpaceSpec = replace(SPEC, **changed)  # type: ignore[arg-type]
        other = await world.engine.open_space(spec)
        keys = chain("elsewhere", 3)
        # Where the field changes keys, no chain of this one is there.
        stored = [k * 2 for k in keys] if spec.key_bytes == 32 else keys
        stored = [k[::-1] for k in stored] if field in ("block_tokens", "root_seed") else stored
        await world.player().put(stored[:2], space=other)
        world.space = await world.engine.open_space(SPEC)
        found = explained(world, keys)
        [there] = found.others
        assert there.space is other
        same = stored == keys
        assert there.blocks == (2 if same else 0)
        differing = {d.field: (d.here, d.there) for d in there.differences}
        text = ",".join(map(str, wanted)) if isinstance(wanted, tuple) else str(wanted)
        assert differing[field][1] == text
        implied = {"hash_algorithm": {"key_bytes"}, "pipeline_rank": {"pipeline_parallel"}}.get(
            field, set()
        )
        assert set(differing) - {field} <= implied
        says(found, MissReason.NEVER_SEEN, 0, f"{field} is ", repr(text))

    make_world(block_bytes=16384).run(story)


def test_requests_are_found_by_their_name_and_the_oldest_forgotten(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("named", 3)
        player = world.player()
        await player.put(keys[:2])

        def ask(lease: int, name: str) -> None:
            world.engine.acquire(player.attachment, world.space, lease, keys, 0.0, request_id=name)
            player.release(lease)

        ask(1_000_001, "chat-1")
        ask(1_000_002, "chat-1")
        found = explain_request(world.engine, "chat-1")
        says(found, MissReason.NEVER_SEEN, 2, "lease 1000001", "lease 1000002", "now: never seen")
        # An engine's own words behind the id that its user knows.
        ask(1_000_003, "chat-2-0af3")
        found = explain_request(world.engine, "chat-2")
        says(found, MissReason.NEVER_SEEN, 2, "lease 1000003")
        for lease in range(2_000_000, 2_000_000 + MOST_RECENT):
            ask(lease, "")
        with pytest.raises(InvalidRequest, match=re.escape("'chat-1' is none of the last 1,024")):
            explain_request(world.engine, "chat-1")
        with pytest.raises(InvalidRequest, match="request_id"):
            explain_request(world.engine, "9" * 5000)

    make_world().run(story)
