"""One suite for every way that a client's bytes can take."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import AsyncClient, Client, Keys, SpaceSpec, chain_keys
from kvstore.conformance import Store, StoreConformance

T = TypeVar("T")

_fresh = itertools.count()


def spec_of(shard_bytes: tuple[int, ...]) -> SpaceSpec:
    return SpaceSpec(model=f"m{shard_bytes}", dtype="d", block_tokens=4, shard_bytes=shard_bytes)


class Adapter:
    """A client's space as the suite sees it."""

    def __init__(self, space: Any, run: Callable[[Any], Any]) -> None:
        self._space = space
        self._run = run
        self.block_bytes: int = space.block_bytes

    def fresh_keys(self, count: int) -> Keys:
        return chain_keys(range(4 * count), 4, salt=str(next(_fresh)).encode())

    def put(self, keys: Keys, blocks: NDArray[np.uint8]) -> int:
        stored: int = self._run(self._space.put(keys, blocks))
        return stored

    def get(self, keys: Keys, out: NDArray[np.uint8]) -> int:
        blocks: int = self._run(self._space.get(keys, out))
        return blocks

    def lookup(self, keys: Keys) -> int:
        blocks: int = self._run(self._space.lookup(keys)).blocks
        return blocks


class Loop:
    """An event loop on a thread, which is how other runtimes use the async client."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="class")
def shared_daemon(
    new_daemon: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """One daemon for a whole suite: the chains of its tests do not meet."""
    daemon = new_daemon(tmp_path_factory.mktemp("d"), "--host-pool", "256MiB").start()
    yield daemon
    daemon.end()


class ClientConformance(StoreConformance):
    """The suite against a client with a daemon."""

    use_tcp = False
    map_memory = True

    @pytest.fixture(autouse=True)
    def _address(self, shared_daemon: Any) -> None:
        self.address = shared_daemon.tcp if self.use_tcp else shared_daemon.address


class SyncConformance(ClientConformance):
    @contextlib.contextmanager
    def connect(self, shard_bytes: tuple[int, ...]) -> Iterator[Store]:
        with Client(self.address, map_memory=self.map_memory) as client:
            space = client.open_space(spec_of(shard_bytes))
            assert client.attachment.wait_active(10) == self.map_memory
            yield Adapter(space, lambda value: value)


class AsyncConformance(ClientConformance):
    @contextlib.contextmanager
    def connect(self, shard_bytes: tuple[int, ...]) -> Iterator[Store]:
        loop = Loop()
        client = AsyncClient(self.address, map_memory=self.map_memory)
        try:
            space = loop.run(client.open_space(spec_of(shard_bytes)))
            assert client.attachment.wait_active(10) == self.map_memory
            yield Adapter(space, loop.run)
        finally:
            loop.run(client.close())
            loop.close()


class TestMapped(SyncConformance):
    pass


class TestStreamedOverTcp(SyncConformance):
    use_tcp = True
    map_memory = False


class TestAsyncMapped(AsyncConformance):
    pass


class TestAsyncStreamedOverTcp(AsyncConformance):
    use_tcp = True
    map_memory = False
