"""The bench of prefetch on a trace: what the oracle says, and that a small one runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli.bench.prefetch_trace import Question, regret
from kvstore.keys import Keys

COMPUTE, READ = 10.0, 4.0


def question(
    cold: str, grown: list[tuple[float, int]], ended: float, ahead: float = 0.0
) -> Question:
    """A request at 100 s. `cold`: d for blocks on disk, m for those in memory."""
    keys = Keys.of([bytes([at]) * 16 for at in range(1, len(cold) + 1)], 16)
    made = Question(keys, [c == "d" for c in cold], 100.0, ahead)
    made.grown = [(100.0 + after, blocks) for after, blocks in grown]
    made.ended = 100.0 + ended
    return made


@pytest.mark.parametrize(
    ("asked", "first_token", "lost"),
    [
        # Waited for all, as it should.
        (question("mdd", [(0.1, 1), (4, 2), (8, 3)], 8), 8, 0),
        # Declined, with an idle disk: 8 s of waiting would have spared 20 of computing.
        (question("mdd", [(0.1, 1)], 0.1), 20, 12),
        # Declined, with so much to read before it that it would not have paid.
        (question("mdd", [(0.1, 1)], 0.1, ahead=5), 20, 0),
        # Waited for a disk that was slower than computing: it should have computed.
        (question("mdd", [(0.1, 1), (15, 2), (30, 3)], 30), 30, 10),
        # … or given up after the first one.
        (question("dd", [(0.1, 0), (4, 1), (30, 2)], 30), 30, 16),
        # Given up too early: the second would have come at 8 s.
        (question("dd", [(0.1, 0), (4, 1)], 4), 14, 6),
        # All there at once.
        (question("mm", [(0.1, 2)], 0.1), 0, 0),
    ],
)
def test_the_oracle_knows_when_blocks_would_have_come(
    asked: Question, first_token: float, lost: float
) -> None:
    assert asked.first_token(COMPUTE) == pytest.approx(first_token)
    assert regret(asked, COMPUTE, READ) == pytest.approx(lost)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", "bench", "prefetch", *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )


def test_a_small_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 250 * at, "input_length": 512 * 6, "hash_ids": [0, *range(k, k + 5)]}
        for at, k in enumerate([10, 20, 30, 10, 20, 10])
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = bench("--trace", str(trace), "--dir", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    saved = [f for f in figures if "of 3 requests found blocks on disk" in f["name"]]
    regrets = [f for f in figures if f["name"].startswith("regret")]
    assert len(saved) == len(regrets) == 3  # disk speeds
    assert all(f["target"] == 5.0 for f in regrets)


def test_a_trace_that_repeats_nothing_is_one_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\n')
    done = bench("--trace", str(trace), "--dir", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"kvstore: trace: no request of {trace} has a block of an earlier one\n"
