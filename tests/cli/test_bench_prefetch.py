"""The bench of prefetch: its arithmetic and its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli.bench.ttft_sweep import Step, plot


def steps() -> list[Step]:
    slow = Step(10_000_000, [1.0, 1.2, 1.1], [1.0, 1.3, 1.1], [1.1, 1.0, 1.2], [0, 0, 0])
    fast = Step(None, [1.0, 1.2, 1.1], [0.2, 0.3, 0.25], [1.1, 1.0, 1.2], [896] * 3)
    return [slow, fast]


def test_ratios_are_of_medians_and_of_the_95th_percentile() -> None:
    slow, fast = (step.as_json() for step in steps())
    assert slow["p50_ratio"] == pytest.approx(1.0)
    assert slow["p95_ratio"] == pytest.approx(1.3 / 1.2)
    assert fast["p50_ratio"] == pytest.approx(0.25 / 1.1)
    assert json.dumps(slow)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "sweep.png"
    plot(steps(), path)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_a_speed_that_is_none_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "bench", "prefetch", "--speeds", "10MB/s,fast"],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--speeds" in done.stderr
    assert "Traceback" not in done.stderr
