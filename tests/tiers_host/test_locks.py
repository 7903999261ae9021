"""Locks die with their process, and with nothing else."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import TierError
from kvstore.locks import is_locked, lock_byte, unlock_byte
from kvstore.tiers.control import ControlFile

# Takes the lock, says so, and then does what its third argument says.
_HOLDER = """
import os, sys, time
from kvstore.locks import lock_byte
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CLOEXEC)
assert lock_byte(fd, int(sys.argv[2]))
if sys.argv[3] == "fork":
    keep = os.fork()
    if keep:
        print(keep, flush=True)
        os._exit(0)
    # The child says nothing: it holds the pipe open, and the lock, until it is killed.
    time.sleep(600)
print("locked", flush=True)
time.sleep(600)
"""


def _hold(path: Path, offset: int, then: str = "wait") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path), str(offset), then],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def control(tmp_path: Path) -> ControlFile:
    return ControlFile(tmp_path)


def test_kill_9_frees_the_lock(control: ControlFile) -> None:
    attachment = control.next_id()
    assert not control.is_alive(attachment)
    with _hold(control.path, attachment) as holder:
        assert _said(holder) == "locked"
        assert control.is_alive(attachment)
        holder.kill()
        holder.wait()
        assert not control.is_alive(attachment)


def test_a_stopped_process_keeps_its_lock_until_it_is_killed(control: ControlFile) -> None:
    attachment = control.next_id()
    with _hold(control.path, attachment) as holder:
        assert _said(holder) == "locked"
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        assert control.is_alive(attachment)
        holder.kill()
        holder.wait()
        assert not control.is_alive(attachment)


def test_a_forked_child_keeps_the_lock_of_a_dead_parent(control: ControlFile) -> None:
    attachment = control.next_id()
    with _hold(control.path, attachment, "fork") as holder:
        child = os.pidfd_open(int(_said(holder)))
        holder.wait()
        try:
            assert control.is_alive(attachment)
        finally:
            signal.pidfd_send_signal(child, signal.SIGKILL)
            # An orphan is not ours to wait for; its descriptor turns readable once it is dead.
            assert select.select([child], [], [], 30)[0]
            os.close(child)
        assert not control.is_alive(attachment)


def test_a_lock_belongs_to_the_open_file(tmp_path: Path) -> None:
    path = tmp_path / "control"
    first = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    second = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        assert lock_byte(first, 7)
        assert lock_byte(first, 7)
        assert not lock_byte(second, 7)
        assert lock_byte(second, 8)
        assert is_locked(second, 7)
        assert not is_locked(first, 7)  # its own lock never stands in its way
        # A POSIX lock would be dropped here.
        os.close(os.open(path, os.O_RDWR))
        assert is_locked(second, 7)
        # A duplicate is the same open file.
        duplicate = os.dup(first)
        os.close(first)
        assert is_locked(second, 7)
        unlock_byte(duplicate, 7)
        os.close(duplicate)
        assert not is_locked(second, 7)
        assert lock_byte(second, 1 << 40)
    finally:
        os.close(second)


def test_an_unusable_descriptor_is_an_error_and_not_a_lock_that_somebody_holds(
    tmp_path: Path,
) -> None:
    path = tmp_path / "control"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            lock_byte(fd, 1)
    finally:
        os.close(fd)


def test_attachment_ids_start_at_one_and_are_never_used_again(control: ControlFile) -> None:
    assert [control.next_id() for _ in range(3)] == [1, 2, 3]
    assert control.lock_offset(3) == 3
    assert control.path.stat().st_mode & 0o777 == 0o600
    assert not control.is_alive(99)  # never handed out
    control.close()
    control.close()
    with pytest.raises(TierError):
        control.is_alive(1)
