"""The whole of `bench gpu`: a daemon per shard size, both layouts in it, leg after leg."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.cli.bench.figure import Figure
from kvstore.cli.bench.gpu_legs import (
    RawCopies,
    disk_leg,
    host_leg,
    pool_leg,
    raw_leg,
    warm_up,
)
from kvstore.cli.bench.gpu_machine import Machine
from kvstore.cli.bench.gpu_moves import CopierOf, FakeEngine
from kvstore.cli.bench.gpu_plan import Case, Leg, Plan
from kvstore.cli.child import ChildDaemon
from kvstore.client import Client
from kvstore.units import MIB, format_bytes

__all__ = ["Kit", "measure"]

# A pool holds what is loaded, what is stored meanwhile, and slabs that are not full.
_POOL_CHAINS: Final = 3
_IO_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class Kit:
    """What to measure with.

    Attributes:
        machine: the device.
        client_of: opens a client that is told about the device.
        copier_of: see `FakeEngine`.
        pinned: whether slots are in memory that the device copies from at full speed.
    """

    machine: Machine
    client_of: Callable[[str], contextlib.AbstractContextManager[Client]]
    copier_of: CopierOf
    pinned: Callable[[Any], bool]


def _options(plan: Plan, case: Case, directory: Path) -> list[str]:
    chains = _POOL_CHAINS * case.moved_bytes
    options = ["--host-pool", str(chains + 256 * MIB), "--write-policy", "evict"]
    options += ["--lease-cap", str(chains), "--grant-cap", str(chains)]
    if Leg.DISK in plan.legs:
        options += ["--disk", str(directory / "disk"), "--io-threads", str(_IO_THREADS)]
        options += ["--disk-capacity", str(2 * case.moved_bytes + 64 * MIB)]
    if Leg.POOL in plan.legs:
        options += ["--gpu-pool", str(2 * case.moved_bytes + 64 * MIB)]
    if Leg.POOL in plan.legs and Leg.DISK in plan.legs:
        options += ["--gpu-io", "cufile"]  # also where cuFile reads through host memory itself
    return options


def measure(plan: Plan, kit: Kit, directory: Path, say: Callable[[str], None]) -> Iterator[Figure]:
    """Measure, and yield each figure as soon as it is there.

    Args:
        plan: what.
        kit: with what.
        directory: on the disk that is to be measured; everything in it may be left over.
        say: is told what is being measured.

    Raises:
        ChildError: something failed, or a byte came back wrong.
    """
    raw = RawCopies(kit.machine, plan.largest_bytes)
    if Leg.RAW in plan.legs:
        say("measuring: the machine alone")
        yield from raw_leg(raw, plan.largest_bytes, plan.rounds)
    if not set(plan.legs) - {Leg.RAW}:
        return
    for turn, shard in enumerate(plan.shards):
        scratch = directory / str(turn)  # short: a socket's path has little room
        scratch.mkdir()
        options = _options(plan, plan.case(plan.layouts[0], shard), scratch)
        with ChildDaemon(scratch, options) as daemon, kit.client_of(daemon.address) as client:
            for layout in plan.layouts:
                say(f"measuring: {layout}, {format_bytes(shard)}")
                yield from _case(plan, kit, client, scratch, raw, plan.case(layout, shard))


def _case(
    plan: Plan, kit: Kit, client: Client, scratch: Path, raw: RawCopies, case: Case
) -> Iterator[Figure]:
    engine = FakeEngine(client, kit.machine, case, kit.copier_of)
    try:
        warm_up(engine, _POOL_CHAINS, kit.pinned)
        if Leg.HOST in plan.legs:
            yield from host_leg(engine, raw, plan.rounds)
        if Leg.POOL in plan.legs:
            yield from pool_leg(engine, raw, plan.rounds)
        if Leg.DISK in plan.legs:
            yield from disk_leg(
                engine,
                client,
                scratch / "disk",
                kit.machine,
                plan.rounds,
                threads=_IO_THREADS,
                to_pool=Leg.POOL in plan.legs,
            )
        engine.space.evict()
    finally:
        engine.close()
