"""The `bench` command: the data path on the host; `bench gpu` and `bench prefetch` beside it."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.cli.bench import gpu_command, prefetch_command
from kvstore.units import parse_bytes

__all__ = ["register"]


class Leg(StrEnum):
    """Parts of the bench."""

    MEMORY = "memory"
    DISK = "disk"
    CALLS = "calls"
    STREAM = "stream"
    RESTART = "restart"


# What is measured unless legs are named. A restart takes more memory than a small machine has.
_USUAL: Final = (Leg.MEMORY, Leg.DISK, Leg.CALLS, Leg.STREAM)


def bench(
    context: typer.Context,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            exists=True,
            file_okay=False,
            writable=True,
            help="Where to put the scratch directory (2 GB): on the disk that is to be measured.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Rounds that medians are taken of.")
    ] = 9,
    only: Annotated[
        list[Leg] | None,
        typer.Option(
            "--only",
            metavar="LEG",
            help="memory, disk, calls, stream, or restart, which only runs when named; repeatable.",
        ),
    ] = None,
    restart_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Contents of host memory across a restart."),
    ] = "4GiB",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every sample as JSON; progress on stderr.")
    ] = False,
) -> None:
    """Measure the data path beside what the machine does alone.

    Starts daemons of its own. kvstore and its baselines are measured in turns, so that the ratio
    holds on a machine whose speed changes from minute to minute.
    """
    if context.invoked_subcommand is not None:
        return
    from kvstore.cli.bench import calls, disk, memory, report, restart, stream
    from kvstore.cli.bench.figure import Figure
    from kvstore.cli.child import interruptible
    from kvstore.cli.output import console, print_json, progress

    size = parse_bytes(restart_size)
    legs: dict[Leg, Callable[[Path, int], list[Figure]]] = {
        Leg.MEMORY: memory.measure,
        Leg.DISK: disk.measure,
        Leg.CALLS: calls.measure,
        Leg.STREAM: stream.measure,
        Leg.RESTART: lambda scratch, rounds: restart.measure(scratch, rounds, size),
    }
    say = progress(to_stderr=as_json)
    figures = []
    with interruptible():
        for leg in only or _USUAL:
            say(f"measuring: {leg}")
            with contextlib.ExitStack() as stack:
                scratch = stack.enter_context(
                    tempfile.TemporaryDirectory(
                        prefix="kvstore-bench-", dir=directory, ignore_cleanup_errors=True
                    )
                )
                figures += legs[leg](Path(scratch), rounds)
    if as_json:
        machine = {
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        }
        print_json(
            {"machine": machine, "rounds": rounds, "figures": [f.as_json() for f in figures]}
        )
    else:
        console().print(report.as_table(figures))


def register(app: typer.Typer) -> None:
    """Add the command."""
    group = typer.Typer(add_completion=False, rich_markup_mode=None)
    group.callback(invoke_without_command=True)(bench)
    gpu_command.register(group)
    prefetch_command.register(group)
    app.add_typer(group, name="bench")
