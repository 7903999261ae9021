"""What a call costs: the daemon's handler, and a client's round trip beside an echo's."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.cli.bench.chains import Chains
from kvstore.cli.bench.echo import EchoClient
from kvstore.cli.bench.figure import Figure, times
from kvstore.cli.child import Child, ChildDaemon, ChildError
from kvstore.cli.connect import connect
from kvstore.client import Client

__all__ = ["measure"]

_KEYS: Final = 1000
_CALLS_A_ROUND: Final = 50
# On the wire: keys of 16 bytes, one byte a block for its tier, 16 bytes a block for its slot.
_REQUEST_BYTES: Final = _KEYS * 16 + 64
_LOOKUP_ANSWER_BYTES: Final = _KEYS
_ACQUIRE_ANSWER_BYTES: Final = _KEYS * 17


def _handler_seconds(client: Client, name: str) -> float:
    for timing in client.stats().timings:
        if timing.name == name:
            return timing.p50_seconds
    raise ChildError(f"the daemon has no timing named {name}")


def _timed(call: Callable[[], int]) -> float:
    begin = time.perf_counter()
    blocks = call()
    seconds = time.perf_counter() - begin
    if blocks != _KEYS:
        raise ChildError(f"{blocks} of {_KEYS} blocks were found")
    return seconds


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Measure Lookup and Acquire of a leading run of 1,000 keys."""
    options = ["--host-pool", "64MiB"]
    echo_address = f"unix://{directory / 'echo.sock'}"
    lookups, lookup_echoes, acquires, acquire_echoes = [], [], [], []
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(ChildDaemon(directory, options))
        client = stack.enter_context(connect(daemon.address))
        server = Child(
            "echo server",
            [sys.executable, "-m", "kvstore.cli.bench.echo", echo_address],
            directory / "echo.log",
        )
        stack.callback(server.kill)
        server.line(timeout_s=30)
        echo = EchoClient(echo_address)
        stack.callback(echo.close)
        chains = Chains(client, "bench-calls", block_bytes=4096)
        chains.ready()
        space, keys = chains.space, chains.next(_KEYS)
        if space.put(keys, np.zeros((_KEYS, 4096), np.uint8)) != _KEYS:
            raise ChildError("put did not store every block")

        def lookup() -> int:
            return space.lookup(keys).blocks

        def acquire() -> int:
            lease = space.acquire(keys).result(timeout=30)
            blocks = lease.blocks
            lease.release()
            return blocks

        for _ in range(rounds * _CALLS_A_ROUND):
            lookups.append(_timed(lookup))
            lookup_echoes.append(echo.seconds(_REQUEST_BYTES, _LOOKUP_ANSWER_BYTES))
            acquires.append(_timed(acquire))
            acquire_echoes.append(echo.seconds(_REQUEST_BYTES, _ACQUIRE_ANSWER_BYTES))
        handler = {name: _handler_seconds(client, name) for name in ("lookup", "acquire")}
    return [
        times("Lookup of 1,000 keys, handler", [handler["lookup"]], target_ms=0.4),
        times("Lookup of 1,000 keys, client", lookups, lookup_echoes, "echo RPC"),
        times("Acquire of 1,000 keys, handler", [handler["acquire"]]),
        times("Acquire of 1,000 keys, client", acquires, acquire_echoes, "echo RPC"),
    ]
