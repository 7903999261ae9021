"""`kvstore explain`: what it prints, and how it ends."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from pathlib import Path

import pytest

from kvstore.cli.app import main

FINDING_FIELDS = {
    "kind": str,
    "prompts": int,
    "tokens_won": int,
    "chars_won": int,
    "line": int,
    "start": int,
    "end": int,
    "field": str,
    "field_start": int,
    "diverges": int,
    "before": str,
    "after": str,
    "variants": list,
    "advice": str,
}
GROUP_FIELDS = {
    "prompts": int,
    "shared_tokens": int,
    "shared_chars": int,
    "prefix": str,
    "ends_by": str,
    "field": str,
    "field_offset": int,
    "before": str,
    "variants": list,
}
FIELDS = {
    "file": str,
    "tokens_estimated": bool,
    "prompts": int,
    "chars": int,
    "tokens": int,
    "chars_per_token": float,
    "reused_percent": float,
    "reused_percent_after": float,
    "computed_tokens": int,
    "computed_tokens_after": int,
    "findings": list,
    "groups": list,
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["explain", *arguments])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rules = "Be polite. Use metric units. Never make up facts.\n" * 10
    lines = [f"[Time: 10:{n:02d}]\n{rules}Question {n * n}" for n in range(10, 50)]
    path.write_text("\n\n".join(json.dumps({"prompt": line}) for line in lines))
    return path


def test_the_table_shows_what_varies_and_what_to_do(prompts: Path) -> None:
    done = run(str(prompts))
    assert done.returncode == 0, done.stderr
    assert "40 prompts" in done.stdout
    assert "estimated at 4 chars a token" in done.stdout
    assert "timestamp" in done.stdout
    assert "prompt, character 7 (line " in done.stdout
    assert "put the time behind what does not change" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json_has_its_documented_fields(prompts: Path) -> None:
    done = run(str(prompts), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {name: type(value) for name, value in document.items()} == FIELDS
    (finding,) = document["findings"]
    assert {name: type(value) for name, value in finding.items()} == FINDING_FIELDS
    assert (finding["kind"], finding["start"], finding["end"]) == ("timestamp", 7, 12)
    assert document["reused_percent"] < 10
    assert document["reused_percent_after"] > 80
    (group,) = document["groups"]
    assert {name: type(value) for name, value in group.items()} == GROUP_FIELDS
    assert group["ends_by"] == "timestamp"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "is no JSON"),
        (b"[" * 200_000, "is no JSON (maximum recursion depth exceeded"),
        (b"7", "is no JSON object"),
        (b'{"text": "x"}', 'has neither a text "prompt" nor a list "messages"'),
        (b'{"messages": []}', "messages: is no list of messages"),
        (b'{"messages": [{"content": "x"}]}', "messages[0]: has no role"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content: is neither"),
        (b'{"prompt": "\xff"}', "is no UTF-8"),
    ],
)
def test_a_bad_line_is_named(prompts: Path, line: bytes, problem: str) -> None:
    before = prompts.read_bytes()
    prompts.write_bytes(before + b"\n" + line + b"\n")
    done = run(str(prompts))
    assert done.returncode == 1
    number = before.count(b"\n") + 2
    assert done.stderr.startswith(f"kvstore: {prompts}:{number}: {problem}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_no_prompts_and_no_tokenizer_are_one_line(prompts: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for arguments, problem in (
        ([str(empty)], "holds no prompts"),
        ([str(tmp_path / "none")], "No such file"),
        ([str(prompts), "--tokenizer", str(tmp_path / "none")], "no such file"),
    ):
        done = run(*arguments)
        assert done.returncode == 1
        assert problem in done.stderr
        assert done.stderr.count("\n") == 1
