"""The demo: its prompts, its verdict, and the whole of it with real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli.demo.corpus import text
from kvstore.cli.demo.engine_child import ALLOCATOR
from kvstore.cli.demo.hit_rate import HitRates
from kvstore.cli.demo.report import as_json, as_table
from kvstore.cli.demo.scenario import DemoResult, DemoSettings, Row

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "smollm2-fp32"
GOLDEN_TEXT = """Report number 3 of the town chronicle, about the ferry landing. An apprentice of the weather office rewound the clock when the tide had turned, until the light began to fail."""


def test_texts_are_the_same_everywhere() -> None:
    assert text(3, 20) == GOLDEN_TEXT
    assert text(7, 400) == text(7, 400)
    assert text(7, 400).startswith(text(7, 100))
    assert len(text(7, 400).split()) >= 400


def test_texts_share_no_first_block() -> None:
    """Two prompts with the same first block would make the cold row warm."""
    starts = [" ".join(text(number, 200).split()[:40]) for number in range(1000)]
    assert len(set(starts)) == 1000


def _result(**changes: object) -> DemoResult:
    settings = DemoSettings(model=Path("model"), directory=Path("x"), prompts=2, prompt_tokens=300)
    assert settings.full_block_tokens == 256
    outputs = [[1, 2], [3, 4]]
    rows = [
        Row("cold", [2.0, 4.0], 0, {}, outputs),
        Row("warm, same engine", [0.5, 0.5], 512, {"host": 512}, outputs),
        Row("warm, new engine", [0.5, 0.5], 512, {"host": 512}, outputs),
        Row("warm, from disk", [1.0, 1.0], 512, {"disk": 512}, outputs),
    ]
    for name, value in changes.items():
        row, field = name.split("_", 1)
        setattr(rows[int(row[1:])], field, value)
    return DemoResult(settings, rows)


def test_a_good_result() -> None:
    result = _result()
    assert result.problems() == []
    assert result.tokens_identical
    report = as_json(result)
    assert [row["speed_up"] for row in report["rows"]] == [1.0, 6.0, 6.0, 3.0]
    assert report["reusable_tokens"] == 512
    assert as_table(result).row_count == 4


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"r2_outputs": [[1, 2], [3, 5]]}, "generated tokens differ between rows"),
        ({"r0_reused_tokens": 128}, "cold: reused tokens before anything was stored"),
        ({"r1_reused_tokens": 460}, "warm, same engine: reused 460 of 512 tokens"),
        ({"r3_served_tokens": {"host": 512}}, "warm, from disk: was not served from disk"),
    ],
)
def test_a_bad_result_is_a_failure(change: dict[str, object], problem: str) -> None:
    """The demo must not print a nice table over something that did not work."""
    assert _result(**change).problems() == [problem]


def test_a_hit_rate_that_is_shown_wrongly_is_a_failure() -> None:
    right = HitRates("daemon 1", 0.5, {"stats": 0.5009, "status page": 0.5, "Prometheus": 0.4991})
    wrong = HitRates("daemon 2", 0.5, {"stats": 0.5011, "status page": 0.5, "Prometheus": 0.0})
    assert right.problem() is None
    assert str(right).endswith("outputs 50.0% (stats 50.1%, status page 50.0%, Prometheus 49.9%)")
    good = _result()
    result = DemoResult(good.settings, good.rows, [right, wrong])
    [problem] = result.problems()
    assert problem == (
        "daemon 2: the effective hit rate is 50.00% by the engines' outputs, but stats says 50.11%,"
        " Prometheus says 0.00%"
    )
    assert as_json(result)["hit_rates"][0]["shown"]["stats"] == 0.5009


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvstore", "demo", "--json"),
            *("--model", str(MODEL), "--dir", str(tmp_path), "--prompts", "5"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tokens_identical"] is True
    assert result["problems"] == []
    cold, *warm = result["rows"]
    assert [row["row"] for row in warm] == [
        "warm, same engine",
        "warm, new engine",
        "warm, from disk",
    ]
    assert cold["reused_tokens"] == 0
    for row in warm:
        assert row["reused_tokens"] >= 0.9 * result["reusable_tokens"]
        assert len(row["ttft_seconds"]) == 5
    assert list(warm[0]["served_tokens"]) == list(warm[1]["served_tokens"]) == ["host"]
    assert list(warm[2]["served_tokens"]) == ["disk"]
    first, second = result["hit_rates"]
    # Two of three times five prompts and two unrelated ones; five and one.
    tokens = result["prompt_tokens"]
    assert first["outputs"] == pytest.approx(2 * warm[0]["reused_tokens"] / (17 * tokens))
    assert second["outputs"] == pytest.approx(warm[2]["reused_tokens"] / (6 * tokens))
    for rates in (first, second):
        assert set(rates["shown"]) == {"stats", "status page", "Prometheus"}
        for rate in rates["shown"].values():
            assert rate == pytest.approx(rates["outputs"], abs=0.001)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.vllm
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvstore", "demo"),
            *("--model", str(MODEL), "--dir", str(tmp_path)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "starting engine 1" in line:
                break
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.communicate()
    assert demo.returncode == 130
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
    running = [
        command
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (command := _command_line(entry)) and str(tmp_path) in command
    ]
    assert running == []


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (ProcessLookupError, FileNotFoundError, PermissionError):
        return ""


def test_the_runner_ends_with_its_parent() -> None:
    """End of input ends it, also while vLLM is not even loaded."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.demo.runner"],
        input="",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0
    assert done.stdout == ""


# What a step does to the heap: three pieces of 9 MiB taken, written and given back.
_STEPS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [libc.malloc(9 << 20) for _ in range(3)]
    for piece in pieces:
        ctypes.memset(piece, 1, 9 << 20)
    for piece in pieces:
        libc.free(piece)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION"), reason="another allocator")
def test_engines_that_are_compared_keep_their_memory() -> None:
    """Or one of them may fault in its memory in every step, and the other not."""

    def faults(environment: dict[str, str]) -> list[int]:
        done = subprocess.run(
            [sys.executable, "-c", _STEPS],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={**os.environ, **environment},
        )
        return [int(line) for line in done.stdout.split()]

    assert max(faults(dict(ALLOCATOR))[1:]) < 500
