"""Two daemons that are given one address, and what dead ones left there."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_calls import Raw

from kvstore.proto import kvstore_pb2 as pb


def _start_another(directory: Path, address: str, state: str = "other") -> str:
    """Start a daemon that is to be refused; return what it says."""
    command = [sys.executable, "-m", "kvstore", "serve", "--state", str(directory / state)]
    command += ["--listen", address, "--host-pool", "16MiB"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1, ended
    return ended.stderr


@pytest.mark.parametrize("stopped", [False, True])
def test_a_second_daemon_takes_nobodys_address(
    raw: Callable[..., Raw], tmp_path: Path, stopped: bool
) -> None:
    first = raw()
    if stopped:
        first.daemon.signal(signal.SIGSTOP)
    path = first.daemon.address.removeprefix("unix://")
    said = _start_another(tmp_path, first.daemon.address)
    assert said == f"kvstore: listen: {path} is served by another daemon\n"
    first.daemon.signal(signal.SIGCONT)
    for connection in (first, first.again()):
        assert connection.kv.Hello(pb.HelloRequest(), timeout=10).boot_id
        connection.close()


def test_a_socket_of_somebody_else_stays_theirs(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        said = _start_another(tmp_path, f"unix://{path}")
        assert said.endswith("is served by another daemon\n")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_the_address_of_a_killed_daemon_is_free(
    raw: Callable[..., Raw], start_daemon: Callable[..., Any]
) -> None:
    first = raw()
    boot = first.kv.Hello(pb.HelloRequest(), timeout=10).boot_id
    first.daemon.kill()
    first.daemon.start()
    again = first.again()
    assert again.kv.Hello(pb.HelloRequest(), timeout=10).boot_id != boot
    again.close()
    # One file per boot, and only the living one's.
    names = [p.name for p in first.daemon.directory.iterdir() if p.name.startswith(".kvstore")]
    assert len(names) == 1
