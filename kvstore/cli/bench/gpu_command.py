"""The `bench gpu` command."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.bench.gpu_plan import Layout, Leg, Plan
from kvstore.errors import ConfigError
from kvstore.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from kvstore.cli.bench.gpu_run import Kit

__all__ = ["register"]

_SHARDS = ("64KiB", "256KiB", "1MiB", "2MiB", "4MiB", "16MiB")
# The engine's pieces must be whole: 32 layers, each a multiple of 16 bytes, up to 2 MiB a block.
_SHARD_STEP = 32 * 16


def _size(name: str, text: str, least: int) -> int:
    try:
        size = parse_bytes(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{name}'") from error
    if size < least:
        raise typer.BadParameter(
            f"{text} is less than {format_bytes(least)}", param_hint=f"'{name}'"
        )
    return size


def _shard(text: str) -> int:
    size = _size("--shard", text, 4096)
    block = 2 << 20
    if size % (_SHARD_STEP if size <= block else block) or size % 4096:
        raise typer.BadParameter(
            f"{text} is no multiple of 4 KiB, or of 2 MiB when larger", param_hint="'--shard'"
        )
    return size


def gpu(
    device: Annotated[int, typer.Option(min=0, metavar="N", help="CUDA device.")] = 0,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            exists=True,
            file_okay=False,
            writable=True,
            help="Where to put the scratch directory: on the disk that is to be measured.",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Rounds that medians are taken of.")
    ] = 5,
    only: Annotated[
        list[Leg] | None,
        typer.Option("--only", metavar="LEG", help="raw, host, pool or disk; repeatable. All."),
    ] = None,
    layout: Annotated[
        list[Layout] | None,
        typer.Option("--layout", metavar="LAYOUT", help="blocks or layers; repeatable."),
    ] = None,
    shard: Annotated[
        list[str] | None,
        typer.Option(
            "--shard",
            metavar="SIZE",
            help=f"Size of a stored block; repeatable. {', '.join(_SHARDS)}.",
        ),
    ] = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes to move at once.")] = "1GiB",
    blocks: Annotated[
        int, typer.Option(min=1, max=32768, metavar="N", help="Most blocks to move at once.")
    ] = 4096,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Also draw the figures into a PNG file."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print every sample as JSON, figure by figure; progress on stderr."
        ),
    ] = False,
) -> None:
    """Measure copies between a GPU and kvstore beside the bus alone.

    Starts daemons of its own; takes host memory of five times SIZE and GPU memory of six times
    SIZE. Every byte that is loaded is compared with what was stored.
    """
    plan = Plan(
        legs=tuple(only or Leg),
        layouts=tuple(layout or Layout),
        shards=tuple(_shard(text) for text in shard or _SHARDS),
        total_bytes=_size("--size", size, 1 << 20),
        most_blocks=blocks,
        rounds=rounds,
    )
    from kvstore.cli.bench.gpu_cuda import cuda_kit

    run(plan, cuda_kit(device), directory, plot, as_json=as_json)


def run(plan: Plan, kit: Kit, directory: Path | None, plot: Path | None, *, as_json: bool) -> None:
    """Measure and print."""
    import json

    from kvstore.cli.bench import gpu_plot, gpu_run, gpu_table
    from kvstore.cli.child import interruptible
    from kvstore.cli.output import console, progress

    say = progress(to_stderr=as_json)
    figures = []
    with (
        interruptible(),
        tempfile.TemporaryDirectory(
            prefix="kvstore-bench-", dir=directory, ignore_cleanup_errors=True
        ) as scratch,
    ):
        if as_json:
            print(json.dumps({"machine": kit.machine.name, "rounds": plan.rounds}), flush=True)
        for figure in gpu_run.measure(plan, kit, Path(scratch), say):
            figures.append(figure)
            if as_json:
                # One line each, at once: an interrupted run has everything up to there.
                print(json.dumps(figure.as_json(), ensure_ascii=False), flush=True)
    if not as_json:
        for table in gpu_table.tables(figures):
            console().print(table)
    if plot is not None:
        gpu_plot.draw(figures, plot, f"kvstore bench gpu: {kit.machine.name}")
        say(f"drawn: {plot}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gpu")(gpu)
