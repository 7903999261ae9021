"""The bench of prefetch: its arithmetic and its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.bench.queued import measure
from kvstore.cli.bench.ttft_sweep import Step, plot
from kvstore.cli.demo.engine_child import Answer


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


class Recorded:
    """Stands for the engine, the client and the space: says what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def flush(self, timeout_s: float) -> None:
        self.calls.append("flush")

    def evict(self, tier: str) -> None:
        self.calls.append(f"evict {tier}")

    def generate(self, prompt: list[int], max_tokens: int, ahead: Any = ()) -> Answer:
        self.calls.append((prompt, ahead))
        warm = "evict host" not in self.calls[-2:]
        return Answer(0.5 if warm else 0.6, 896, [1], 0)


def test_each_prompt_is_asked_for_from_disk_and_then_from_memory_behind_another_one() -> None:
    fake: Any = Recorded()
    fresh = iter(range(100, 200))
    result = measure(None, fake, fake, fake, [[1], [2]], lambda: [next(fresh)])
    assert fake.calls == [
        *("flush", "evict host", ([1], [[100]]), ([1], [[101]])),
        *("flush", "evict host", ([2], [[102]]), ([2], [[103]])),
    ]
    assert result.as_json()["ratio"] == pytest.approx(1.2)
    assert json.dumps(result.as_json())


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
