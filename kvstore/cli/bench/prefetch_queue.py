"""Who waits how long for a disk of known speed: many for one chain, small jobs beside a big one."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvstore.cli.bench.cold_disk import RATE, WAIT_S, ColdDisk
from kvstore.cli.bench.figure import Figure, times
from kvstore.cli.child import ChildError
from kvstore.cli.connect import connect
from kvstore.keys import Keys
from kvstore.units import KIB, MIB

__all__ = ["measure"]

_BLOCK: Final = 256 * KIB
_CLIENTS: Final = 64
_CHAIN: Final = 500
_SMALL: Final = 16  # blocks of a small job: 4 MiB, 16 ms of the disk
_OWN: Final = _SMALL * _BLOCK / RATE
_JOBS: Final = 80
_BIG: Final = 2000
# What the daemon moves at a time.
_QUANTUM: Final = 0.003


def _same_chain(directory: Path, stack: contextlib.ExitStack) -> Figure:
    """Many clients ask for one cold chain at once: each block is read once.

    Each of them maps the pool and touches all of it: a small one, and nothing else is measured
    before they are gone.
    """
    disk = ColdDisk(
        stack, directory, block_bytes=_BLOCK, host_bytes=256 * MIB, disk_bytes=512 * MIB
    )
    keys = disk.cold(_CHAIN)
    clients = [stack.enter_context(connect(disk.address)) for _ in range(_CLIENTS)]
    spaces = [client.open_space(disk.space.spec) for client in clients]
    before, short = disk.counter("promoted_blocks"), []

    def ask(index: int) -> None:
        got = spaces[index].prefetch(keys, deadline_s=WAIT_S).wait()
        if got != _CHAIN:
            short.append(got)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(_CLIENTS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if short:
        raise ChildError(f"{len(short)} clients got less than the chain")
    reads = disk.counter("promoted_blocks") - before
    if reads != _CHAIN:
        raise ChildError(f"{_CLIENTS} clients made {reads} reads of {_CHAIN} blocks")
    name = f"{_CLIENTS} clients, one chain of {_CHAIN} blocks: {reads} reads"
    return times(name, [seconds], [_CHAIN * _BLOCK / RATE], "the disk's time")


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def _beside_a_big_one(
    disk: ColdDisk, big: Keys, smalls: Sequence[Keys], gap: Callable[[], float]
) -> tuple[list[float], list[float], float]:
    """Ask for a big chain, and for small ones now and then.

    Returns:
        seconds that each small one took; seconds that it would have taken, had it and the other
        small ones had the disk for themselves, one after the other; seconds until all was there.
    """
    waits: list[float] = []
    alone: list[float] = []

    def ask(keys: Keys) -> None:
        begin = time.perf_counter()
        if disk.space.prefetch(keys, deadline_s=WAIT_S).wait() == _SMALL:
            waits.append(time.perf_counter() - begin)

    disk.cool()
    begin = free = time.perf_counter()
    ticket = disk.space.prefetch(big, deadline_s=WAIT_S)
    threads = []
    for keys in smalls:
        time.sleep(gap())
        now = time.perf_counter()
        free = max(now, free) + _OWN
        alone.append(free - now)
        threads.append(threading.Thread(target=ask, args=(keys,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if ticket.wait() != len(big):
        raise ChildError("the big job did not finish")
    if len(waits) != len(smalls):
        raise ChildError(f"{len(smalls) - len(waits)} small jobs did not get their blocks")
    return waits, alone, time.perf_counter() - begin


def _small_beside_big(disk: ColdDisk) -> list[Figure]:
    """A big job, and small ones that take half of the disk's time: how long the small ones wait."""
    big = disk.cold(_BIG)
    smalls = disk.cold_chains(_JOBS, _SMALL)
    dice = random.Random(5)
    ideal = (_BIG + _SMALL * _JOBS) * _BLOCK / RATE
    limit = (2 * _OWN + _QUANTUM) * 1e3
    steady, _, whole = _beside_a_big_one(
        disk, big, smalls, lambda: 2 * _OWN * dice.uniform(0.5, 1.5)
    )
    random_, alone, _ = _beside_a_big_one(disk, big, smalls, lambda: dice.expovariate(0.5 / _OWN))
    return [
        times("small jobs beside a big one, steady: p50", steady, [_OWN], "own read"),
        times("p95", [_p95(steady)], [_OWN], "own read", target_ms=limit),
        times("the big job and all small ones", [whole], [ideal], "the disk's time"),
        times("small jobs that come at random: p50", random_, alone, "without the big one"),
        times("p95", [_p95(random_)], [_p95(alone)], "without the big one"),
    ]


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Measure; `rounds` changes nothing, there are many jobs.

    Raises:
        ChildError: something was not served, or read twice.
    """
    directory.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        crowd = _same_chain(directory / "crowd", stack)
    with contextlib.ExitStack() as stack:
        return [crowd, *_small_beside_big(ColdDisk(stack, directory / "jobs", block_bytes=_BLOCK))]
