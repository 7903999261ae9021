"""`kvstore bench gpu` without a GPU: every path with host memory in its place, table, plot, errors."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.cli import main
from kvstore.cli.bench.figure import Figure, rate
from kvstore.cli.bench.gpu_cache import FakeCache
from kvstore.cli.bench.gpu_command import run
from kvstore.cli.bench.gpu_machine import HostMachine
from kvstore.cli.bench.gpu_plan import Case, Layout, Leg, Plan
from kvstore.cli.bench.gpu_plot import draw, series
from kvstore.cli.bench.gpu_run import Kit
from kvstore.cli.bench.gpu_table import tables
from kvstore.cli.child import ChildError
from kvstore.client import Client
from kvstore.connectors.vllm.copier import CpuCopier
from kvstore.units import KIB, MIB

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)

_PNG = b"\x89PNG\r\n\x1a\n"


class _Forgetful(CpuCopier):
    """Says that it has loaded, and leaves one block out."""

    def load(self, blocks: Any, run: Any, skip: int, done: Any, *more: Any, **named: Any) -> Any:
        everything = np.ones(len(blocks), np.bool_)
        return super().load(blocks[:-1], run, skip, lambda _: done(everything), *more, **named)


@pytest.fixture
def short() -> Iterator[Path]:
    """Return a directory whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as name:
        yield Path(name)


def _kit(copier: type[CpuCopier] = CpuCopier) -> Kit:
    return Kit(
        machine=HostMachine(),
        client_of=Client,
        copier_of=lambda geometry, attachment, blocks, _: copier(geometry, attachment, 0, blocks),
        pinned=lambda _: True,
    )


def _plan(*legs: Leg) -> Plan:
    return Plan(legs, tuple(Layout), (4 * MIB,), 8 * MIB, 16, rounds=1)


def _figures() -> list[Figure]:
    found = [rate("raw, host to GPU", 10**9, [0.02])]
    for layout in Layout:
        for size, seconds in (("2 MiB", 0.025), ("64 KiB", 0.1)):
            found.append(
                rate(f"load, {layout}, {size}", 10**9, [seconds], [0.02], "raw copy", target=0.9)
            )
    return found


@needs_torch
def test_every_leg_with_host_memory_in_place_of_a_gpu(
    short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Daemon, leases, grants and copier are the real ones; what came back is what was stored."""
    run(_plan(Leg.RAW, Leg.HOST, Leg.DISK), _kit(), short, short / "plot.png", as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"machine": HostMachine.name, "rounds": 1}
    figures = {line["name"]: line for line in lines[1:]}
    moves = [
        *("load", "store", "load and store", "load with Acquire", "store with Reserve and Commit"),
        "disk to host to GPU",
    ]
    expected = {f"{move}, {layout}, 4 MiB" for move in moves for layout in ("blocks", "layers")}
    alone = {name for name in figures if name.startswith("raw, ")}
    assert len(alone) == 4
    assert set(figures) - alone == expected
    assert all(figure["value"] > 0 for figure in figures.values())
    assert all(figures[name]["ratio"] > 0 for name in expected)
    assert figures["load, layers, 4 MiB"]["target"] == 0.95
    assert (short / "plot.png").read_bytes().startswith(_PNG)
    assert [path.name for path in short.iterdir()] == ["plot.png"]


@needs_torch
def test_a_copier_that_leaves_bytes_out_is_found_out(short: Path) -> None:
    """The comparison is what makes the figures worth anything."""
    with pytest.raises(ChildError, match="1 engine blocks are not what was stored"):
        run(_plan(Leg.HOST), _kit(_Forgetful), short, None, as_json=True)


@needs_torch
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("shard", [64 * KIB, 4 * MIB])
def test_sources_and_targets_share_no_block(layout: Layout, shard: int) -> None:
    case = Case(layout, shard, 8 * MIB, 16)
    cache = FakeCache(HostMachine(), case)
    blocks = np.concatenate((cache.sources.ravel(), cache.targets))
    assert sorted(blocks) == list(range(cache.engine_blocks))
    count = case.blocks * case.group_blocks
    assert cache.wrong_blocks() == count  # random bytes differ
    for tensor in cache.tensors.values():
        tensor[cache.targets.astype(np.int64)] = tensor[cache.sources.ravel().astype(np.int64)]
    assert cache.wrong_blocks() == 0
    next(iter(cache.tensors.values()))[int(cache.targets[0]), -1] += 1
    assert cache.wrong_blocks() == 1
    before = next(iter(cache.tensors.values())).clone()
    cache.refresh()
    cache.poison()
    after = next(iter(cache.tensors.values()))
    assert cache.wrong_blocks() == count
    assert (after[cache.targets.astype(np.int64)] == 0xA5).all()
    assert (after[cache.sources.ravel().astype(np.int64)] != before[cache.sources.ravel()]).any()


def test_a_table_marks_missed_targets() -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=io.StringIO())
    alone, table = tables(_figures())
    console.print(alone, table)
    text = console.export_text()
    assert alone.row_count == 1
    assert table.row_count == 4
    assert "40 0.80!" in text
    assert "10 0.20!" in text
    assert "GPU pool" not in text  # nothing was measured there


def test_the_plot_is_sorted_by_size(tmp_path: Path) -> None:
    assert series(_figures()) == {
        layout: {"load": [(64 * KIB, 10.0, 50.0), (2 * MIB, 40.0, 50.0)]}
        for layout in ("blocks", "layers")
    }
    draw(_figures(), tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(_PNG)
    with pytest.raises(ChildError, match="nothing was measured"):
        draw(_figures()[:1], tmp_path / "none.png", "title")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--shard", "3KiB"], "3KiB is less than 4 KiB"),
        (["--shard", "5MiB"], "5MiB is no multiple of 4 KiB, or of 2 MiB when larger"),
        (["--shard", "large"], "--shard"),
        (["--only", "gpu"], "--only"),
        (["--layout", "rows"], "--layout"),
        (["--size", "1KiB"], "1KiB is less than 1 MiB"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "gpu", *arguments]) == 2
    errors = capsys.readouterr().err
    assert problem in errors
    assert len(errors.splitlines()) == 1


def test_without_a_gpu_it_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "bench", "gpu"],
        capture_output=True,
        text=True,
        check=False,
        env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvstore: no GPU can be measured: ")
    assert len(done.stderr.splitlines()) == 1
