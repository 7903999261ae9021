"""What goes wrong with prefetches: thousands that nobody wants any more, a disk that stops."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvstore.cli.bench.chains import settle
from kvstore.cli.bench.cold_disk import RATE, WAIT_S, ColdDisk
from kvstore.cli.bench.figure import Figure, most, times
from kvstore.cli.child import ChildError
from kvstore.cli.connect import connect
from kvstore.keys import Keys
from kvstore.units import KIB, MIB

__all__ = ["measure_stall", "measure_storm"]

_BLOCK: Final = 64 * KIB
_CHAINS: Final = 64
_CHAIN: Final = 16
_PREFETCHES: Final = 10_000
_THREADS: Final = 8
# Under way at a time, of each thread.
_OPEN: Final = 8
_EVICT_EVERY_S: Final = 0.1

_STALL_S: Final = 30.0
_DEADLINE_S: Final = 0.5
# Of a computer that needs longer for a block than the disk does, so that waiting is worth it.
_PREFILL_TOKENS_PER_S: Final = 50.0
# On its way back, beyond the deadline: calls on a busy machine.
_SLACK_S: Final = 0.1
_REQUEST_EVERY_S: Final = 0.25


def _release(lease: Future[Any]) -> None:
    lease.result(timeout=WAIT_S).release()


def _storm(disk: ColdDisk, chains: list[Keys], seed: int, count: int) -> None:
    """Ask for chains, by ticket or by lease, and cancel each after a while: some at once."""
    dice = random.Random(seed)
    cancels: list[Callable[[], object]] = []
    with connect(disk.address) as client:
        space = client.open_space(disk.space.spec)
        client.attachment.wait_active(WAIT_S)
        for _ in range(count):
            keys = dice.choice(chains)[: dice.randint(1, _CHAIN)]
            if dice.random() < 0.5:
                ticket = space.prefetch(keys, deadline_s=WAIT_S, priority=dice.randint(-1, 1))
                cancels.append(ticket.cancel)
            else:
                lease = space.acquire(keys, deadline_s=WAIT_S)
                cancels.append(partial(_release, lease))
            while len(cancels) > dice.randint(0, _OPEN):
                cancels.pop(dice.randrange(len(cancels)))()
        for cancel in cancels:
            cancel()


def measure_storm(directory: Path, prefetches: int = _PREFETCHES) -> list[Figure]:
    """Cancel very many prefetches at random points; count what is left of them.

    Raises:
        ChildError: not everything comes in the end.
    """
    with contextlib.ExitStack() as stack:
        disk = ColdDisk(
            stack,
            directory,
            block_bytes=_BLOCK,
            host_bytes=256 * MIB,
            disk_bytes=256 * MIB,
            rate=RATE // 8,
        )
        chains = disk.cold_chains(_CHAINS, _CHAIN)
        begin = time.perf_counter()
        with ThreadPoolExecutor(_THREADS) as pool:
            share = prefetches // _THREADS
            storms = [pool.submit(_storm, disk, chains, seed, share) for seed in range(_THREADS)]
            # What has come goes again, or nothing would be left to ask for.
            while wait(storms, _EVICT_EVERY_S, FIRST_EXCEPTION).not_done:
                disk.space.evict(tier="host")
            for storm in storms:
                storm.result()
        seconds = time.perf_counter() - begin
        read = disk.counter("promoted_blocks")
        leases, held = _left(disk)
        if sum(disk.space.prefetch(keys, deadline_s=WAIT_S).wait() for keys in chains) != (
            _CHAINS * _CHAIN
        ):
            raise ChildError("what was cancelled once does not come any more")
    name = f"{prefetches} prefetches cancelled, {read} blocks read meanwhile"
    return [
        times(name, [seconds]),
        most("leases left", "leases", [leases], 0),
        most("copies that something still holds", "copies", [held], 0),
    ]


def _left(disk: ColdDisk) -> tuple[int, int]:
    """Return leases, and copies in host that may not leave, when all has come to rest."""
    deadline = time.monotonic() + WAIT_S
    while True:
        # What a lease, a job or a read uses cannot be evicted; slots of reads count as used.
        held = disk.space.evict(tier="host").skipped
        stats = disk.client.stats()
        [used] = [tier.used_bytes for tier in stats.tiers if tier.tier == _HOST]
        held = max(held, used // _BLOCK)
        if not (held or stats.leases) or time.monotonic() > deadline:
            return stats.leases, held
        settle()


_HOST: Final = 2  # of the wire's tiers


class _Tap:
    """Holds a daemon's reads from disk, as a device that does not answer does."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._reached = directory / "reading"
        self._go = directory / "reading.go"
        self._go.touch()
        self.environment = {"KVSTORE_SYNC_POINT": f"disk.reading:{self._reached}"}

    def close(self) -> None:
        """Nothing is read from now on."""
        self._go.unlink()

    def open(self) -> None:
        """Go on."""
        self._go.touch()


def measure_stall(directory: Path, seconds: float = _STALL_S) -> list[Figure]:
    """Stop the disk for a while, with requests all the time: none waits past its deadline.

    Args:
        directory: for the daemon.
        seconds: how long.

    Raises:
        ChildError: it goes unnoticed, or the daemon does not recover.
    """
    tap = _Tap(directory)
    over, declined = [], 0
    with contextlib.ExitStack() as stack:
        disk = ColdDisk(
            stack,
            directory,
            block_bytes=_BLOCK,
            host_bytes=256 * MIB,
            disk_bytes=256 * MIB,
            environment=tap.environment,
        )
        stack.callback(tap.open)
        keys = disk.cold(_CHAIN)
        _ask(disk, keys)  # how fast the disk is
        disk.cool(keys)
        tap.close()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.monotonic()
            blocks = _ask(disk, keys)
            over.append(time.monotonic() - begin)
            if blocks:
                raise ChildError("a disk that is stopped has delivered something")
            time.sleep(_REQUEST_EVERY_S)
        stats = disk.client.stats()
        declined = stats.counters["waits_declined_stalled"]
        if seconds > _NOTICED_S and not (stats.counters["path_stalls"] and declined):
            raise ChildError("stats says nothing of a disk that is stopped")
        tap.open()
        begin = time.monotonic()
        while _ask(disk, keys) != len(keys):
            if time.monotonic() - begin > WAIT_S:
                raise ChildError("the disk goes on, the daemon does not")
        recovery = time.monotonic() - begin
    longest = max(over)
    limit = (_DEADLINE_S + _SLACK_S) * 1e3
    return [
        times(
            f"disk stopped for {seconds:g} s: longest of {len(over)} requests",
            [longest],
            [_DEADLINE_S],
            "its deadline",
            target_ms=limit,
        ),
        times(f"… {declined} of them did not begin to wait: median", over),
        times("until a request gets all again", [recovery]),
    ]


# By then a stall has been noticed.
_NOTICED_S: Final = 5.0


def _ask(disk: ColdDisk, keys: Keys) -> int:
    """Load a chain as an engine does; return the blocks that came within the deadline."""
    lease = disk.space.acquire(
        keys, deadline_s=_DEADLINE_S, prefill_tokens_per_second=_PREFILL_TOKENS_PER_S
    ).result(timeout=WAIT_S)
    blocks = lease.wait(WAIT_S)
    lease.release()
    return blocks
