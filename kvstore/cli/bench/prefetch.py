"""Prefetch on a disk of known speed: shared reads, small jobs beside a big one, overlap, room.

The daemon's disk is throttled (`--disk-throttle`), so that what a read should take is arithmetic:
each figure is compared with that, and holds on any machine whose disk is faster than the throttle.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.cli.bench.chains import Chains, settle
from kvstore.cli.bench.figure import Figure, times
from kvstore.cli.child import ChildDaemon, ChildError
from kvstore.cli.connect import connect
from kvstore.client import Client
from kvstore.keys import Keys
from kvstore.units import KIB, MIB

__all__ = ["measure"]

_RATE: Final = 256 * MIB
_BLOCK: Final = 256 * KIB
_CLIENTS: Final = 64
_CHAIN: Final = 500
_SMALL: Final = 16  # blocks of a small job: 4 MiB, 16 ms of the disk
_SMALL_JOBS: Final = 60
_BIG: Final = 2000
_WAIT_S: Final = 120.0


class _Bench:
    """One throttled daemon, and chains stored on its disk only."""

    def __init__(self, stack: contextlib.ExitStack, directory: Path) -> None:
        options = [
            *("--host-pool", str(1024 * MIB), "--disk", str(directory / "disk")),
            *("--disk-capacity", str(2048 * MIB), "--disk-throttle", str(_RATE)),
        ]
        daemon = stack.enter_context(ChildDaemon(directory, options))
        self.address = daemon.address
        self.client: Client = stack.enter_context(connect(daemon.address))
        self.chains = Chains(self.client, "bench-prefetch", _BLOCK)
        self.space = self.chains.space

    def cold(self, blocks: int) -> Keys:
        """Store a chain and leave it on disk only."""
        keys = self.chains.next(blocks)
        content = np.zeros((min(blocks, _CHAIN), _BLOCK), np.uint8)
        for at in range(0, blocks, len(content)):
            part = keys[at : at + len(content)]
            if self.space.put(part, content[: len(part)], timeout_s=_WAIT_S) != len(part):
                raise ChildError("put did not store every block")
        if not self.client.flush(_WAIT_S).done:
            raise ChildError("not everything was written to disk")
        self.space.evict(keys, tier="host")
        return keys

    def reads(self) -> int:
        """Return how many blocks were read from disk so far."""
        return int(self.client.stats().counters["promoted_blocks"])


def _same_chain(bench: _Bench, stack: contextlib.ExitStack) -> Figure:
    """Many clients ask for one cold chain at once: each block is read once."""
    keys = bench.cold(_CHAIN)
    clients = [stack.enter_context(connect(bench.address)) for _ in range(_CLIENTS)]
    spaces = [client.open_space(bench.space.spec) for client in clients]
    before, short = bench.reads(), []

    def ask(index: int) -> None:
        got = spaces[index].prefetch(keys, deadline_s=_WAIT_S).wait()
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
    reads = bench.reads() - before
    if reads != _CHAIN:
        raise ChildError(f"{_CLIENTS} clients made {reads} reads of {_CHAIN} blocks")
    name = f"{_CLIENTS} clients, one chain of {_CHAIN} blocks: {reads} reads"
    return times(name, [seconds], [_CHAIN * _BLOCK / _RATE], "the disk's time")


def _first_block(bench: _Bench, rounds: int) -> Figure:
    """Time until the first block of a cold chain can be used, beside one block's own time."""
    taken = []
    keys = bench.cold(64)
    for _ in range(rounds):
        bench.space.evict(keys, tier="host")
        settle()
        begin = time.perf_counter()
        lease = bench.space.acquire(keys, deadline_s=_WAIT_S).result(timeout=_WAIT_S)
        blocks = lease.wait(_WAIT_S, 0)
        taken.append(time.perf_counter() - begin)
        lease.release()
        if not blocks:
            raise ChildError("no block came")
    return times("first of 64 cold blocks usable", taken, [_BLOCK / _RATE], "its own read")


