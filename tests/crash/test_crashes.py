"""Killed, without power, damaged: no wrong byte, nothing acknowledged lost. See `crashtest`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_points import POINTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Clients' points; `tests/client` and `tests/connector_vllm` stop there.
CLIENTS = ("flows", "connectors")
# Of the program's wrong orders, those that the order of syncs and commits is about.
MUTANTS = ("records-before-data", "slots-before-deletes", "segments-without-names")
FIGURES = "figures.json"


class Runs:
    """Runs of the program, all at once: they mostly wait for the disk and for processes.

    A program, because this process has threads and must not fork a store.
    """

    def __init__(self, directory: Path) -> None:
        self.figures = directory / FIGURES
        options = {
            "each point": ["--each-point", "--json", os.fspath(self.figures)],
            "any time": ["--kills", "8"],
            "power": ["--power-losses", "10"],
            "damage": ["--damages", "16"],
            **{mutant: ["--mutant", mutant, "--kills", "2000"] for mutant in MUTANTS},
        }
        self._results: dict[str, tuple[int, str]] = {}
        self._running = {
            name: subprocess.Popen(
                [sys.executable, os.fspath(HERE / "crashtest.py"), *given],
                env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name, given in options.items()
        }

    def result(self, name: str) -> tuple[int, str]:
        """Wait for one; return its exit code and what it printed."""
        if name in self._running:
            process = self._running.pop(name)
            output, _ = process.communicate()
            self._results[name] = process.returncode, output
        return self._results[name]

    def close(self) -> None:
        """End those that nobody asked for; they clean up behind themselves."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.communicate()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    started = Runs(tmp_path_factory.mktemp("crash"))
    yield started
    started.close()


@pytest.mark.parametrize("point", POINTS)
def test_killed_between_two_steps(point: str, runs: Runs) -> None:
    _, output = runs.result("each point")
    found: dict[str, Any] = json.loads(runs.figures.read_text())
    assert found["kills"].get(point), f"no life got to {point}:\n{output}"
    assert not found["problems"], output


def test_killed_at_any_time(runs: Runs) -> None:
    code, output = runs.result("any time")
    assert code == 0, output
    assert "0 wrong bytes, 0 lost acknowledged blocks, 0 leaks" in output


def test_the_power_is_lost(runs: Runs) -> None:
    code, output = runs.result("power")
    assert code == 0, output
    assert "power lost: " in output


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_order_is_noticed(mutant: str, runs: Runs) -> None:
    code, output = runs.result(mutant)
    assert code == 1, output
    assert "lost acknowledged blocks: life" in output


def test_damaged_while_stopped(runs: Runs) -> None:
    code, output = runs.result("damage")
    assert code == 0, output
    assert "damages: " in output


def test_every_point_of_the_daemon_is_tried() -> None:
    found: set[str] = set()
    for path in ROOT.glob("kvstore/**/*.py"):
        if not any(name in path.parts for name in CLIENTS):
            found |= set(re.findall(r'\breach\("([a-z_.]+)"\)', path.read_text()))
    for folder in ("tiers", "index", "prefetch"):
        for path in (ROOT / folder).glob("*.py"):
            found |= set(re.findall(r'\breach\("([a-z_.]+)"\)', path.read_text()))
    assert found == set(POINTS)
