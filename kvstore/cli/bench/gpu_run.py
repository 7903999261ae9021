"""The whole of `bench gpu`: a daemon per shard size, both layouts in it, leg after leg."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.cli.bench.figure import Figure
from kvstore.cli.bench.gpu_legs import (
    RawCopies,
    disk_leg,
    disk_to_pool_leg,
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


def _options(case: Case, directory: Path, legs: Collection[Leg], *, pool: bool) -> list[str]:
    chains = _POOL_CHAINS * case.moved_bytes
    options = ["--host-pool", str(chains + 256 * MIB), "--write-policy", "evict"]
    options += ["--lease-cap", str(chains), "--grant-cap", str(chains)]
    if Leg.DISK in legs:
        options += ["--disk", str(directory / "disk"), "--io-threads", str(_IO_THREADS)]
        options += ["--disk-capacity", str(2 * case.moved_bytes + 64 * MIB)]
    if pool:
        options += ["--gpu-pool", str(2 * case.moved_bytes + 64 * MIB)]
        # Also where cuFile reads through host memory itself.
        options += ["--gpu-io", "cufile"]
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
        # Use moves blocks into a GPU pool: what is measured without one gets a daemon without.
        for pool in (False, True):
            if not set(plan.legs) & ({Leg.POOL} if pool else {Leg.HOST, Leg.DISK}):
                continue
            scratch = directory / f"{turn}{'p' if pool else 'h'}"  # a socket's path must be short
            scratch.mkdir()
            options = _options(plan.case(plan.layouts[0], shard), scratch, plan.legs, pool=pool)
            with ChildDaemon(scratch, options) as daemon, kit.client_of(daemon.address) as client:
                for layout in plan.layouts:
                    say(f"measuring: {layout}, {format_bytes(shard)}{', pool' if pool else ''}")
                    case = plan.case(layout, shard)
                    yield from _case(plan, kit, client, scratch, raw, case, pool=pool)
            shutil.rmtree(scratch)


def _case(
    plan: Plan,
    kit: Kit,
    client: Client,
    scratch: Path,
    raw: RawCopies,
    case: Case,
    *,
    pool: bool,
) -> Iterator[Figure]:
    engine = FakeEngine(client, kit.machine, case, kit.copier_of)
    disk = scratch / "disk"
    try:
        warm_up(engine, _POOL_CHAINS, kit.pinned)
        if pool:
            yield from pool_leg(engine, raw, plan.rounds)
            if Leg.DISK in plan.legs:
                yield from disk_to_pool_leg(engine, client, disk, kit.machine, plan.rounds)
        else:
            if Leg.HOST in plan.legs:
                yield from host_leg(engine, raw, plan.rounds)
            if Leg.DISK in plan.legs:
                yield from disk_leg(engine, client, disk, plan.rounds, _IO_THREADS)
        engine.space.evict()
    finally:
        engine.close()
