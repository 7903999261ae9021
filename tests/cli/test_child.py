"""Children answer in time or not at all, and none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.child import Child, ChildDaemon, ChildError, interruptible, uninterrupted

ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request.get("die"):
        print("last words", file=sys.stderr)
        sys.exit(7)
    if not request.get("silent"):
        print(json.dumps(request), flush=True)
"""


def child(log: Path, code: str = ECHO) -> Child:
    return Child("echo", [sys.executable, "-c", code], log)


def test_questions_and_answers(tmp_path: Path) -> None:
    echo = child(tmp_path / "log")
    assert echo.ask({"n": 1}, timeout_s=10) == {"n": 1}
    assert echo.ask({"n": 2}, timeout_s=10) == {"n": 2}
    with pytest.raises(ChildError, match="^echo: too hot"):
        echo.ask({"error": "too hot"}, timeout_s=10)
    assert echo.stop(timeout_s=10) == -signal.SIGTERM


def test_a_child_that_dies_is_reported_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = child(tmp_path / "log")
    with pytest.raises(ChildError, match="echo ended with exit code 7"):
        echo.ask({"die": True}, timeout_s=10)
    assert "last words" in capsys.readouterr().err
    # Asking again says the same instead of hanging or breaking on the closed pipe.
    with pytest.raises(ChildError, match="exit code 7"):
        echo.ask({"n": 1}, timeout_s=10)
    assert echo.kill() == 7


def test_a_silent_child_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = child(tmp_path / "log")
    with pytest.raises(ChildError, match="echo said nothing for 0 s"):
        echo.ask({"silent": True}, timeout_s=0.05)
    assert echo.kill() == -signal.SIGKILL


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    signal.pause()
"""
    process = child(tmp_path / "log", stubborn)
    assert process.line(timeout_s=10) == "ready"
    assert process.stop(timeout_s=0.1) == -signal.SIGKILL


def test_children_of_a_child_are_killed_too(tmp_path: Path) -> None:
    parent = """
import subprocess, sys
inner = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(inner.pid, flush=True)
inner.wait()
"""
    process = child(tmp_path / "log", parent)
    inner = int(process.line(timeout_s=10))
    watch = os.pidfd_open(inner)
    process.kill()
    assert _ended(watch)


def _ended(pidfd: int) -> bool:
    """Wait until a process has ended, ten seconds at most."""
    import select

    ready, _, _ = select.select([pidfd], [], [], 10)
    os.close(pidfd)
    return bool(ready)


def test_parent_killed_with_children_running(tmp_path: Path) -> None:
    """kill -9 of the demo itself: the kernel ends its daemon and engines."""
    code = f"""
import signal, sys
from pathlib import Path
from kvstore.cli.child import Child
child = Child("child", [sys.executable, "-c", "import signal; print(1); signal.pause()"],
              Path({str(tmp_path / "log")!r}))
print(child.pid, flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    watch = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert _ended(watch)


def test_sigterm_unwinds_like_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_while_a_process_starts_is_not_lost() -> None:
    """Raised inside a fork hook it would be swallowed, and the demo would run on."""
    reached = []

    def start() -> None:
        with interruptible(), uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
            reached.append("still starting")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert reached == ["still starting"]
    with interruptible(), uninterrupted():
        pass  # nothing is left over from before


def test_ctrl_c_while_a_child_starts_ends_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def interrupted_popen(*arguments: object, **options: object) -> object:
        process = popen(*arguments, **options)
        started.append(os.pidfd_open(process.pid))
        signal.raise_signal(signal.SIGINT)
        return process

    popen: Any = subprocess.Popen
    monkeypatch.setattr("kvstore.cli.child.subprocess.Popen", interrupted_popen)
    with interruptible(), pytest.raises(KeyboardInterrupt):
        child(tmp_path / "log")
    assert _ended(started[0])


def test_a_daemon_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChildError, match="kvstore daemon ended with exit code 1"):
        ChildDaemon(tmp_path, ["--host-pool", "1"])
    assert "host_pool: '1' is too little" in capsys.readouterr().err


def test_daemon_start_and_stop(tmp_path: Path) -> None:
    with ChildDaemon(tmp_path, ["--host-pool", "64MiB"]) as daemon:
        assert daemon.ready["listen"] == daemon.address
        assert len(daemon.ready["boot_id"]) == 32
        assert daemon.start_seconds < 10
        watch = os.pidfd_open(daemon.pid)
    assert _ended(watch)
