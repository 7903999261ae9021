"""Who waits for something scarce gets it in turn."""

from __future__ import annotations

import asyncio
from collections import Counter

from kvstore.engine.wake import Signal


def test_of_those_who_wait_for_what_comes_one_at_a_time_each_gets_its_turn() -> None:
    """Slots of a full pool went to the same few clients for as long as these came back."""

    async def story() -> Counter[int]:
        signal, there, got = Signal(), [0], Counter[int]()

        async def client(number: int) -> None:
            while True:
                while not there[0]:
                    await signal.wait(60.0)
                there[0] -= 1
                got[number] += 1
                await asyncio.sleep(0)

        clients = [asyncio.create_task(client(number)) for number in range(20)]
        await asyncio.sleep(0)
        for _ in range(400):
            there[0] += 1
            signal.notify()
            while there[0]:
                await asyncio.sleep(0)
            for _ in range(10):
                await asyncio.sleep(0)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return got

    assert set(asyncio.run(story()).values()) == {20}


def test_who_stops_waiting_is_forgotten() -> None:
    async def story() -> None:
        signal = Signal()
        waiting = asyncio.create_task(signal.wait(60.0))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not await signal.wait(0.001)
        assert not signal._waiters

    asyncio.run(story())