def _pipeline(bench: _Bench, rounds: int) -> Figure:
    """Disk to host to client beside disk to host alone: the stages overlap."""
    keys = bench.cold(_CHAIN)
    out = np.zeros((_CHAIN, _BLOCK), np.uint8)
    both, alone = [], []
    # The first round touches memory that nobody has used before; it does not count.
    for _ in range(rounds + 1):
        bench.space.evict(keys, tier="host")
        settle()
        begin = time.perf_counter()
        if bench.space.get(keys, out, timeout_s=_WAIT_S) != _CHAIN:
            raise ChildError("get did not return every block")
        both.append(time.perf_counter() - begin)
        bench.space.evict(keys, tier="host")
        settle()
        begin = time.perf_counter()
        if bench.space.prefetch(keys, deadline_s=_WAIT_S).wait() != _CHAIN:
            raise ChildError("prefetch did not bring every block")
        alone.append(time.perf_counter() - begin)
    return times("disk to host to client", both[1:], alone[1:], "disk to host alone")


def _small_beside_big(bench: _Bench) -> list[Figure]:
    """A big job, and small ones that take half of the disk's time: how long the small ones wait."""
    big = bench.cold(_BIG)
    smalls = [bench.cold(_SMALL) for _ in range(_SMALL_JOBS)]
    own = _SMALL * _BLOCK / _RATE
    dice = random.Random(5)
    waits: list[float] = []

    def ask(keys: Keys) -> None:
        begin = time.perf_counter()
        if bench.space.prefetch(keys, deadline_s=_WAIT_S).wait() == _SMALL:
            waits.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    ticket = bench.space.prefetch(big, deadline_s=_WAIT_S)
    threads = []
    for keys in smalls:
        time.sleep(dice.expovariate(0.5 / own))
        threads.append(threading.Thread(target=ask, args=(keys,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if ticket.wait() != _BIG:
        raise ChildError("the big job did not finish")
    whole = time.perf_counter() - begin
    if len(waits) != _SMALL_JOBS:
        raise ChildError(f"{_SMALL_JOBS - len(waits)} small jobs did not get their blocks")
    p95 = sorted(waits)[int(0.95 * len(waits))]
    ideal = (_BIG + _SMALL * _SMALL_JOBS) * _BLOCK / _RATE
    return [
        times("small jobs beside a big one, p50", waits, [own], "their own read"),
        times(
            "small jobs beside a big one, p95",
            [p95],
            [own],
            "their own read",
            target_ms=(2 * own + own / 2) * 1e3,
        ),
        times("the big job and all small ones", [whole], [ideal], "the disk's time"),
    ]


def _room(bench: _Bench) -> list[Figure]:
    """New chains into a full pool: how many reservations had to evict for themselves."""
    keys = [bench.chains.next(64) for _ in range(60)]
    content = np.zeros((64, _BLOCK), np.uint8)
    before = dict(bench.client.stats().counters)
    seconds = []
    for chain in keys:
        begin = time.perf_counter()
        if bench.space.put(chain, content, timeout_s=_WAIT_S) != 64:
            raise ChildError("put did not store every block")
        seconds.append(time.perf_counter() - begin)
    after = bench.client.stats().counters
    inline = after.get("evictions_inline", 0) - before.get("evictions_inline", 0)
    background = after.get("evictions_background", 0) - before.get("evictions_background", 0)
    name = f"put of 64 blocks, full pool: {inline} evictions inline, {background} ahead"
    return [times(name, seconds)]


def measure(directory: Path, rounds: int) -> list[Figure]:
    """Measure on a disk of 256 MiB/s, blocks of 256 KiB.

    Raises:
        ChildError: something was not served, or read twice.
    """
    with contextlib.ExitStack() as stack:
        bench = _Bench(stack, directory)
        bench.chains.ready()
        return [
            _same_chain(bench, stack),
            _first_block(bench, rounds),
            _pipeline(bench, max(1, rounds // 3)),
            *_small_beside_big(bench),
            *_room(bench),
        ]
