"""Clients of every kind with one interface: mapped, streaming, on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from oracle_model import SPECS

from kvstore import AsyncClient, Client, Keys
from kvstore.aio import AsyncSpace
from kvstore.client import Space
from kvstore.flows import Hit
from kvstore.proto import kvstore_pb2 as pb

__all__ = ["AsyncPlayer", "MappedPlayer", "Player", "StreamingPlayer"]

T = TypeVar("T")

_CALL_SECONDS = 120.0
_CLIENT_SECONDS = 30.0


def told_quotas(limits: pb.Limits) -> dict[str, int]:
    """Return the quotas in a message, by tier."""
    tiers = ("gpu", "host", "disk")
    return {t: getattr(limits, f"{t}_bytes") for t in tiers if limits.HasField(f"{t}_bytes")}


class Player:
    """One client with a handle of each space."""

    def open(self) -> list[int]:
        """Open the spaces; return their epochs."""
        raise NotImplementedError

    def put(self, space: int, keys: Keys, blocks: NDArray[np.uint8], timeout: float) -> int:
        raise NotImplementedError

    def get(self, space: int, keys: Keys, timeout: float) -> NDArray[np.uint8]:
        raise NotImplementedError

    def lookup(self, space: int, keys: Keys) -> Hit:
        raise NotImplementedError

    def prefetch(self, space: int, keys: Keys, wait: float, *, cancel: bool) -> int:
        """Ask, wait, and cancel or not; return what arrived."""
        raise NotImplementedError

    def evict(self, space: int, keys: Keys | None, tier: str | None) -> int:
        """Return how many copies stayed."""
        raise NotImplementedError

    def pin(self, space: int, keys: Keys) -> int:
        raise NotImplementedError

    def unpin(self, space: int) -> None:
        raise NotImplementedError

    def limit(self, space: int, tier: str, size: int | None) -> dict[str, int]:
        """Set or clear a quota; return what was set for the space by then."""
        raise NotImplementedError

    def live_for(self, space: int, seconds: float | None) -> None:
        """Set or clear how long unused blocks stay."""
        raise NotImplementedError

    def bump(self, space: int) -> int:
        """End the epoch; return the new one, which the player's handle is bound to."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class MappedPlayer(Player):
    """A synchronous client that copies by itself."""

    def __init__(self, address: str, *, mapped: bool = True, name: str = "mapped") -> None:
        self.client = Client(address, name=name, timeout_s=_CLIENT_SECONDS, map_memory=mapped)
        self.spaces: list[Space] = []

    def open(self) -> list[int]:
        self.spaces = [self.client.open_space(spec) for spec in SPECS]
        return [space.epoch for space in self.spaces]

    def put(self, space: int, keys: Keys, blocks: NDArray[np.uint8], timeout: float) -> int:
        return self.spaces[space].put(keys, blocks, timeout_s=timeout)

    def get(self, space: int, keys: Keys, timeout: float) -> NDArray[np.uint8]:
        return self.spaces[space].get(keys, timeout_s=timeout)

    def lookup(self, space: int, keys: Keys) -> Hit:
        return self.spaces[space].lookup(keys)

    def prefetch(self, space: int, keys: Keys, wait: float, *, cancel: bool) -> int:
        ticket = self.spaces[space].prefetch(keys, deadline_s=wait or 0.5)
        blocks = ticket.wait(wait)
        if cancel:
            ticket.cancel()
        return blocks

    def evict(self, space: int, keys: Keys | None, tier: str | None) -> int:
        return self.spaces[space].evict(keys, tier).skipped

    def pin(self, space: int, keys: Keys) -> int:
        return self.spaces[space].pin(keys)

    def unpin(self, space: int) -> None:
        self.spaces[space].unpin()

    def limit(self, space: int, tier: str, size: int | None) -> dict[str, int]:
        return told_quotas(self.spaces[space].set_quotas(**{tier: size}).own_limits)

    def live_for(self, space: int, seconds: float | None) -> None:
        self.spaces[space].set_ttl(seconds)

    def bump(self, space: int) -> int:
        self.spaces[space] = self.spaces[space].bump_epoch()
        return self.spaces[space].epoch

    def close(self) -> None:
        self.client.close()


class StreamingPlayer(MappedPlayer):
    """A client of another machine, as far as the daemon can tell."""

    def __init__(self, address: str) -> None:
        super().__init__(address, mapped=False, name="streaming")


class AsyncPlayer(Player):
    """An asyncio client, on a loop of its own."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = self._run(self._connect(address))
        self._spaces: list[AsyncSpace] = []

    async def _connect(self, address: str) -> AsyncClient:
        return AsyncClient(address, name="asyncio", timeout_s=_CLIENT_SECONDS)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_SECONDS)

    def open(self) -> list[int]:
        self._spaces = [self._run(self._client.open_space(spec)) for spec in SPECS]
        return [space.epoch for space in self._spaces]

    def put(self, space: int, keys: Keys, blocks: NDArray[np.uint8], timeout: float) -> int:
        return self._run(self._spaces[space].put(keys, blocks, timeout_s=timeout))

    def get(self, space: int, keys: Keys, timeout: float) -> NDArray[np.uint8]:
        return self._run(self._spaces[space].get(keys, timeout_s=timeout))

    def lookup(self, space: int, keys: Keys) -> Hit:
        return self._run(self._spaces[space].lookup(keys))

    def prefetch(self, space: int, keys: Keys, wait: float, *, cancel: bool) -> int:
        async def work() -> int:
            ticket = await self._spaces[space].prefetch(keys, deadline_s=wait or 0.5)
            blocks = await ticket.wait(wait)
            if cancel:
                await ticket.cancel()
            return blocks

        return self._run(work())

    def evict(self, space: int, keys: Keys | None, tier: str | None) -> int:
        return self._run(self._spaces[space].evict(keys, tier)).skipped

    def pin(self, space: int, keys: Keys) -> int:
        return self._run(self._spaces[space].pin(keys))

    def unpin(self, space: int) -> None:
        self._run(self._spaces[space].unpin())

    def limit(self, space: int, tier: str, size: int | None) -> dict[str, int]:
        return told_quotas(self._run(self._spaces[space].set_quotas(**{tier: size})).own_limits)

    def live_for(self, space: int, seconds: float | None) -> None:
        self._run(self._spaces[space].set_ttl(seconds))

    def bump(self, space: int) -> int:
        self._spaces[space] = self._run(self._spaces[space].bump_epoch())
        return self._spaces[space].epoch

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def in_threads(works: list[Callable[[], T]]) -> list[T | BaseException]:
    """Do things at the same time; return what each returned or raised."""
    results: list[T | BaseException] = [RuntimeError("did not end")] * len(works)

    def work(at: int) -> None:
        try:
            results[at] = works[at]()
        except BaseException as error:  # noqa: BLE001 - looked at by the caller
            results[at] = error

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_CALL_SECONDS)
        assert not thread.is_alive(), "a call hangs"
    return results
