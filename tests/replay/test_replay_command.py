"""`kvstore replay`: traces it reads, what it prints, how it ends."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.app import main
from kvstore.replay import TraceFormat, open_trace, synthetic_lines

CHATS = Path(__file__).parent / "chats.jsonl"


def run(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.stdin = sys.stdin, io.StringIO(given)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["replay", *arguments])
    finally:
        sys.stdin = before
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def run_json(*arguments: str, given: str = "") -> Any:
    done = run(*arguments, "--json", given=given)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SIZE_FIELDS = {
    "host_bytes": int,
    "disk_bytes": int,
    "requests": int,
    "blocks": int,
    "tokens": int,
    "block_hit_rate": float,
    "token_hit_rate": float,
    "block_hit_rate_host": float,
    "block_hit_rate_disk": float,
    "token_hit_rate_host": float,
    "token_hit_rate_disk": float,
    "hit_blocks_host": int,
    "hit_blocks_disk": int,
    "not_worth_blocks": int,
    "stored_blocks": int,
    "not_stored_blocks": int,
    "promoted_blocks": int,
    "evicted_blocks_host": int,
    "evicted_blocks_disk": int,
    "disk_written_blocks": int,
    "disk_written_bytes": int,
    "disk_written_bytes_per_day": float,
    "drive_writes_per_day": float,
    "ttft_seconds": dict,
    "span_seconds": float,
}


def test_json_of_one_pool_has_its_rates_at_the_top() -> None:
    document = run_json(str(CHATS), "--blocks", "200")
    assert document["block_hit_rate"] == pytest.approx(33.70, abs=0.01)
    assert document["token_hit_rate"] == pytest.approx(34.42, abs=0.01)
    assert document["trace"]["format"] == "mooncake"
    assert document["trace"]["requests"] == 600
    assert document["recommendation"] is None
    (size,) = document["sizes"]
    assert {name: type(value) for name, value in size.items()} == SIZE_FIELDS
    assert size["host_bytes"] == 200 * 512 * 128 * 1024
    assert set(size["ttft_seconds"]) == {"mean", "p50", "p95", "p99", "max"}


def test_a_grid_with_a_recommendation_and_a_plot(tmp_path: Path) -> None:
    png = tmp_path / "sizes.png"
    arguments = [str(CHATS), "--host", "4GiB,16GiB", "--disk", "0,64GiB", "--recommend", "5%"]
    done = run(*arguments, "--plot", str(png))
    assert done.returncode == 0, done.stderr
    assert "600 requests" in done.stdout
    assert "recommended: " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert png.read_bytes().startswith(b"\x89PNG")
    document = run_json(*arguments)
    assert len(document["sizes"]) == 4
    assert "block_hit_rate" not in document
    best = document["recommendation"]
    assert best["ttft_mean_seconds"] <= 1.05 * best["best_ttft_mean_seconds"]
    assert best["price"] <= best["best_price"]
    by_size = {(s["host_bytes"], s["disk_bytes"]): s for s in document["sizes"]}
    roomy, narrow = by_size[16 << 30, 64 << 30], by_size[4 << 30, 0]
    assert roomy["token_hit_rate"] > narrow["token_hit_rate"]
    assert roomy["disk_written_bytes"] > 0 == narrow["disk_written_bytes"]


def test_a_generated_trace_comes_through_a_pipe() -> None:
    made = run("--generate", "300", "--seed", "5")
    assert made.returncode == 0
    assert made.stdout.splitlines() == list(synthetic_lines(300, 5))
    document = run_json("-", "--blocks", "unlimited", given=made.stdout)
    assert document["requests"] == 300
    assert document["host_bytes"] is None


def bailian(at: float, ids: list[int], tokens: int) -> str:
    fields: dict[str, Any] = {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": at,
        "input_length": tokens,
    }
    fields |= {"output_length": 3, "type": "text", "turn": 1, "hash_ids": ids}
    return json.dumps(fields)


def test_bailian_traces_are_told_by_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "bailian.jsonl.gz"
    lines = [bailian(0.5, [1, 2, 3], 45), bailian(61.25, [1, 2, 9], 48), bailian(70, [2, 3], 32)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    trace = open_trace(str(path), token_bytes=1024)
    requests = list(trace)
    trace.close()
    assert trace.format is TraceFormat.BAILIAN
    assert trace.spaces[0].block_bytes == 16 * 1024
    assert [r.at for r in requests] == [0.5, 61.25, 70.0]
    assert requests[0].keys[:2] == requests[1].keys[:2]
    # Equal blocks after different prefixes are different blocks.
    assert not set(requests[2].keys) & set(requests[0].keys)
    document = run_json(str(path), "--blocks", "100")
    assert document["hit_blocks_host"] == 2
    assert document["token_hit_rate"] == pytest.approx(100 * 32 / 125)


GOOD = '{"timestamp": 0, "input_length": 512, "hash_ids": [1]}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is no JSON"),
        ("[" * 200_000, "is no JSON (maximum recursion depth exceeded"),
        ("[]", "is no JSON object"),
        ('{"timestamp": 1}', "hash_ids: a list of numbers is missing"),
        ('{"timestamp": 1, "hash_ids": ["a"]}', "hash_ids: 'a' is no number"),
        ('{"timestamp": 1, "hash_ids": [-1]}', "hash_ids: -1 is no number"),
        ('{"timestamp": "x", "hash_ids": [1]}', "timestamp: 'x' is no time"),
        ('{"timestamp": 1, "input_length": -5, "hash_ids": [1]}', "input_length: -5"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    done = run(str(path), "--blocks", "10")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"kvstore: {path}:3: {problem}")
    assert done.stderr.count("\n") == 1


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    torn, binary = tmp_path / "torn.gz", tmp_path / "binary"
    torn.write_bytes(gzip.compress(CHATS.read_bytes())[:-1000])
    binary.write_bytes(f"{GOOD}\n".encode() + b"\xff\xfe\n")
    for path, problem in ((torn, "cannot be read"), (binary, "is no text")):
        done = run(str(path), "--blocks", "10")
        assert done.returncode == 1
        assert problem in done.stderr
        assert done.stderr.startswith(f"kvstore: {path}:")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["no/such/file"], "trace: no/such/file: No such file"),
        ([], "trace: name a file"),
        ([str(CHATS), "--blocks", "0"], "blocks: '0'"),
        ([str(CHATS), "--host", "lots"], "'lots' is not a size"),
        ([str(CHATS), "--write-policy", "never"], "write-policy: 'never'"),
        ([str(CHATS), "--recommend", "most"], "recommend: 'most'"),
        ([str(CHATS), "--disk-read", "0"], "disk-read: '0'"),
        (["-"], "-: is empty"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], problem: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvstore: {problem}")
    assert done.stderr.count("\n") == 1


def test_a_real_daemon_does_what_was_predicted() -> None:
    """Both tiers overflow; what the prediction is for must come out within 15 %."""
    sizes = ["--host", "16MiB", "--disk", "32MiB", "--token-bytes", "128", "--limit", "200"]
    document = run_json(str(CHATS), *sizes, "--measure")
    assert document["evicted_blocks_host"] > 500
    assert document["evicted_blocks_disk"] > 500
    measured = document["measured"]
    assert set(measured) == {"hit_blocks_host", "hit_blocks_disk", "disk_written_bytes"}
    assert measured["hit_blocks_disk"]["measured"] > 200
    for name, row in measured.items():
        assert row["predicted"] == document[name]
        assert abs(row["off_percent"]) < 15, name


def test_a_measured_size_is_one_size() -> None:
    for sizes in (["--blocks", "5"], ["--host", "16MiB"]):
        done = run(str(CHATS), *sizes, "--measure")
        assert done.returncode == 1
        assert done.stderr.startswith("kvstore: measure: needs one --host and one --disk")
