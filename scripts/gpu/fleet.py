"""Engines side by side, what they are measured with, and a result that survives a failure."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from modes import Host, Mode, kill, start

from kvstore.cli.child import Child, ChildError
from kvstore.client import Client
from kvstore.errors import KVStoreError

_GIB = 1 << 30
_START_S = 240.0
_FOUND = 0.95  # of the prompts' tokens; the last block of a prompt is always computed

Result = dict[str, Any]


class Run:
    """The result, written after every step, and what must be cleaned up."""

    def __init__(self, arguments: argparse.Namespace, scratch: Path) -> None:
        """Begin with an empty result."""
        self.arguments = arguments
        self.scratch = scratch
        self.result: Result = {"command": " ".join(sys.argv), "parts": {}}
        self.begin = time.monotonic()

    def say(self, line: str) -> None:
        """Print progress."""
        print(f"[{time.monotonic() - self.begin:5.1f} s] {line}", flush=True)

    def save(self) -> None:
        """Write the result as it is now."""
        self.result["seconds"] = round(time.monotonic() - self.begin, 1)
        path = self.arguments.out
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.result, indent=1) + "\n")
        temporary.replace(path)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Note how long a step took, and go on when it fails."""
        begin = time.monotonic()
        try:
            yield
        except (ChildError, KVStoreError, OSError, statistics.StatisticsError) as error:
            traceback.print_exc()
            self.put("failed", name, f"{type(error).__name__}: {error}")
        steps = self.result.setdefault("steps_seconds", [])
        steps.append([name, round(time.monotonic() - begin, 1)])
        self.save()

    def put(self, part: str, name: str, value: Any) -> None:
        """Add to the result."""
        self.result["parts"].setdefault(part, {})[name] = value
        self.save()


class Fleet(contextlib.AbstractContextManager["Fleet"]):
    """Engines that run side by side and are asked in turns.

    Attributes:
        environment: variables of engines that are started from now on.
        failed: what was wrong with those that were dropped.
    """

    def __init__(self, run: Run, model: Path, engine: Result) -> None:
        """Start nothing yet."""
        self._run = run
        self._model = model
        self._engine = engine
        self.environment: dict[str, str] = {}
        self._children: dict[str, Child] = {}
        self.failed: dict[str, str] = {}

    def start(self, hosts: Sequence[Host], engine: Result | None = None) -> None:
        """Start engines at once and wait for all; one that fails is left out and noted."""
        waiting = []
        for host in hosts:
            child, settings = start(
                host, self._model, {**self._engine, **(engine or {})}, self.environment
            )
            self._children[host.mode.name] = child
            waiting.append((host.mode.name, child, settings))

        def ready(item: tuple[str, Child, Result]) -> tuple[str, str, float]:
            name, child, settings = item
            try:
                return name, "", child.ask(settings, _START_S)["start_seconds"]
            except (ChildError, ValueError) as error:
                return name, str(error), 0.0

        with ThreadPoolExecutor(len(waiting)) as pool:
            for name, problem, seconds in pool.map(ready, waiting):
                if problem:
                    self.failed[name] = problem
                    self._children.pop(name).kill()
                self._run.say(f"{name}: {problem or f'engine started in {seconds:.0f} s'}")

    @property
    def names(self) -> list[str]:
        """Engines that run."""
        return list(self._children)

    def ask(self, name: str, do: str, **arguments: Any) -> Result:
        """Ask one engine.

        Raises:
            ChildError: it answers with an error, too late, or is gone.
        """
        answer: Result = self._children[name].ask(
            {"do": do, **arguments}, self._run.arguments.answer_s
        )
        return answer

    def drop(self, name: str, problem: str) -> None:
        """Go on without an engine."""
        self.failed[name] = problem
        self._run.say(f"{name}: {problem}")
        self._children.pop(name).kill()

    def each(self, what: Callable[[str], object], names: Sequence[str] | None = None) -> None:
        """Do something with engines in turn, all if none are named; one that fails is dropped."""
        for name in self.names:
            if names is not None and name not in names:
                continue
            try:
                what(name)
            except ChildError as error:
                self.drop(name, str(error))

    def stop(self, names: Sequence[str] | None = None, *, violently: bool = False) -> None:
        """End engines."""
        for name in names or self.names:
            child = self._children.pop(name, None)
            if child is None:
                continue
            if violently:
                kill(child)
            else:
                child.stop(timeout_s=15)

    def __exit__(self, *_: object) -> None:
        """End what runs."""
        self.stop(violently=True)


def spread(values: Sequence[float]) -> Result:
    """Return median, least and most, and every sample."""
    return {
        "p50": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
        "samples": [round(value, 2) for value in values],
    }


def warm_row(answer: Result, tokens: int) -> Result:
    """Return a warm round, and what is wrong with it.

    The engine's own cache was reset before, and said so: what was found came from outside. (The
    engine's counter of external hits misses steps that return no token: it is no help here.)
    """
    row = spread(answer["ms"])
    row["cached"] = answer["cached"]
    wanted = tokens * len(answer["cached"]) * _FOUND
    if sum(answer["cached"]) < wanted:
        row["invalid"] = f"only {sum(answer['cached'])} of {wanted:.0f} tokens were found"
    return row


@contextlib.contextmanager
def hosts(run: Run, modes: Sequence[Mode]) -> Iterator[list[Host]]:
    """Start what outlives engines; a helper that does not start is left out."""
    with contextlib.ExitStack() as stack:
        started = []
        for mode in modes:
            try:
                gib = run.arguments.pool_gib
                if mode.connector != "ours" and run.arguments.peer_pool_gib is not None:
                    gib = run.arguments.peer_pool_gib
                host = Host(mode, run.scratch, int(gib * _GIB))
            except ChildError as error:
                run.put("failed", mode.name, str(error))
                continue
            stack.callback(host.close)
            started.append(host)
        yield started


def mode_of(run: Run, name: str) -> Mode:
    """Return how to run an engine, by its name on the command line."""
    if name == "ours":
        disk = ["--disk", str(run.arguments.disk / name), "--disk-capacity", run.arguments.capacity]
        return Mode(name, name, disk, run.arguments.extra)
    if name == "ours_pool":
        pool = ["--gpu-pool", f"{run.arguments.gpu_pool_gib:g}GiB"]
        return Mode(name, "ours", pool, run.arguments.extra)
    return Mode(name, name, files=run.arguments.disk / name)


def daemon_account(host: Host) -> Result:
    """Return the daemon's own account, as far as it explains what was measured."""
    assert host.daemon is not None
    with Client(host.daemon.address) as client:
        stats = client.stats()
    tiers = {}
    for tier in stats.tiers:
        tiers[str(tier.tier)] = {
            "blocks": tier.blocks,
            "hit_tokens": tier.hit_tokens,
            "io_engine": tier.io_engine,
            "state": tier.state,
            "read_bytes": tier.read_bytes,
            "written_bytes": tier.written_bytes,
        }
    clients = [
        {"client": c.client, "leases": c.leases, "granted_bytes": c.granted_bytes}
        for c in stats.clients
    ]
    return {"tiers": tiers, "clients": clients}
