"""Killed, without power, damaged: no wrong byte, nothing acknowledged lost. See `crashtest`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from crash_points import POINTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Clients' points; `tests/client` and `tests/connector_vllm` stop there.
CLIENTS = ("flows", "connectors")


def crashtest(*options: str) -> tuple[int, str]:
    """Run the program: this process has threads, and must not fork a store."""
    done = subprocess.run(
        [sys.executable, os.fspath(HERE / "crashtest.py"), *options],
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What came of a kill at each named point."""
    path = tmp_path_factory.mktemp("crash") / "figures.json"
    _, output = crashtest("--each-point", "--json", os.fspath(path))
    assert path.exists(), output
    found: dict[str, Any] = json.loads(path.read_text())
    return found, output


@pytest.mark.parametrize("point", POINTS)
def test_killed_between_two_steps(point: str, everywhere: tuple[dict[str, Any], str]) -> None:
    found, output = everywhere
    assert found["kills"].get(point), f"no life got to {point}:\n{output}"
    assert not found["problems"], output


def test_killed_at_any_time() -> None:
    code, output = crashtest("--kills", "8")
    assert code == 0, output
    assert "0 wrong bytes, 0 lost acknowledged blocks, 0 leaks" in output


def test_the_power_is_lost() -> None:
    code, output = crashtest("--power-losses", "10")
    assert code == 0, output
    assert "power lost: " in output


@pytest.mark.parametrize(
    "mutant",
    [
        "records-before-data",
        "slots-before-deletes",
        "segments-without-names",
        "acknowledged-before-commit",
        "epoch-in-memory",
    ],
)
def test_a_wrong_order_is_noticed(mutant: str) -> None:
    code, output = crashtest("--mutant", mutant, "--kills", "150")
    assert code == 1, output
    assert "lost acknowledged blocks: life" in output


def test_damaged_while_stopped() -> None:
    code, output = crashtest("--damages", "16")
    assert code == 0, output


def test_every_point_of_the_daemon_is_tried() -> None:
    found: set[str] = set()
    for path in ROOT.glob("kvstore/**/*.py"):
        if not any(name in path.parts for name in CLIENTS):
            found |= set(re.findall(r'\breach\("([a-z_.]+)"\)', path.read_text()))
    for folder in ("tiers", "index", "prefetch"):
        for path in (ROOT / folder).glob("*.py"):
            found |= set(re.findall(r'\breach\("([a-z_.]+)"\)', path.read_text()))
    assert found == set(POINTS)
