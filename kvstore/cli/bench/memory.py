"""Local put and get beside plain copies of the same blocks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.cli.bench.chains import BLOCK_BYTES, Chains, settle
from kvstore.cli.bench.figure import Figure, rate
from kvstore.cli.bench.raw import copy_seconds, touched
from kvstore.cli.child import ChildDaemon, ChildError
from kvstore.cli.connect import connect

__all__ = ["measure"]

_CALL_BLOCKS: Final = 64
_POOL_BLOCKS: Final = 4 * _CALL_BLOCKS


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Measure put and get of 64 blocks a call.

    Every put stores new keys. The slots have been written by this process before, except in the
    first puts, which are reported apart. Digests run, as they always do; the write policy is
    ``evict``, so nothing is written to disk meanwhile.
    """
    size = _CALL_BLOCKS * BLOCK_BYTES
    source, target = touched(_CALL_BLOCKS, BLOCK_BYTES), touched(_CALL_BLOCKS, BLOCK_BYTES)
    out = touched(_CALL_BLOCKS, BLOCK_BYTES)
    source[:] = np.random.default_rng(1).integers(0, 256, source.shape, np.uint8)
    options = [
        *("--host-pool", str(_POOL_BLOCKS * BLOCK_BYTES + (64 << 20))),
        *("--disk", str(directory / "disk"), "--disk-capacity", "1GiB"),
        *("--write-policy", "evict"),
    ]
    first, puts, put_copies, gets, get_copies = [], [], [], [], []
    with ChildDaemon(directory, options) as daemon, connect(daemon.address) as client:
        chains = Chains(client, "bench-memory")
        space = chains.space

        def put() -> float:
            keys = chains.next(_CALL_BLOCKS)
            begin = time.perf_counter()
            stored = space.put(keys, source)
            seconds = time.perf_counter() - begin
            if stored != len(keys):
                raise ChildError(f"put stored {stored} of {len(keys)} blocks")
            return seconds

        def get() -> float:
            begin = time.perf_counter()
            found = space.get(chains.last, out)
            seconds = time.perf_counter() - begin
            if found != _CALL_BLOCKS or not np.array_equal(out, source):
                raise ChildError("get did not return what was put")
            return seconds

        chains.ready()
        for _ in range(_POOL_BLOCKS // _CALL_BLOCKS - 1):
            first.append(put())
        space.evict()
        for _ in range(_POOL_BLOCKS // _CALL_BLOCKS):
            put()  # so that no slot is new to this process, wherever the next ones lie
            space.evict()
        for _ in range(rounds):
            settle()
            puts.append(put())
            settle()  # the digests of what was put must not slow the baseline down
            put_copies.append(copy_seconds(source, target))
            gets.append(get())
            get_copies.append(copy_seconds(target, out))
            space.evict()
    return [
        rate("put, local", size, puts, put_copies, "memcpy", target=0.6),
        rate("put, local, first touch", size, first),
        rate("get, local", size, gets, get_copies, "memcpy", target=0.6),
    ]
