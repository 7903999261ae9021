"""Room ahead of need: stores into a full pool beside stores into an empty one, in turns."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.cli.bench.chains import settle
from kvstore.cli.bench.cold_disk import WAIT_S, ColdDisk
from kvstore.cli.bench.figure import Figure, most, rate
from kvstore.cli.child import ChildError
from kvstore.units import KIB, MIB

__all__ = ["measure"]

_BLOCK: Final = 256 * KIB
_POOL: Final = 512 * MIB
_CHAIN: Final = 64
# Stored in one go: half of the pool, after which the disk catches up.
_CHAINS: Final = _POOL // 2 // (_CHAIN * _BLOCK)
_SLOWER: Final = 0.9
_INLINE_PERCENT: Final = 1.0


def _store(disk: ColdDisk) -> float:
    """Store half a pool of new chains; return the seconds. Then wait for the disk."""
    chains = [disk.chains.next(_CHAIN) for _ in range(_CHAINS)]
    content = np.zeros((_CHAIN, _BLOCK), np.uint8)
    begin = time.perf_counter()
    for keys in chains:
        if disk.space.put(keys, content, timeout_s=WAIT_S) != _CHAIN:
            raise ChildError("put did not store every block")
    seconds = time.perf_counter() - begin
    disk.flush()
    settle()
    return seconds


def _reserves(stats: Any) -> int:
    """Return how many calls of Reserve an answer to Stats knows of."""
    return sum(int(timing.count) for timing in stats.timings if timing.name == "reserve")


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Measure on the disk as it is: stores are to be limited by memory, not by a throttle.

    Raises:
        ChildError: something was not stored.
    """
    full, empty = [], []
    reserves = inline = 0
    with contextlib.ExitStack() as stack:
        disk = ColdDisk(stack, directory, block_bytes=_BLOCK, host_bytes=_POOL, rate=None)
        # Every page of the pool is touched by daemon and client, and the pool is full.
        for _ in range(3):
            _store(disk)
        for _ in range(rounds):
            before = disk.client.stats()
            full.append(_store(disk))
            after = disk.client.stats()
            inline += after.counters["evictions_inline"] - before.counters["evictions_inline"]
            reserves += _reserves(after) - _reserves(before)
            disk.cool()
            settle()
            empty.append(_store(disk))
            # Full again: two halves.
            _store(disk)
    size = _CHAINS * _CHAIN * _BLOCK
    share = 100 * inline / max(1, reserves)
    return [
        rate("stores into a full pool", size, full, empty, "an empty, used one", _SLOWER),
        most(f"inline evictions in {reserves} reserves", "%", [share], _INLINE_PERCENT),
    ]
