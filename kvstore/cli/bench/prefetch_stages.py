"""Stages that overlap: the first block of a chain, disk to host to client, disk to host to GPU."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.cli.bench.chains import settle
from kvstore.cli.bench.cold_disk import RATE, WAIT_S, ColdDisk
from kvstore.cli.bench.figure import Figure, rate, times
from kvstore.cli.child import ChildError
from kvstore.keys import Keys
from kvstore.units import MIB

__all__ = ["measure"]

# As large as blocks of 128 tokens are; 16 ms of the disk.
_BLOCK: Final = 4 * MIB
_CHAIN: Final = 32
_SLOWER: Final = 0.9


def _first_block(disk: ColdDisk, keys: Keys, rounds: int) -> Figure:
    """Time until the first block of a cold chain can be used, beside one block's own time."""
    taken = []
    for _ in range(rounds):
        disk.cool(keys)
        settle()
        begin = time.perf_counter()
        lease = disk.space.acquire(keys, deadline_s=WAIT_S).result(timeout=WAIT_S)
        blocks = lease.wait(WAIT_S, 0)
        taken.append(time.perf_counter() - begin)
        lease.release()
        if not blocks:
            raise ChildError("no block came")
    own = _BLOCK / RATE
    name = f"first of {len(keys)} cold blocks usable"
    return times(name, taken, [own], "its own read", target_ms=2 * own * 1e3)


def _prefetched(disk: ColdDisk, keys: Keys, tier: str) -> float:
    disk.space.evict(keys, tier="gpu")
    disk.cool(keys)
    settle()
    begin = time.perf_counter()
    if disk.space.prefetch(keys, tier=tier, deadline_s=WAIT_S).wait() != len(keys):
        raise ChildError("prefetch did not bring every block")
    return time.perf_counter() - begin


def _got(disk: ColdDisk, keys: Keys, out: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> float:
    disk.space.evict(keys, tier="gpu")
    disk.cool(keys)
    settle()
    begin = time.perf_counter()
    if disk.space.get(keys, out, timeout_s=WAIT_S) != len(keys):
        raise ChildError("get did not return every block")
    return time.perf_counter() - begin


def _pipelines(disk: ColdDisk, keys: Keys, rounds: int) -> list[Figure]:
    """Two stages beside the slower one alone."""
    out = np.zeros((len(keys), _BLOCK), np.uint8)
    to_client, to_gpu, to_host = [], [], []
    # The first round touches memory that nobody has used before; it does not count.
    for _ in range(rounds + 1):
        to_client.append(_got(disk, keys, out))
        to_host.append(_prefetched(disk, keys, "host"))
        to_gpu.append(_prefetched(disk, keys, "gpu"))
    size = len(keys) * _BLOCK
    against = "disk to host alone"
    return [
        rate("disk to host to client", size, to_client[1:], to_host[1:], against, _SLOWER),
        rate("disk to host to a simulated GPU", size, to_gpu[1:], to_host[1:], against, _SLOWER),
    ]


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Measure.

    Raises:
        ChildError: something was not served.
    """
    gpu = ("--gpu-pool", str(2 * _CHAIN * _BLOCK), "--gpu-devices", "simulated:1")
    with contextlib.ExitStack() as stack:
        disk = ColdDisk(stack, directory, block_bytes=_BLOCK, host_bytes=512 * MIB, options=gpu)
        keys = disk.cold(_CHAIN)
        return [
            _first_block(disk, keys, rounds),
            *_pipelines(disk, keys, max(1, rounds // 3)),
        ]
