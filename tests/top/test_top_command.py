"""`kvstore top` against a real daemon, in a pipe and in a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.cli.child import ChildDaemon

_DEADLINE_SECONDS = 60.0


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A daemon with a chain of four blocks."""
    child = ChildDaemon(tmp_path, ["--host-pool", "64MiB"])
    with kvstore.Client(child.address) as client:
        spec = kvstore.SpaceSpec(
            model="some/model", dtype="bfloat16", block_tokens=16, shard_bytes=(65536,)
        )
        keys = kvstore.chain_keys(list(range(64)), 16)
        space = client.open_space(spec)
        assert space.put(keys, np.ones((4, 65536), np.uint8)) == 4
        assert space.get(keys, np.empty((4, 65536), np.uint8)) == 4
    yield child.address
    assert child.stop() == 0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvstore", "top", *arguments]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=_DEADLINE_SECONDS,
        env={**os.environ, **environment},
    )


def test_once_prints_one_frame(address: str) -> None:
    done = run("--once", "--interval", "100ms", "--address", address)
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("HIT RATE", "\nhost ", "some/model", "QUEUE", "MISSED BLOCKS", "PREFIXES"):
        assert done.stdout.count(part) == 1
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    ascii_only = run("--once", "-i", "100ms", "-a", address, PYTHONIOENCODING="ascii")
    assert ascii_only.returncode == 0, ascii_only.stderr
    assert ascii_only.stdout.isascii()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--once"], "no daemon answers at unix:///nowhere.sock"),
        (["--once", "--interval", "1ms"], "interval: 1ms is not between"),
        (["--once", "--interval", "often"], "'often' is not a duration"),
        ([], "--once prints one frame"),
    ],
)
def test_what_cannot_be_shown_is_one_line(arguments: list[str], told: str) -> None:
    done = run(*arguments, "--address", "unix:///nowhere.sock")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert told in line


class Terminal:
    """`kvstore top` in a terminal of 80 columns and 24 lines."""

    def __init__(self, address: str) -> None:
        self.fd, child = pty.openpty()
        termios.tcsetwinsize(child, (24, 80))
        self.mode = termios.tcgetattr(child)
        self.process = subprocess.Popen(
            command("--address", address, "--interval", "100ms"),
            stdin=child,
            stdout=child,
            stderr=child,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        self.child = child
        self.output = ""

    def until(self, wanted: str) -> None:
        """Read until a text comes; what was before it is forgotten."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while wanted not in self.output:
            ready, _, _ = select.select([self.fd], [], [], deadline - time.monotonic())
            assert ready, self.output
            self.output += os.read(self.fd, 65536).decode(errors="replace")
        self.output = self.output.partition(wanted)[2]

    def press(self, key: str) -> None:
        os.write(self.fd, key.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self.child)


@pytest.fixture
def terminal(address: str) -> Iterator[Terminal]:
    with contextlib.closing(Terminal(address)) as opened:
        yield opened


def test_keys_in_a_terminal(terminal: Terminal) -> None:
    terminal.until("some/model")
    terminal.press("p")
    terminal.until("PAUSED")
    terminal.press("s")
    terminal.until("sort: hit rate")
    # In 24 lines there is room for one of the two lists.
    terminal.press("v")
    terminal.until("PREFIXES, SHARED")
    terminal.until("sort: hot")
    terminal.press("p")
    terminal.until("pause")
    terminal.press("q")
    # Back from the other screen.
    terminal.until("\x1b[?1049l")
    assert terminal.process.wait(_DEADLINE_SECONDS) == 0
    assert termios.tcgetattr(terminal.child) == terminal.mode


def test_a_daemon_that_stops_ends_the_view(tmp_path: Path) -> None:
    child = ChildDaemon(tmp_path, ["--host-pool", "64MiB"])
    with contextlib.closing(Terminal(child.address)) as opened:
        opened.until("HIT RATE")
        assert child.stop() == 0
        opened.until("kvstore: no daemon answers at")
        assert opened.process.wait(_DEADLINE_SECONDS) == 1
