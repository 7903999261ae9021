"""A warm restart: how long until the next daemon serves what the last one had in memory."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.cli.bench.chains import BLOCK_BYTES, Chains, settle
from kvstore.cli.bench.figure import Figure, times
from kvstore.cli.child import ChildDaemon, ChildError
from kvstore.cli.connect import connect
from kvstore.client import Client
from kvstore.errors import ServerUnavailable
from kvstore.keys import Keys
from kvstore.units import MIB, format_bytes

__all__ = ["measure"]

_CHAIN_BLOCKS: Final = 64
_CHAIN_BYTES: Final = _CHAIN_BLOCKS * BLOCK_BYTES
# Slab groups are not filled to the last slot.
_SPARE_BYTES: Final = 512 * MIB
_WAIT_S: Final = 60.0
_LOOK_AGAIN_S: Final = 0.01


def _until_back(client: Client) -> None:
    """Wait until a client that has lost its daemon is attached to the next one."""
    end = time.perf_counter() + _WAIT_S
    while True:
        with contextlib.suppress(ServerUnavailable):
            client.hello()
            if client.attachment.wait_active(_WAIT_S):
                return
        if time.perf_counter() > end:
            raise ChildError("the client did not find the next daemon")
        time.sleep(_LOOK_AGAIN_S)


class _Daemons:
    """One daemon after the other on one state directory."""

    def __init__(self, directory: Path, pool_bytes: int) -> None:
        self._directory = directory
        self._options = ["--host-pool", str(pool_bytes)]
        self.running: ChildDaemon | None = None

    def start(self) -> ChildDaemon:
        self.running = ChildDaemon(self._directory, [*self._options, "--save-host"])
        return self.running

    def stop(self) -> float:
        """Stop the daemon; return the seconds until its process was gone."""
        assert self.running is not None
        begin = time.perf_counter()
        running, self.running = self.running, None
        if running.stop() != 0:
            raise ChildError("the daemon did not stop in order")
        return time.perf_counter() - begin

    def clear(self) -> None:
        """Leave no memory behind: the last one gives back what the one before it kept."""
        if self.running is not None:
            self.running.stop()
        ChildDaemon(self._directory, [*self._options, "--discard-host"]).stop()


class _Contents:
    """Chains that fill the pool, all bytes of which are known."""

    def __init__(self, client: Client, chains: int) -> None:
        self._chains = Chains(client, "bench-restart")
        self._blocks = np.random.default_rng(3).integers(
            0, 256, (_CHAIN_BLOCKS, BLOCK_BYTES), np.uint8
        )
        self._out = np.empty_like(self._blocks)
        self.keys: list[Keys] = []
        for number in range(chains):
            self.keys.append(self._chains.next(_CHAIN_BLOCKS))
            end = time.perf_counter() + _WAIT_S
            while self._chains.space.put(self.keys[-1], self._of(number)) < _CHAIN_BLOCKS:
                if time.perf_counter() > end:
                    raise ChildError("put did not store every block")

    def _of(self, number: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        self._blocks[:, :8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
        return self._blocks

    def read(self, number: int) -> None:
        """Read a chain back.

        Raises:
            ChildError: a block is missing or wrong.
        """
        got = self._chains.space.get(self.keys[number], self._out, timeout_s=_WAIT_S)
        if got != _CHAIN_BLOCKS or not np.array_equal(self._out, self._of(number)):
            raise ChildError(f"{got} of {_CHAIN_BLOCKS} blocks came back, or wrong ones")


def _host_hits(client: Client) -> int:
    return sum(int(tier.hit_blocks) for tier in client.stats().tiers if tier.tier == 2)


def _until_checked(client: Client, blocks: int) -> None:
    end = time.perf_counter() + _WAIT_S
    while int(client.stats().counters["adopted_checked_blocks"]) < blocks:
        if time.perf_counter() > end:
            raise ChildError("what was adopted was not checked in time, or is damaged")
        time.sleep(_LOOK_AGAIN_S)


def measure(directory: Path, rounds: int, size: int) -> list[Figure]:
    """Restart a daemon that holds `size` bytes in memory, while one client lives on.

    Every block is read back in every round, and must come from memory.

    Raises:
        ChildError: a daemon does not come up, or a block is missing or wrong.
    """
    chains = max(1, size // _CHAIN_BYTES)
    blocks = chains * _CHAIN_BLOCKS
    ready, empty, back, first, checked, stops = [], [], [], [], [], []
    with contextlib.ExitStack() as stack:
        other = directory / "empty"
        other.mkdir()
        daemons = _Daemons(directory, chains * _CHAIN_BYTES + _SPARE_BYTES)
        stack.callback(daemons.clear)
        client = stack.enter_context(connect(daemons.start().address))
        contents = _Contents(client, chains)
        for _ in range(rounds):
            settle()
            stops.append(daemons.stop())
            with ChildDaemon(other, ["--host-pool", str(_SPARE_BYTES)]) as fresh:
                empty.append(fresh.start_seconds)
            ready.append(daemons.start().start_seconds)
            begin = time.perf_counter()
            _until_back(client)
            back.append(time.perf_counter() - begin)
            contents.read(chains - 1)
            first.append(time.perf_counter() - begin)
            _until_checked(client, blocks)
            checked.append(time.perf_counter() - begin)
            for number in range(chains - 1):
                contents.read(number)
            if _host_hits(client) != blocks:
                raise ChildError(f"{_host_hits(client)} of {blocks} blocks came from memory")
    name = f"restart with {format_bytes(blocks * BLOCK_BYTES)}"
    return [
        times(f"{name}, exec to ready", ready, empty, "empty start", target_ms=2000.0),
        times(f"{name}, SIGTERM to exit", stops),
        times(f"{name}, ready to client attached", back),
        times(f"{name}, ready to {format_bytes(_CHAIN_BYTES)} read", first),
        times(f"{name}, ready to all checked", checked),
    ]
