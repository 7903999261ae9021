"""What nobody waits for keeps those who come next waiting for one slow block, not for several."""

from __future__ import annotations

import asyncio

import pytest
from promoter_world import PromoterWorld
from virtual_time import run_in_virtual_time

from kvstore.units import KIB, MIB

BEHIND = -1


async def _under_way(rate: float, block_bytes: int, priority: int) -> int:
    """Return the most bytes that were under way at a time for one long job."""
    world = PromoterWorld(rate, block_bytes)
    world.promoter.start()
    await world.measured()
    done = world.ask(world.chain(200), priority).done
    most = 0
    while not done.done():
        most = max(most, world.promoter.path.in_flight)
        await asyncio.sleep(0.0005)
    await world.promoter.stop()
    return most


@pytest.mark.parametrize(
    ("rate", "block_bytes", "behind", "others"),
    [
        # A block takes 20 ms.
        (800e3, 16_000, 1, 3),
        # 5 ms: another one may begin after it.
        (400e6, 2_000_000, 2, 3),
        # As fast as a good disk: three batches of 3 ms each.
        (6e9, 2_000_000, 27, 27),
    ],
)
def test_how_much_is_under_way(rate: float, block_bytes: int, behind: int, others: int) -> None:
    most = run_in_virtual_time(_under_way(rate, block_bytes, BEHIND))
    assert most == pytest.approx(behind * block_bytes, rel=0.2)
    most = run_in_virtual_time(_under_way(rate, block_bytes, 0))
    assert most == pytest.approx(others * block_bytes, rel=0.2)


def test_a_request_waits_for_one_block_of_what_nobody_waits_for() -> None:
    async def story() -> tuple[float, float]:
        world = PromoterWorld(16 * KIB / 0.02, 16 * KIB)
        world.promoter.start()
        await world.measured()
        behind = world.ask(world.chain(100), BEHIND)
        await asyncio.sleep(0.25)
        took = await world.ask(world.chain(10)).done
        # The rest comes all the same, one block after the other.
        rest = await behind.done
        await world.promoter.stop()
        return took, rest

    took, rest = run_in_virtual_time(story())
    assert took <= 0.02 * 11 + 0.001
    assert rest == pytest.approx(0.02 * 110, rel=0.05)


def test_it_uses_all_of_a_fast_path() -> None:
    async def story() -> float:
        world = PromoterWorld(2e9, MIB)
        world.promoter.start()
        await world.measured()
        took = await world.ask(world.chain(2000), BEHIND).done
        await world.promoter.stop()
        return took

    assert run_in_virtual_time(story()) == pytest.approx(2000 * MIB / 2e9, rel=0.05)
