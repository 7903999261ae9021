"""The bench: its arithmetic, its baselines, and one round of the whole of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore.cli.bench.figure import rate, times
from kvstore.cli.bench.raw import RawDisk, copy_seconds, pieces, touched
from kvstore.cli.bench.report import as_table


def test_rates_are_medians_of_both_sides() -> None:
    figure = rate("put", 10**9, [1.0, 0.5, 0.25], [0.5, 0.2, 0.25], "memcpy", target=0.6)
    assert (figure.value, figure.baseline, figure.ratio) == (2.0, 4.0, 0.5)
    assert figure.met is False
    assert figure.as_json()["samples"] == [1.0, 2.0, 4.0]
    alone = rate("put", 10**9, [0.5])
    assert (alone.value, alone.baseline, alone.ratio, alone.met) == (2.0, None, None, None)


def test_times_are_limits() -> None:
    assert times("lookup", [0.0003], target_ms=0.4).met is True
    assert times("lookup", [0.0005], target_ms=0.4).met is False
    assert times("lookup", [0.002, 0.001, 0.003], [0.001], "echo").ratio == 2.0


def test_a_table_has_a_row_a_figure() -> None:
    table = as_table([rate("put", 10, [1.0], [2.0], "memcpy", target=0.6), times("x", [1.0])])
    assert table.row_count == 2


def test_the_baselines_move_the_bytes_that_they_claim(tmp_path: Path) -> None:
    """A baseline that moved less would flatter nobody but itself."""
    source, target = touched(8, 1 << 20), touched(8, 1 << 20)
    source[:] = np.random.default_rng(0).integers(0, 256, source.shape, np.uint8)
    assert copy_seconds(source, target) > 0
    assert np.array_equal(source, target)

    file = tmp_path / "raw"
    memory = source.copy()
    buffer = touched(*memory.shape)
    buffer[:] = memory
    disk = RawDisk(2, pieces(buffer))
    try:
        assert disk.write_seconds(file, memory.nbytes, syncs=3) > 0
        assert file.read_bytes() == memory.tobytes()
        half = memory.nbytes // 2
        other = tmp_path / "other"
        other.write_bytes(b"\1" * half)
        disk.read_seconds([(other, half), (file, half)])
    finally:
        disk.close()
    read = buffer.tobytes()
    assert read[:half] == b"\1" * half
    assert read[half:] == memory.tobytes()[:half]


LEGS = ("memory", "disk", "calls", "stream", "restart")


@pytest.mark.slow
def test_one_round(tmp_path: Path) -> None:
    """Every leg runs, checks what it moved, and leaves nothing behind."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvstore", "bench"),
            *("--rounds", "1", "--json", "--dir", str(tmp_path), "--restart-size", "128MiB"),
            *(word for leg in LEGS for word in ("--only", leg)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    figures = {figure["name"]: figure for figure in result["figures"]}
    assert set(figures) == {
        "put, local",
        "put, local, first touch",
        "get, local",
        "host to disk, synced",
        "disk to host, with digest",
        "O_DIRECT writes from huge pages",
        "O_DIRECT reads into huge pages",
        "Lookup of 1,000 keys, handler",
        "Lookup of 1,000 keys, client",
        "Acquire of 1,000 keys, handler",
        "Acquire of 1,000 keys, client",
        "put, TCP stream",
        "get, TCP stream",
        "restart with 128 MiB, exec to ready",
        "restart with 128 MiB, SIGTERM to exit",
        "restart with 128 MiB, ready to client attached",
        "restart with 128 MiB, ready to 128 MiB read",
        "restart with 128 MiB, ready to all checked",
    }
    assert all(figure["value"] > 0 for figure in figures.values())
    assert [n for n, f in figures.items() if f["target"] is not None] == [
        "put, local",
        "get, local",
        "host to disk, synced",
        "disk to host, with digest",
        "Lookup of 1,000 keys, handler",
        "restart with 128 MiB, exec to ready",
    ]
    assert list(tmp_path.iterdir()) == []
