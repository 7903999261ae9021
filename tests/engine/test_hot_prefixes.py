"""Prompts' beginnings that are asked for most: counted within bounds, and what they share."""

from __future__ import annotations

from collections.abc import Callable

from engine_world import World, chain

from kvstore.engine.hot_prefixes import HotPrefixes
from kvstore.tiers.base import TierName

Make = Callable[..., World]


def ask(world: World, keys: list[bytes], times: int = 1) -> None:
    """Load a chain some times."""
    player = world.player()
    for _ in range(times):
        lease, _ = player.acquire(keys)
        player.release(lease)


def test_what_at_least_half_of_the_requests_share(make_world: Make) -> None:
    async def story(world: World) -> None:
        system = chain("system", 5)
        chats = [[*system, *chain(f"chat{i}", 3)] for i in range(6)]
        other = chain("other", 4)
        for keys in (*chats, other):
            await world.player().put(keys)
        for keys in chats:
            ask(world, keys)
        ask(world, other, 2)
        await world.evict_host(chats[0][5:])
        first, second = world.engine.hot_prefixes.hottest(10)
        assert (first.space, first.root, first.key) == (world.space, system[0], system[4])
        assert (first.requests, first.hit_blocks, first.shared_blocks) == (6, 6 * 8, 5)
        assert first.tiers == {TierName.GPU: 0, TierName.HOST: 5, TierName.DISK: 5}
        assert (second.root, second.key, second.requests) == (other[0], other[3], 2)
        # The same lease, asked for again because the answer was lost, is the same request.
        player = world.player()
        for _ in range(3):
            lease, _ = player.acquire(other, lease_id=4711)
        player.release(lease)
        assert world.engine.hot_prefixes.hottest(10)[1].requests == 3
        # One that parts from all others early does not make the common part shorter.
        odd = [*system[:2], *chain("odd", 1)]
        await world.player().put(odd)
        ask(world, odd)
        assert world.engine.hot_prefixes.hottest(1)[0].shared_blocks == 5

    make_world().run(story)


def test_streams_count_and_what_nothing_was_found_of_does_not(make_world: Make) -> None:
    async def story(world: World) -> None:
        keys = chain("streamed", 4)
        ask(world, keys)
        assert len(world.engine.hot_prefixes) == 0
        await world.player().put(keys[:3])
        world.engine.start_read(world.space, keys).close()
        # The rest of a long chain, as a lease that goes on from another one asks for it.
        world.engine.start_read(world.space, keys[1:], keys[0]).close()
        [found] = world.engine.hot_prefixes.hottest(10)
        assert (found.requests, found.hit_blocks, found.key) == (1, 3, keys[2])
        await world.settle()
        await world.engine.removal.evict(world.space, keys, None)
        assert world.engine.hot_prefixes.hottest(10) == []

    make_world().run(story)


def test_the_list_is_bounded_and_what_was_hot_goes(make_world: Make) -> None:
    async def story(world: World) -> None:
        now = [0.0]
        hot = HotPrefixes(world.engine.index, lambda: now[0])
        heads = {name: chain(name, 1) for name in ("old", "new")}
        for keys in heads.values():
            await world.player().put(keys)
            ask(world, keys)

        def use(name: str, times: int) -> None:
            run = [world.block(heads[name][0])]
            for _ in range(times):
                hot.used(world.space, run, heads[name])

        use("old", 1000)
        use("new", 100)
        assert [found.root for found in hot.hottest(2)] == [heads["old"][0], heads["new"][0]]
        # An hour later, six half lives, a tenth of the requests are hotter.
        now[0] += 3600
        use("new", 100)
        assert [found.root for found in hot.hottest(2)] == [heads["new"][0], heads["old"][0]]
        assert [found.idle_seconds for found in hot.hottest(2)] == [0.0, 3600.0]
        # A year: warmth is not more than a number can hold.
        for _ in range(365):
            now[0] += 86400
            use("old", 2)
            use("new", 1)
        assert [found.root for found in hot.hottest(2)] == [heads["old"][0], heads["new"][0]]
        assert hot.hottest(1)[0].requests == 1000 + 2 * 365
        # Thousands that are asked for once do not push out what is asked for all the time.
        for i in range(300):
            keys = chain(f"once{i}", 1)
            await world.player().put(keys)
            hot.used(world.space, [world.block(keys[0])], keys)
            use("old", 1)
            await world.settle()
            await world.engine.removal.evict(world.space, keys, None)
        assert len(hot) == 64
        assert hot.hottest(1)[0].root == heads["old"][0]

    make_world().run(story)
