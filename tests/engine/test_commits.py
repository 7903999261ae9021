"""Blocks appear when the last shard is committed, and only then; every other slot comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from engine_invariants import check
from engine_world import Player, World, chain, spec_of

from kvstore.errors import InvalidRequest
from kvstore.index import SpaceIndex
from kvstore.outcomes import CommitOutcome as Outcome

Make = Callable[..., World]
THREE = spec_of("three", (4096, 4096, 4096))


async def _three(world: World) -> tuple[SpaceIndex, list[Player]]:
    space = await world.engine.open_space(THREE)
    ranks = [world.player(f"rank{r}") for r in range(3)]
    return space, ranks


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_ranks_disagreed_about_residency_a_block_appears_with_its_last_shard(
    make_world: Make, order: tuple[int, ...]
) -> None:
    async def story(world: World) -> None:
        space, ranks = await _three(world)
        keys = chain("c", 4)
        grant, slots, _ = await ranks[0].reserve(4, writers=ranks, space=space)
        for n, rank in enumerate(order):
            assert not space.blocks
            ranks[rank].write(slots, keys, [rank], space)
            outcomes = ranks[rank].commit(
                grant, slots, keys, shard=rank, owner=ranks[0], space=space
            )
            assert outcomes == [Outcome.COMMITTED if n == 2 else Outcome.WAITING] * 4
            check(world.engine)
        _, answer = ranks[1].acquire(keys, space=space)
        assert answer.blocks == 4
        assert ranks[1].reads_right(keys, answer.slots.slots, space)
        await world.settle()

    make_world().run(story)


def test_skewed_ranks_rank_0_is_a_whole_chain_ahead(make_world: Make) -> None:
    async def story(world: World) -> None:
        space, ranks = await _three(world)
        keys = chain("skew", 12)
        grants = [await ranks[0].reserve(3, writers=ranks, space=space) for _ in range(4)]
        parts = [keys[i : i + 3] for i in range(0, 12, 3)]

        def commit(rank: int, at: int) -> list[Outcome]:
            grant, slots, _ = grants[at]
            parent = parts[at - 1][-1] if at else None
            return ranks[rank].commit(
                grant, slots, parts[at], parent=parent, shard=rank, owner=ranks[0], space=space
            )

        for at in range(4):
            assert commit(0, at) == [Outcome.WAITING] * 3
        for at in range(4):
            assert commit(2, at) == [Outcome.WAITING] * 3
        for at in range(4):
            assert commit(1, at) == [Outcome.COMMITTED] * 3
            check(world.engine)
        assert len(space.blocks) == 12
        await world.settle()
        check(world.engine, quiet=True)

    make_world().run(story)


def test_two_writers_of_one_chain_the_second_one_s_slots_come_back(make_world: Make) -> None:
    async def story(world: World) -> None:
        one, two = world.player(), world.player()
        keys = chain("twice", 5)
        grant, slots, _ = await one.reserve(5)
        again, others, _ = await two.reserve(5)
        one.write(slots, keys)
        assert one.commit(grant, slots[:3], keys[:3]) == [Outcome.COMMITTED] * 3
        assert two.commit(again, others, keys) == [Outcome.EXISTS] * 3 + [Outcome.COMMITTED] * 2
        assert one.commit(grant, slots[3:], keys[3:], parent=keys[2]) == [Outcome.EXISTS] * 2
        assert one.commit(grant, slots, keys) == [Outcome.UNKNOWN_SLOT] * 5
        await world.settle()
        check(world.engine, quiet=True)
        assert world.host.usage().used_bytes == 5 * 4096

    make_world().run(story)


def test_a_commit_under_another_key_than_the_other_rank_s_frees_the_slot(make_world: Make) -> None:
    async def story(world: World) -> None:
        space, ranks = await _three(world)
        keys, other = chain("a", 1), chain("b", 1)
        grant, slots, _ = await ranks[0].reserve(1, writers=ranks, space=space)

        def commit(rank: int, names: list[bytes]) -> list[Outcome]:
            return ranks[rank].commit(grant, slots, names, shard=rank, owner=ranks[0], space=space)

        assert commit(0, keys) == [Outcome.WAITING]
        assert commit(1, other) == [Outcome.KEY_MISMATCH]
        # The last writer is the one that frees it: until then it may be writing.
        assert world.host.usage().used_bytes == space.shape.block_bytes
        assert commit(2, keys) == [Outcome.KEY_MISMATCH]
        assert world.host.usage().used_bytes == 0
        assert not space.blocks
        assert not space.pending_keys
        check(world.engine, quiet=True)

    make_world().run(story)


def test_a_chain_without_its_parent_is_refused_and_its_slots_come_back(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("orphan", 3)
        grant, slots, _ = await player.reserve(2)
        assert player.commit(grant, slots, keys[1:], parent=keys[0]) == (
            [Outcome.PARENT_MISSING] * 2
        )
        assert world.host.usage().used_bytes == 0
        assert not len(world.engine.grants)

    make_world().run(story)


def test_the_parent_s_writer_gives_up_after_the_child_was_committed_elsewhere(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        space, ranks = await _three(world)
        keys = chain("late", 2)
        first, parent_slot, _ = await ranks[0].reserve(1, writers=ranks, space=space)
        second, child_slot, _ = await ranks[0].reserve(1, writers=ranks, space=space)
        for rank in (0, 1):
            ranks[rank].commit(
                first, parent_slot, keys[:1], shard=rank, owner=ranks[0], space=space
            )
        for rank in range(3):
            outcome = ranks[rank].commit(
                second,
                child_slot,
                keys[1:],
                parent=keys[0],
                shard=rank,
                owner=ranks[0],
                space=space,
            )
        assert outcome == [Outcome.PARENT_MISSING]
        world.engine.abort(
            ranks[2].attachment, ranks[0].attachment.id, first, None, all_shards=False
        )
        assert not space.blocks
        assert world.host.usage().used_bytes == 0
        check(world.engine, quiet=True)

    make_world().run(story)


def test_abort_by_one_shard_dooms_the_slot_but_waits_for_the_other_writers(
    make_world: Make,
) -> None:
    async def story(world: World) -> None:
        space, ranks = await _three(world)
        keys = chain("abort", 2)
        grant, slots, _ = await ranks[0].reserve(2, writers=ranks, space=space)
        owner = ranks[0].attachment.id

        def abort(rank: int, which: Any = None, *, everything: bool = False) -> None:
            world.engine.abort(ranks[rank].attachment, owner, grant, which, all_shards=everything)

        ranks[0].commit(grant, slots, keys, shard=0, space=space)
        abort(1, slots[:1])
        assert world.host.usage().used_bytes == 2 * space.shape.block_bytes
        outcomes = ranks[2].commit(grant, slots, keys, shard=2, owner=ranks[0], space=space)
        assert outcomes == [Outcome.ABORTED, Outcome.WAITING]
        assert world.host.usage().used_bytes == space.shape.block_bytes
        with pytest.raises(InvalidRequest, match="owner"):
            abort(1, everything=True)
        abort(0, everything=True)
        assert world.host.usage().used_bytes == 0
        assert not space.blocks
        check(world.engine, quiet=True)

    make_world().run(story)


def test_a_shard_of_somebody_else_cannot_be_committed(make_world: Make) -> None:
    async def story(world: World) -> None:
        space, ranks = await _three(world)
        keys = chain("mine", 1)
        grant, slots, _ = await ranks[0].reserve(1, writers=ranks, space=space)
        with pytest.raises(InvalidRequest, match="shard"):
            ranks[1].commit(grant, slots, keys, shard=0, owner=ranks[0], space=space)
        stranger = world.player()
        with pytest.raises(InvalidRequest, match="shard"):
            stranger.commit(grant, slots, keys, owner=ranks[0], space=space)
        ranks[0].detach()
        ranks[1].detach()
        ranks[2].detach()
        assert world.host.usage().used_bytes == 0

    make_world().run(story)


def test_reserving_twice_under_one_id_grants_once(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("again", 4)
        grant, slots, _ = await player.reserve(4)
        _, same, _ = await player.reserve(4, grant_id=grant)
        assert same == slots
        player.write(slots[:2], keys[:2])
        player.commit(grant, slots[:2], keys[:2])
        # What is settled is somebody else's by now: a late answer must not name it.
        _, left, _ = await player.reserve(4, grant_id=grant)
        assert left == slots[2:]
        assert world.engine.grants.slot_count == 2
        player.detach()
        await world.settle()
        check(world.engine, quiet=True)

    make_world().run(story)


def test_the_same_reserve_asked_for_twice_at_once_while_the_pool_is_full(make_world: Make) -> None:
    import asyncio

    async def story(world: World) -> None:
        hog, player = world.player(), world.player()
        await hog.reserve(8)
        _, none, _ = await hog.reserve(1, deadline=0)
        assert not none
        both = [asyncio.create_task(player.reserve(2, grant_id=77)) for _ in range(2)]
        await asyncio.sleep(0)
        hog.detach()
        (_, one, _), (_, two, _) = await asyncio.gather(*both)
        assert one == two
        assert world.engine.grants.slot_count == 2
        player.detach()
        assert world.host.usage().used_bytes == 0

    make_world(host_blocks=8).run(story)


def test_one_client_cannot_be_granted_more_than_its_cap(make_world: Make) -> None:
    from kvstore.outcomes import Shortage

    async def story(world: World) -> None:
        player = world.player()
        _, slots, shortage = await player.reserve(10)
        assert (len(slots), shortage) == (6, Shortage.CLIENT_CAP)
        _, slots, shortage = await player.reserve(1)
        assert (len(slots), shortage) == (0, Shortage.CLIENT_CAP)
        _, slots, shortage = await world.player().reserve(3)
        assert (len(slots), shortage) == (3, Shortage.NONE)

    make_world(grant_cap_blocks=6).run(story)
