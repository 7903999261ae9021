"""What a service manager hears of a daemon, and what a daemon makes of one that does not listen."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.server.service_manager import ServiceManager

_SECONDS = 60.0


class Manager:
    """Takes what daemons say, as it comes: a socket's queue is short."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._said: queue.Queue[bytes] = queue.Queue()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while said := self._socket.recv(4096):
            self._said.put(said)

    def hear(self) -> dict[str, str]:
        lines = self._said.get(timeout=_SECONDS).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def hear_of(self, name: str) -> dict[str, str]:
        while name not in (said := self.hear()):
            pass
        return said

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", self.path)
        self._thread.join()
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    listening = Manager(str(tmp_path / "notify"))
    yield listening
    listening.close()


def test_a_daemon_says_that_it_serves_lives_and_stops(
    start_daemon: Callable[..., Any], manager: Manager
) -> None:
    daemon = start_daemon(NOTIFY_SOCKET=manager.path, WATCHDOG_USEC="200000")
    ready = manager.hear()
    assert ready["READY"] == "1"
    assert ready["STATUS"].startswith("kvstore ready listen=unix://")
    # Again and again, not once.
    for _ in range(3):
        assert manager.hear() == {"WATCHDOG": "1"}
    daemon.stop()
    stopping = manager.hear_of("STOPPING")
    assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 20_000_000


def test_nobody_is_told_where_nobody_asked(manager: Manager) -> None:
    async def run(**environment: str) -> None:
        told = ServiceManager(environment)
        told.ready("serves")
        told.stopping(1)
        told.close()

    asyncio.run(run())
    # The watchdog of another process: only the state is told.
    asyncio.run(run(NOTIFY_SOCKET=manager.path, WATCHDOG_USEC="1000", WATCHDOG_PID="1"))
    assert manager.hear()["MAINPID"] == str(os.getpid())
    assert set(manager.hear()) == {"STOPPING", "STATUS", "EXTEND_TIMEOUT_USEC"}


def test_names_without_a_file() -> None:
    """An abstract socket, as systemd names them in containers."""
    listening = Manager(f"\0kvstore-test-{os.getpid()}")
    told = ServiceManager({"NOTIFY_SOCKET": f"@kvstore-test-{os.getpid()}"})
    told.stopping(0)
    assert listening.hear()["STOPPING"] == "1"
    listening.close()


def test_a_manager_that_is_gone_or_does_not_read_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "notify")
    gone = ServiceManager({"NOTIFY_SOCKET": path})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf, caplog.at_level(logging.WARNING):
        gone.stopping(0)
        gone.stopping(0)
        deaf.bind(path)
        full = ServiceManager({"NOTIFY_SOCKET": path})
        while len(caplog.records) < 2:
            full.stopping(0)
        full.stopping(0)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all(line.startswith("the service manager cannot be told") for line in told)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60000000", 60.0),
        ("1", 0.1),
        ("0", 0.0),
        ("", 0.0),
        ("-5", 0.0),
        ("soon", 0.0),
        ("\u0663", 0.0),
        ("9" * 400, 0.0),
        ("9" * 5000, 0.0),
    ],
)
def test_a_watchdog_that_makes_no_sense_is_none_or_a_slow_one(text: str, seconds: float) -> None:
    assert ServiceManager._watchdog_seconds({"WATCHDOG_USEC": text}) == seconds


def test_a_status_that_is_no_text_is_told_all_the_same(manager: Manager) -> None:
    async def run() -> None:
        told = ServiceManager({"NOTIFY_SOCKET": manager.path})
        told.ready("listens at \udcff")
        told.close()

    asyncio.run(run())
    assert manager.hear()["STATUS"] == "listens at ?"
