"""What metrics cost: processor time of the handlers with and without them, and a scrape's time.

    python tests/server/measure_metrics.py [--rounds N]

Handlers are called without gRPC, in one process, on one engine, by turns: a batch with metrics, one
without. Without means: no timing and no miss is recorded; and then, that the call is not noted for
log lines either. Plain counts of the engine (`counts[name] += n`) stay in both, and are timed apart.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from prometheus_client import CollectorRegistry, generate_latest

from kvstore import tracing
from kvstore.attach.times import TimesLog
from kvstore.engine.counters import Counters, UsageCounts
from kvstore.index import SpaceIndex
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server import present_call
from kvstore.server.kv_service import KVStoreService
from kvstore.server.metric_series import TIMINGS
from kvstore.server.metrics import _CALLS, EngineCollector

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_world import World, chain, spec_of

BATCH = 200
SPACES = 10_000
KEYS = 64


class Context:
    """As much of gRPC's context as a handler that succeeds asks for."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


def nothing(*_: Any) -> None:
    """What is done in the place of metrics."""


@contextmanager
def without(*, notes: bool) -> Iterator[None]:
    """Record nothing; if `notes`, do not note calls for log lines either."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Counters, "record", nothing))
        stack.enter_context(mock.patch.object(Counters, "miss", nothing))
        if notes:
            stack.enter_context(mock.patch.object(present_call, "enter", nothing))
        yield


def calls(world: World, service: KVStoreService) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name."""
    keys, context = chain("stored", KEYS), Context()
    packed = b"".join(keys)
    ref = pb.SpaceRef(id=world.space.id, epoch=world.space.epoch)
    attachment = world.player("leaser").attachment
    ids = itertools.count(1)
    hit = pb.LookupRequest(space=ref, keys=packed)
    miss = pb.LookupRequest(space=ref, keys=b"".join(chain("unseen", KEYS)))

    async def acquire() -> None:
        lease = next(ids)
        request = pb.AcquireRequest(
            attachment_id=attachment.id, space=ref, lease_id=lease, keys=packed
        )
        await service.Acquire(request, context)  # type: ignore[arg-type]
        release = pb.ReleaseRequest(attachment_id=attachment.id, lease_ids=[lease])
        await service.Release(release, context)  # type: ignore[arg-type]

    return {
        "lookup, 64 blocks there": lambda: service.Lookup(hit, context),  # type: ignore[arg-type]
        "lookup, nothing there": lambda: service.Lookup(miss, context),  # type: ignore[arg-type]
        "acquire and release, 64 blocks": acquire,
    }


async def batch(call: Callable[[], Any]) -> float:
    """Return the processor time of one call, µs."""
    begun = time.thread_time_ns()
    for _ in range(BATCH):
        await call()
    return (time.thread_time_ns() - begun) / BATCH / 1e3


async def handlers(world: World, rounds: int) -> dict[str, Any]:
    service = KVStoreService(world.engine, bytes(16), heartbeat_ms=1000, ttl_ms=10_000)
    await world.player("writer").put(chain("stored", KEYS))
    result = {}
    for name, call in calls(world, service).items():
        await batch(call)
        times: dict[str, list[float]] = {"with": [], "without": [], "without notes": []}
        for number in range(rounds):
            # Each is first in a third of the rounds.
            for at in range(3):
                way = list(times)[(number + at) % 3]
                if way == "with":
                    times[way].append(await batch(call))
                else:
                    with without(notes=way == "without notes"):
                        times[way].append(await batch(call))
        pairs = zip(times["with"], times["without"], strict=True)
        noted = zip(times["without"], times["without notes"], strict=True)
        result[name] = {
            "with_us": median(times["with"]),
            "without_us": median(times["without"]),
            "metrics_us": median(a - b for a, b in pairs),
            "notes_us": median(a - b for a, b in noted),
        }
    return result


def scrape(world: World) -> dict[str, Any]:
    """Measure a scrape of an engine with very many spaces."""
    for name in (*TIMINGS, *_CALLS):
        world.engine.counters.record(name, 1e-4)
    for number in range(SPACES):
        spec = spec_of(f"model {number}")
        space = SpaceIndex(spec.fingerprint, spec, 0)
        world.engine.index.spaces[space.id] = space
        world.engine.usage[space.id] = UsageCounts(10**12, 10**12, 0, 10**12)
    registry = CollectorRegistry()
    registry.register(EngineCollector(world.engine))
    times, cpu = [], []
    for _ in range(20):
        begun, own = time.perf_counter(), time.thread_time()
        size = len(generate_latest(registry))
        times.append(time.perf_counter() - begun)
        cpu.append(time.thread_time() - own)
    return {
        "spaces": SPACES,
        "bytes": size,
        "p50_ms": median(times) * 1e3,
        "max_ms": max(times) * 1e3,
        "cpu_p50_ms": median(cpu) * 1e3,
    }


def small_parts() -> dict[str, float]:
    """Time what a call adds up elsewhere, ns a piece."""
    counters, log, number = Counters(), TimesLog(), 100_000

    def nanoseconds(call: Callable[[], Any]) -> float:
        begun = time.thread_time_ns()
        for _ in range(number):
            call()
        return (time.thread_time_ns() - begun) / number

    def count() -> None:
        counters.counts["x"] += 1

    def trace() -> None:
        with tracing.span("x", kind="client"):
            tracing.metadata()

    untraced = nanoseconds(trace)
    # As in vLLM without tracing: OpenTelemetry is imported, and nobody has set it up.
    importlib.import_module("opentelemetry.trace")
    return {
        "empty_call_ns": nanoseconds(lambda: None),
        "trace_ns": untraced,
        "trace_with_opentelemetry_imported_ns": nanoseconds(trace),
        "count_ns": nanoseconds(count),
        "client_time_ns": nanoseconds(lambda: log.add("load", 0.001)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    rounds = parser.parse_args().rounds
    pools = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    found: dict[str, Any] = {"rounds": rounds, "batch": BATCH}
    with tempfile.TemporaryDirectory() as directory:

        async def story(world: World) -> None:
            found["handlers"] = await handlers(world, rounds)
            found["scrape"] = await asyncio.to_thread(scrape, world)

        try:
            World(Path(directory), pools, host_blocks=256).run(story, seconds=600)
        finally:
            shutil.rmtree(pools, ignore_errors=True)
    found["small_parts"] = small_parts()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
