"""What is special about the asynchronous driver: cancelling, and waiting on other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kvstore import AsyncClient, ClientClosed, DeadlineExceeded, SpaceSpec, chain_keys
from kvstore.attach import Lease
from kvstore.miss import Miss
from kvstore.steps import Await, Flow, Grow, Pause, Work
from kvstore.wire import slot_array

NOBODY = "unix:///nonexistent/kvstore.sock"


def play(story: Callable[[AsyncClient], Any]) -> Any:
    async def run() -> Any:
        async with AsyncClient(NOBODY) as client:
            return await story(client)

    return asyncio.run(run())


def test_a_cancelled_call_first_stops_using_the_caller_s_memory() -> None:
    copying, release = threading.Event(), threading.Event()
    order: list[str] = []

    def copy() -> None:
        copying.set()
        release.wait(10)
        order.append("copied")

    def flow() -> Flow[None]:
        try:
            yield Work(copy)
        finally:
            order.append("cleaned up")

    async def story(client: AsyncClient) -> None:
        call = asyncio.create_task(client.run(flow()))
        await asyncio.to_thread(copying.wait, 10)
        call.cancel()
        await asyncio.sleep(0.01)
        call.cancel()  # impatience changes nothing
        await asyncio.sleep(0.01)
        assert not call.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    play(story)
    assert order == ["copied", "cleaned up"]


def test_an_answer_that_comes_after_a_cancelled_wait_is_still_taken() -> None:
    answer: Future[str] = Future()
    answer.set_running_or_notify_cancel()
    taken: list[str] = []

    def flow() -> Flow[None]:
        try:
            yield Await(answer, 10)
        finally:
            answer.add_done_callback(lambda it: taken.append(it.result()))

    async def story(client: AsyncClient) -> None:
        call = asyncio.create_task(client.run(flow()))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    play(story)
    assert not answer.cancelled()
    answer.set_result("lease")
    assert taken == ["lease"]


def test_waits_end_at_their_time_and_leave_the_future_alone() -> None:
    answer: Future[str] = Future()
    answer.set_running_or_notify_cancel()

    def flow() -> Flow[str]:
        with pytest.raises(DeadlineExceeded):
            yield Await(answer, 0.01)
        answer.set_result("late")
        late: str = yield Await(answer, 0.01)
        yield Pause(0.0)
        return late

    assert play(lambda client: client.run(flow())) == "late"


def test_a_lease_grows_from_another_thread() -> None:
    lease = Lease(1, b"boot", 1, lambda _lease: None)

    def flow() -> Flow[list[int]]:
        seen = [(yield Grow(lease, 0, 0.01))]
        threading.Timer(0.01, lease.extend, (0, slot_array([(1, 2, 3)]), b"\2")).start()
        seen.append((yield Grow(lease, 0, 10)))
        threading.Timer(0.01, lease.finish, (1, Miss())).start()
        seen.append((yield Grow(lease, 1, 10)))
        return seen

    assert play(lambda client: client.run(flow())) == [0, 1, 1]


def test_a_copy_s_own_error_reaches_the_flow() -> None:
    def fail() -> None:
        raise OSError(14, "bad address")

    def flow() -> Flow[str]:
        try:
            yield Work(fail)
        except OSError as error:
            return str(error)
        return "nothing"

    assert "bad address" in play(lambda client: client.run(flow()))


def test_many_calls_share_one_loop(daemon: Any) -> None:
    spec = SpaceSpec(model="aio", dtype="d", block_tokens=4, shard_bytes=(10_000, 20_000))

    async def one(space: Any, name: int) -> None:
        keys = chain_keys(range(40), 4, salt=str(name).encode())
        blocks = np.random.default_rng(name).integers(0, 256, (10, 30_000), np.uint8)
        assert await space.put(keys, blocks) == 10
        assert np.array_equal(await space.get(keys), blocks)

    async def story() -> None:
        async with AsyncClient(daemon.address) as client:
            space = await client.open_space(spec)
            await asyncio.gather(*(one(space, name) for name in range(40)))
            keys = chain_keys(range(40), 4, salt=b"0")
            ticket = await space.prefetch(keys)
            assert await ticket.wait() == 10
            await ticket.cancel()
            assert await space.pin(keys, ttl_s=60) == 10
            assert await space.unpin() == 10
            assert (await client.spaces())[0].blocks == 400
            assert (await client.hello()).boot_id == (await client.stats()).boot_id
        with pytest.raises(ClientClosed):
            await space.lookup(keys)

    asyncio.run(story())
