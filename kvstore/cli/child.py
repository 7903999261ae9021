"""Child processes of the demo and the bench: started, talked to with deadlines, never left over.

Children get their own process group, so that Ctrl-C reaches the parent alone, which then ends
them in order; and the kernel kills them should the parent die without doing so.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

from kvstore.errors import KVStoreError

__all__ = ["Child", "ChildDaemon", "ChildError", "interruptible", "uninterrupted"]

_PR_SET_PDEATHSIG: Final = 1
# Loaded here: the dynamic loader must not run between fork and exec.
_LIBC: Final = ctypes.CDLL(None)
_LOG_TAIL_LINES: Final = 15
# For a process that has hardly begun; killed at once it could leave shared memory behind.
_STOP_SECONDS: Final = 10.0


class ChildError(KVStoreError):
    """A child process failed or did not answer in time."""


class _Interrupts:
    """Interrupts that came while they were held back. The main thread's alone."""

    depth = 0
    pending = False


def _interrupt(*_: object) -> None:
    if _Interrupts.depth:
        _Interrupts.pending = True
    else:
        raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that everything is cleaned up."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, _interrupt) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, previous, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold such interrupts back until the block has ended.

    Starting a process runs hooks whose exceptions Python swallows: an interrupt that is raised in
    one of them is lost, and whoever pressed Ctrl-C waits for ever.
    """
    _Interrupts.depth += 1
    try:
        yield
    finally:
        _Interrupts.depth -= 1
    if _Interrupts.pending and not _Interrupts.depth:
        _Interrupts.pending = False
        raise KeyboardInterrupt


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A child process whose standard output is lines for us, and whose errors go to a log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            name: what to call it in messages.
            command: program and arguments.
            log: file that takes its standard error.
            environment: variables to add to ours.
        """
        self.name = name
        self._log = log
        self._lines: queue.Queue[str | None] = queue.Queue()
        started = False
        try:
            with uninterrupted(), log.open("ab") as errors:
                self._start(command, errors, {**os.environ, **(environment or {})})
                started = True
        except KeyboardInterrupt:
            # It came before there was a child, or was held back until there was one.
            if started:
                self.stop(timeout_s=_STOP_SECONDS)
            raise

    def _start(
        self, command: Sequence[str], errors: IO[bytes], environment: Mapping[str, str]
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
            # Only a system call between fork and exec: safe beside other threads.
            preexec_fn=_die_with_parent,  # noqa: PLW1509
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read,
            args=(self._process.stdout,),
            name=f"{self.name} output",
            daemon=True,
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            self._lines.put(line.decode(errors="replace").rstrip("\n"))
        self._lines.put(None)

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "".join(f"\n  {line}" for line in lines)

    def line(self, timeout_s: float) -> str:
        """Return the next line of its output.

        Raises:
            ChildError: it ended, or printed nothing in time; the end of its log is printed.
        """
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            problem = f"said nothing for {timeout_s:.0f} s"
        else:
            if line is not None:
                return line
            self._lines.put(None)  # for whoever asks again
            problem = f"ended with exit code {self._process.wait()}"
        print(f"{self.name}, end of its log:{self._log_tail()}", file=sys.stderr)
        raise ChildError(f"{self.name} {problem}")

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one JSON line and return the JSON line that answers it.

        Raises:
            ChildError: it ended, answers too late, or reports an error.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone: `line` says how
        answer: dict[str, Any] = json.loads(self.line(timeout_s))
        if "error" in answer:
            raise ChildError(f"{self.name}: {answer['error']}")
        return answer

    def stop(self, timeout_s: float) -> int:
        """End it: SIGTERM, and SIGKILL for its process group when that takes too long.

        Returns:
            Its exit code; negative when a signal ended it.
        """
        if self._process.poll() is None:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.kill()

    def kill(self) -> int:
        """End it and what it started at once, and return its exit code."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        return code


class ChildDaemon:
    """A daemon of our own, everything it keeps under one directory.

    Attributes:
        address: where it listens first, a Unix socket.
        start_seconds: from exec to its ready line.
        ready: fields of its ready line.
    """

    def __init__(
        self,
        directory: Path,
        options: Sequence[str],
        log_name: str = "daemon",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it and wait until it serves.

        Args:
            directory: takes all that it keeps.
            options: of `kvstore serve`, beyond its address and its state.
            log_name: of the file that takes its log.
            environment: variables to add to ours.

        Raises:
            ChildError: it does not come up.
        """
        self.address = f"unix://{directory / 'kvstore.sock'}"
        command = [
            *(sys.executable, "-m", "kvstore", "serve"),
            *("--listen", self.address, "--state", str(directory / "state"), "--no-save-host"),
            # What is measured is asked for.
            *("--warm-up", "0"),
            *options,
        ]
        begin = time.monotonic()
        log = directory / f"{log_name}.log"
        self._child = Child("kvstore daemon", command, log, environment)
        try:
            line = self._child.line(timeout_s=30)
        except BaseException:
            self._child.stop(timeout_s=_STOP_SECONDS)
            raise
        self.start_seconds = time.monotonic() - begin
        if not line.startswith("kvstore ready "):
            self._child.kill()
            raise ChildError(f"kvstore daemon printed {line!r} instead of its ready line")
        pairs = (word.partition("=") for word in line.split()[2:])
        self.ready = {name: value for name, _, value in pairs}

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    def stop(self) -> int:
        """Stop it as an operator would, and return its exit code."""
        return self._child.stop(timeout_s=40)

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it, whatever happened."""
        self.stop()
