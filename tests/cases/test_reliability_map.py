"""The map from stories to tests leads somewhere: every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "reliability.md"
STORIES = 37


@cache
def _tests_of(path: Path) -> frozenset[str]:
    """Return the names of the tests that pytest collects from a file."""
    if not path.is_file() or not path.name.startswith("test_"):
        return frozenset()
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in tree.body if isinstance(node, functions)}
    return frozenset(name for name in names if name.startswith("test_"))


def _named(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)


def test_every_test_that_the_map_names_exists() -> None:
    named = _named(PAGE.read_text())
    assert len(named) > 80
    missing = [
        f"{file}::{test}" for file, test in named if test not in _tests_of(REPOSITORY / file)
    ]
    assert not missing


def test_every_story_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, STORIES + 1))
    assert not [number for number, _, tests, _ in rows if not _named(tests)]


def test_every_promise_has_a_test() -> None:
    text = PAGE.read_text()
    table = text[text.index("| failure |") : text.index("## What is not promised")]
    rows = [row for row in table.splitlines()[2:] if row.startswith("|")]
    assert len(rows) > 20
    assert not [row for row in rows if not _named(row)]
