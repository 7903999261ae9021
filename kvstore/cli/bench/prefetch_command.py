"""The `bench prefetch` command."""

from __future__ import annotations

import contextlib
import os
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.errors import ConfigError
from kvstore.units import parse_bytes

if TYPE_CHECKING:
    from kvstore.cli.bench.figure import Figure

__all__ = ["PrefetchLeg", "register"]

_SPEEDS = "10MB/s,30MB/s,60MB/s,100MB/s,200MB/s,500MB/s,unlimited"


class PrefetchLeg(StrEnum):
    """Parts of the bench without a model."""

    QUEUE = "queue"
    STAGES = "stages"
    ROOM = "room"
    STORM = "storm"
    STALL = "stall"


def _speeds(text: str) -> list[int | None]:
    try:
        return [
            None if part.strip() == "unlimited" else parse_bytes(part.strip().removesuffix("/s"))
            for part in text.split(",")
        ]
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="'--speeds'") from error


def prefetch(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            exists=True,
            file_okay=False,
            writable=True,
            help="Where to put the scratch directory (4 GB).",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Rounds that medians are taken of.")
    ] = 9,
    only: Annotated[
        list[PrefetchLeg] | None,
        typer.Option(
            "--only", metavar="LEG", help="queue, stages, room, storm, stall; repeatable."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Replays the requests of a trace (as for `kvstore replay`), twice as fast as "
            "they came, instead of the rest: what waiting saved, and what a better choice would.",
        ),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            min=2, metavar="N", help="With --trace: its first N requests, half as history."
        ),
    ] = 2000,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Checkpoint for two real vLLM engines: measures their time to first token "
            "while the disk becomes slower, instead of the rest.",
        ),
    ] = None,
    speeds: Annotated[
        str, typer.Option(metavar="LIST", help="With --model: disk speeds.")
    ] = _SPEEDS,
    prompts: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="With --model: prompts, each asked for 3 times."),
    ] = 10,
    prompt_tokens: Annotated[
        int, typer.Option(min=256, metavar="N", help="With --model: tokens of a prompt.")
    ] = 1024,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="With --model: draw a PNG file."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every sample as JSON; progress on stderr.")
    ] = False,
) -> None:
    """Measure what prefetch decides, on disks of known speeds.

    Shared reads, small jobs beside a big one, overlap of the stages, room for stores. With --model:
    whether a request is ever slower with kvstore than without.
    """
    from kvstore.cli.child import interruptible

    chosen = _speeds(speeds)
    with (
        interruptible(),
        contextlib.ExitStack() as stack,
    ):
        scratch = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix="kvstore-bench-", dir=directory, ignore_cleanup_errors=True
                )
            )
        )
        if trace is not None:
            _trace(scratch, trace, requests, as_json=as_json)
        elif model is None:
            _figures(scratch, rounds, only or [], as_json=as_json)
        else:
            _sweep(model, scratch, chosen, prompts, prompt_tokens, plot=plot, as_json=as_json)


def _figures(scratch: Path, rounds: int, only: list[PrefetchLeg], *, as_json: bool) -> None:
    from kvstore.cli.bench.prefetch import measure
    from kvstore.cli.output import progress

    figures = measure(scratch, rounds, only, progress(to_stderr=as_json))
    _show(figures, {"rounds": rounds}, as_json=as_json)


def _trace(scratch: Path, trace: Path, requests: int, *, as_json: bool) -> None:
    from kvstore.cli.bench import prefetch_trace

    figures = prefetch_trace.measure(scratch, trace, requests)
    _show(figures, {"trace": trace.name, "requests": requests}, as_json=as_json)


def _show(figures: list[Figure], settings: dict[str, Any], *, as_json: bool) -> None:
    from kvstore.cli.bench import report
    from kvstore.cli.output import console, print_json

    if as_json:
        print_json({**settings, "figures": [f.as_json() for f in figures]})
    else:
        console().print(report.as_table(figures))


def _sweep(
    model: Path,
    scratch: Path,
    speeds: list[int | None],
    prompts: int,
    prompt_tokens: int,
    *,
    plot: Path | None,
    as_json: bool,
) -> None:
    from kvstore.cli.bench import ttft_sweep
    from kvstore.cli.output import console, make_table, print_json, progress

    settings = ttft_sweep.SweepSettings(
        model.resolve(), scratch, speeds, prompts=prompts, prompt_tokens=prompt_tokens
    )
    steps, behind = ttft_sweep.sweep(settings, progress(to_stderr=as_json))
    if plot is not None:
        ttft_sweep.plot(steps, plot)
    rows: list[dict[str, Any]] = [step.as_json() for step in steps]
    if as_json:
        cores = len(os.sched_getaffinity(0))
        print_json(
            {
                "cores": cores,
                "prompt_tokens": prompt_tokens,
                "steps": rows,
                "queued": [each.as_json() for each in behind],
            }
        )
        return
    columns = ("TTFT p50 ratio", "p95 ratio", "A/A p50", "A/A p95", "queued, disk / host")
    table = make_table("", ["disk"], columns)
    for row, each in zip(rows, behind, strict=True):
        speed = row["bytes_per_second"]
        table.add_row(
            "unlimited" if speed is None else f"{speed / 1e6:.0f} MB/s",
            *(
                f"{row[name]:.3f}"
                for name in ("p50_ratio", "p95_ratio", "aa_p50_ratio", "aa_p95_ratio")
            ),
            f"{each.ratio:.3f}",
        )
    console().print(table)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("prefetch")(prefetch)
