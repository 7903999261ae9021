"""Put and Get as byte streams over TCP, as clients that cannot map the pool use them."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.cli.bench.chains import BLOCK_BYTES, Chains, settle
from kvstore.cli.bench.figure import Figure, rate
from kvstore.cli.bench.raw import touched
from kvstore.cli.child import ChildDaemon, ChildError
from kvstore.client import Client

__all__ = ["measure"]

_BLOCKS: Final = 32


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Measure streamed put and get of 64 MiB a call."""
    size = _BLOCKS * BLOCK_BYTES
    address = f"127.0.0.1:{_free_port()}"
    source, out = touched(_BLOCKS, BLOCK_BYTES), touched(_BLOCKS, BLOCK_BYTES)
    source[:] = np.random.default_rng(3).integers(0, 256, source.shape, np.uint8)
    puts, gets = [], []
    options = ["--listen", address, "--host-pool", "512MiB"]
    with ChildDaemon(directory, options), Client(address, map_memory=False) as client:
        chains = Chains(client, "bench-stream")
        chains.ready()
        for _ in range(rounds):
            keys = chains.next(_BLOCKS)
            begin = time.perf_counter()
            stored = chains.space.put(keys, source)
            puts.append(time.perf_counter() - begin)
            settle()
            begin = time.perf_counter()
            found = chains.space.get(keys, out)
            gets.append(time.perf_counter() - begin)
            if stored != _BLOCKS or found != _BLOCKS or not np.array_equal(out, source):
                raise ChildError("get did not return what was put")
            chains.space.evict()
    return [rate("put, TCP stream", size, puts), rate("get, TCP stream", size, gets)]
