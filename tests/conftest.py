"""What every test runs under, and a daemon for those that need a real one."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Repeatable, and without per-example deadlines: CI machines are shared and slow at times.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# A shell starts what runs in its background with interrupts ignored, and children inherit that:
# with a handler here, theirs is the default again.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_READY_SECONDS = 90.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Daemon:
    """A daemon of a test's own: `python -m kvstore serve` with everything in one directory.

    Attributes:
        address: its Unix socket.
        tcp: its loopback TCP address.
        log: file that takes its output.
    """

    def __init__(self, directory: Path, *options: str, **environment: str) -> None:
        self.directory = directory
        self.options = options
        self.environment = environment
        self.address = f"unix://{directory / 'kvstore.sock'}"
        self.tcp = f"127.0.0.1:{_free_port()}"
        self.log = directory / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._pools: set[Path] = set()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Daemon:
        """Start it and wait until it serves."""
        command = [sys.executable, "-m", "kvstore", "serve", "--state", str(self.directory / "s")]
        command += ["--listen", self.address, "--listen", self.tcp]
        # Where blocks are after a start is what many tests look at.
        command += ["--warm-up", "0"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self.options],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.environment},
            )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _READY_SECONDS)
        line = self._process.stdout.readline().decode() if ready else ""
        if "kvstore ready " not in line:  # also as a JSON line
            self.kill()
            pytest.fail(f"the daemon said {line!r}; its log:\n{self.log.read_text()}")
        for fd in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if fd.readlink().name == "control":
                    self._pools.add(fd.readlink().parent)
        assert self._pools
        return self

    def stop(self) -> int:
        """Stop it as an operator would; return its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._wait()

    def kill(self) -> None:
        """End it without a chance to save anything."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._wait()

    def end(self) -> None:
        """Kill it and remove the memory that only its own next run would have removed."""
        self.kill()
        for pool in self._pools:
            shutil.rmtree(pool, ignore_errors=True)

    def _wait(self) -> int:
        assert self._process is not None
        code = self._process.wait(_READY_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def signal(self, number: int) -> None:
        """Send it a signal, such as SIGSTOP."""
        os.kill(self.pid, number)


@pytest.fixture(scope="session")
def new_daemon() -> type[Daemon]:
    """The class `Daemon`, for fixtures that outlive a test."""
    return Daemon


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Return a function that starts daemons; they are ended after the test."""
    started: list[Daemon] = []

    def start(*options: str, name: str = "d", **environment: str) -> Daemon:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        wanted = options if "--host-pool" in options else ("--host-pool", "128MiB", *options)
        daemon = Daemon(directory, *wanted, **environment)
        started.append(daemon)
        return daemon.start()

    yield start
    for daemon in started:
        daemon.end()


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon with 128 MiB of memory and no disk."""
    return start_daemon()


def wait_until(what: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `what()` is true; fail when it takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            pytest.fail(f"still not so after {seconds} s")
        time.sleep(0.005)


@pytest.fixture
def until() -> Callable[..., None]:
    """The function `wait_until`."""
    return wait_until
