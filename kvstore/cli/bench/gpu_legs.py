"""What `bench gpu` measures for one layout and shard size: rounds of moves beside raw ones.

Every round measures kvstore and its baseline in turns, and checks the bytes that came back. The
pool is filled once before: slabs are there, touched and pinned by then.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from kvstore.cli.bench.chains import settle
from kvstore.cli.bench.disk import segment_files
from kvstore.cli.bench.figure import Figure, rate
from kvstore.cli.bench.gpu_kvikio import KvikioFiles
from kvstore.cli.bench.gpu_machine import Machine
from kvstore.cli.bench.gpu_moves import FakeEngine
from kvstore.cli.bench.raw import RawDisk, pieces, touched
from kvstore.cli.child import ChildError
from kvstore.client import Client
from kvstore.keys import Keys
from kvstore.units import KIB, MIB, format_bytes

__all__ = [
    "RawCopies",
    "disk_leg",
    "disk_to_pool_leg",
    "host_leg",
    "pool_leg",
    "raw_leg",
    "warm_up",
]

_WAIT_S: Final = 120.0
_GPU, _HOST = 1, 2
_READ_BYTES: Final = 4 * MIB
_MOST_FILES: Final = 64
# Shards from which on the bus, not the number of copies, decides; and where both do.
_LARGE: Final = 2 * MIB
_MEDIUM: Final = 256 * KIB


class RawCopies:
    """Plain copies of one large piece, in the same memory every time.

    Each is timed when the same copy has just been made.
    """

    def __init__(self, machine: Machine, size: int) -> None:
        """Allocate two pieces on each side.

        Args:
            machine: the device.
            size: of the largest copy, in bytes.
        """
        self._machine = machine
        self._host = [machine.host(size), machine.host(size)]
        self._device = [machine.cache(size), machine.cache(size)]
        self.both(size)  # the first copies pay for what is made on first use
        self.within(size)

    def _seconds(self, *pairs: tuple[Any, Any]) -> float:
        self._machine.copy_seconds(*pairs)
        return self._machine.copy_seconds(*pairs)

    def up(self, size: int) -> float:
        """Host to device: seconds for `size` bytes."""
        return self._seconds((self._device[0][:size], self._host[0][:size]))

    def down(self, size: int) -> float:
        """Device to host."""
        return self._seconds((self._host[1][:size], self._device[1][:size]))

    def both(self, size: int) -> float:
        """Both at once: seconds for `size` bytes each way."""
        return self._seconds(
            (self._device[0][:size], self._host[0][:size]),
            (self._host[1][:size], self._device[1][:size]),
        )

    def within(self, size: int) -> float:
        """Device to device."""
        return self._seconds((self._device[0][:size], self._device[1][:size]))


def raw_leg(raw: RawCopies, size: int, rounds: int) -> list[Figure]:
    """Measure the machine alone."""
    ways: dict[str, tuple[Callable[[int], float], int]] = {
        "raw, host to GPU": (raw.up, size),
        "raw, GPU to host": (raw.down, size),
        "raw, both ways": (raw.both, 2 * size),
        "raw, within the GPU": (raw.within, size),
    }
    return [
        rate(name, moved, [way(size) for _ in range(rounds)]) for name, (way, moved) in ways.items()
    ]


def _name(what: str, engine: FakeEngine) -> str:
    return f"{what}, {engine.case.layout}, {format_bytes(engine.case.shard_bytes)}"


def _target(engine: FakeEngine, large: float, medium: float | None = None) -> float | None:
    if engine.case.shard_bytes >= _LARGE:
        return large
    return medium if engine.case.shard_bytes >= _MEDIUM else None


def warm_up(engine: FakeEngine, chains: int, pinned: Callable[[Any], bool]) -> None:
    """Fill the pool, wait until it is pinned, and empty it again.

    Args:
        engine: whose space.
        chains: how many chains of the engine the pool holds.
        pinned: see `Kit`.
    """
    stored = [engine.new_keys() for _ in range(chains)]
    for keys in stored:
        engine.store(keys)
    deadline = time.monotonic() + _WAIT_S
    while not all(engine.held(keys, pinned) for keys in stored):
        if time.monotonic() > deadline:
            raise ChildError("the pool was not pinned in time")
        settle()
    engine.load(stored[-1])
    engine.check("warm-up")
    engine.space.evict()


def host_leg(engine: FakeEngine, raw: RawCopies, rounds: int) -> list[Figure]:
    """Measure loads from and stores into host memory.

    Args:
        engine: warmed up.
        raw: baselines.
        rounds: how often.
    """
    size = engine.case.moved_bytes
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        engine.space.evict()
        settle()  # digests of the last round take memory bandwidth
        engine.cache.refresh()
        keys = engine.new_keys()
        stored = engine.store(keys)
        seconds["store"].append(stored.copy)
        seconds["store call"].append(stored.call)
        settle()
        seconds["raw down"].append(raw.down(size))
        loaded = engine.load(keys, _HOST)
        seconds["load"].append(loaded.copy)
        seconds["load call"].append(loaded.call)
        engine.check("load from host memory")
        seconds["raw up"].append(raw.up(size))
        seconds["both"].append(engine.both(engine.new_keys(), keys))
        engine.check("load beside a store")
        seconds["raw both"].append(raw.both(size))
    rows: Iterable[tuple[str, str, str, int, float | None]] = (
        ("load", "load", "raw up", 1, _target(engine, 0.95, 0.75)),
        ("store", "store", "raw down", 1, _target(engine, 0.95, 0.75)),
        ("load and store", "both", "raw both", 2, _target(engine, 0.90)),
        ("load with Acquire", "load call", "raw up", 1, None),
        ("store with Reserve and Commit", "store call", "raw down", 1, None),
    )
    return [
        rate(_name(what, engine), ways * size, seconds[ours], seconds[base], "raw copy", target)
        for what, ours, base, ways, target in rows
    ]


def pool_leg(engine: FakeEngine, raw: RawCopies, rounds: int) -> list[Figure]:
    """Measure loads from the GPU pool, and moves from host memory into it."""
    size = engine.case.moved_bytes
    loads, calls, copies, promotions, ups = [], [], [], [], []
    for turn in range(rounds + 1):
        engine.space.evict()
        engine.cache.refresh()
        keys = engine.new_keys()
        engine.store(keys)
        settle()
        begin = time.perf_counter()
        promoted = engine.space.prefetch(keys, tier="gpu", deadline_s=_WAIT_S).wait()
        seconds = time.perf_counter() - begin
        if promoted != len(keys):
            raise ChildError(f"only {promoted} of {len(keys)} blocks came into the GPU pool")
        loaded = engine.load(keys, _GPU)
        engine.check("load from the GPU pool")
        if turn == 0:
            continue  # the first one makes the pool's slabs, and opens them
        promotions.append(seconds)
        ups.append(raw.up(size))
        loads.append(loaded.copy)
        calls.append(loaded.call)
        copies.append(raw.within(size))
    return [
        rate(
            _name("load from GPU pool", engine),
            size,
            loads,
            copies,
            "raw D2D",
            _target(engine, 0.5),
        ),
        rate(_name("load from GPU pool with Acquire", engine), size, calls, copies, "raw D2D"),
        rate(_name("host to GPU pool", engine), size, promotions, ups, "raw copy"),
    ]


def _only_on_disk(engine: FakeEngine, client: Client, keys: Keys, *memory: str) -> None:
    done = client.flush(_WAIT_S)
    if not done.done:
        raise ChildError(f"flush left {done.skipped} blocks")
    for tier in memory:
        engine.space.evict(tier=tier)
    settle()
    if set(engine.space.lookup(keys).tiers) != {"disk"}:
        raise ChildError("blocks are still in memory")


def _stored(engine: FakeEngine) -> Keys:
    engine.space.evict()
    engine.cache.refresh()
    keys = engine.new_keys()
    engine.store(keys)
    return keys


def disk_leg(
    engine: FakeEngine, client: Client, directory: Path, rounds: int, threads: int
) -> list[Figure]:
    """Measure loads of blocks that are on disk alone, through host memory.

    Args:
        engine: warmed up.
        client: of the daemon.
        directory: of the disk tier.
        rounds: how often.
        threads: of the disk tier.
    """
    size = engine.case.moved_bytes
    loads, reads = [], []
    # One piece more than the bytes need: each file's last call takes one of its own.
    disk = RawDisk(threads, pieces(touched(size // _READ_BYTES + _MOST_FILES, _READ_BYTES)))
    try:
        for _ in range(rounds):
            keys = _stored(engine)
            _only_on_disk(engine, client, keys, "host")
            loads.append(engine.load_growing(keys).call)
            engine.check("load from disk through host memory")
            reads.append(disk.read_seconds(segment_files(directory, size // MIB * MIB)))
    finally:
        disk.close()
    name = _name("disk to host to GPU", engine)
    return [rate(name, size, loads, reads, "O_DIRECT reads", _target(engine, 0.9))]


def disk_to_pool_leg(
    engine: FakeEngine, client: Client, directory: Path, machine: Machine, rounds: int
) -> list[Figure]:
    """Measure moves of blocks that are on disk alone into the GPU pool, by cuFile.

    Args:
        engine: warmed up.
        client: of the daemon.
        directory: of the disk tier.
        machine: the device.
        rounds: how often.
    """
    size = engine.case.moved_bytes
    moves, reads = [], []
    plain = KvikioFiles.open(machine)
    try:
        for _ in range(rounds):
            keys = _stored(engine)
            _only_on_disk(engine, client, keys, "gpu", "host")
            begin = time.perf_counter()
            promoted = engine.space.prefetch(keys, tier="gpu", deadline_s=_WAIT_S).wait()
            moves.append(time.perf_counter() - begin)
            if promoted != len(keys):
                raise ChildError(f"only {promoted} of {len(keys)} blocks came into the GPU pool")
            engine.load(keys, _GPU)
            engine.check("load from disk through the GPU pool")
            reads.append(plain.read_seconds(segment_files(directory, size // MIB * MIB)))
    finally:
        plain.close()
    name = _name("disk to GPU pool", engine)
    return [rate(name, size, moves, reads, plain.description, _target(engine, 0.9))]
