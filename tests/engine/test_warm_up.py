"""After a start the hottest chains come up by themselves, and get in nobody's way."""

from __future__ import annotations

from collections.abc import Callable

from engine_invariants import check
from engine_world import Gate, World, chain, until

Make = Callable[..., World]


async def _store(world: World) -> None:
    """Store three chains; the second is used last."""
    player = world.player()
    for name in ("old", "hot", "new"):
        await player.put(chain(name, 8))
    assert await player.load(chain("hot", 8)) == 8
    await world.settle()
    flusher = world.engine.flusher
    assert flusher is not None
    await world.engine._housekeeper.save_touches()


def test_the_hottest_chains_come_up_within_the_budget(make_world: Make) -> None:
    async def next_boot(world: World) -> None:
        await until(lambda: world.counts("warm_up_blocks") == 12)
        await world.settle()
        assert world.tiers(chain("hot", 8)) == "b" * 8
        assert world.tiers(chain("new", 8)) == "bbbbdddd"
        assert world.tiers(chain("old", 8)) == "d" * 8
        check(world.engine, quiet=True)

    make_world().run(_store)
    make_world(warm_up_blocks=12).run(next_boot)


def test_it_leaves_room_for_those_who_come_and_keeps_shape(make_world: Make) -> None:
    """A budget larger than the pool is no reason to fill it."""

    async def next_boot(world: World) -> None:
        await until(lambda: world.counts("warm_up_blocks") == 14)
        await world.settle()
        assert world.tiers(chain("hot", 8)) == "b" * 8
        assert world.tiers(chain("new", 8)) == "bbbbbbdd"
        assert world.counts("evicted_blocks_host") == 0

    make_world().run(_store)
    make_world(host_blocks=16, warm_up_blocks=1000).run(next_boot)


def test_a_request_overtakes_it(make_world: Make) -> None:
    """Whoever asks for a block that is to come later gets it now."""

    async def next_boot(world: World) -> None:
        player = world.player()
        lease, answer = player.acquire(chain("old", 8), deadline=60)
        assert answer.growing
        world.disk.closed = False
        while world.disk.reads:
            world.disk.let(0)
        assert (await player.lease_done(lease)).blocks == 8
        player.release(lease)
        await until(lambda: world.counts("warm_up_blocks") == 24)
        await world.settle()
        check(world.engine, quiet=True)

    class Shut(Gate):
        def __init__(self, disk: object) -> None:
            super().__init__(disk)
            self.closed = True

    make_world().run(_store)
    make_world(warm_up_blocks=64, wrap=Shut).run(next_boot)
