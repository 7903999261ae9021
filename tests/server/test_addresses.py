"""Two daemons that are given one address, and what dead ones left there."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_calls import Raw, chain

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


def test_who_cannot_listen_says_why(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = _start_another(tmp_path, address)
        assert said == f"kvstore: listen: cannot bind {address}: Address already in use\n"
    (tmp_path / "file").touch()
    said = _start_another(tmp_path, f"unix://{tmp_path}/k", state="file")
    assert said == f"kvstore: state: {tmp_path}/file: Not a directory\n"


def test_a_full_disk_behind_standard_output_stops_no_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore", "serve", "--state", str(tmp_path / "s")]
    command += ["--listen", f"unix://{tmp_path}/k", "--host-pool", "16MiB"]
    # Few open files are said at once: later, who is too many gets no answer, and nothing is logged.
    few = ["prlimit", "--nofile=200:200"] if shutil.which("prlimit") else []
    with Path("/dev/full").open("w") as full:
        daemon = subprocess.Popen([*few, *command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert daemon.stderr is not None
    try:
        if few:
            assert "only 200 open files are allowed" in daemon.stderr.readline()
        line = daemon.stderr.readline()
        assert "kvstore ready listen=" in line
        assert line.endswith("(standard output: No space left on device)\n")
        daemon.terminate()
        rest = daemon.stderr.read()
        assert daemon.wait(60) == 0, rest
        assert "saved and flushed" in rest
    finally:
        daemon.kill()
        daemon.wait()
        daemon.stderr.close()


def test_a_terminal_that_goes_away_costs_nothing_in_memory(raw: Callable[..., Raw]) -> None:
    server = raw()
    space = server.open()
    keys = chain("h", 4)
    assert server.put(space, keys, 65536) == 4
    server.daemon.signal(signal.SIGHUP)
    assert server.daemon._wait() == 0
    assert "saved the index of 4 blocks" in server.daemon.log.read_text()
    server.daemon.start()
    again = server.again()
    assert again.kv.Lookup(pb.LookupRequest(space=space, keys=keys)).blocks == 4
    again.close()
