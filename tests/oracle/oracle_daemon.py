"""A real daemon in a process of its own, quick to start, whose disk fails on command.

Processes are forked from a server that has imported everything already, so that a daemon is there
in a tenth of a second and a state machine can afford to kill it often. What runs is `serve` itself;
only the system calls and the tier that it reaches the disk by are wrapped before it is called. They
look at a file, so that faults are switched while it runs.
"""

from __future__ import annotations

import errno
import importlib
import multiprocessing
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.config import load_config, pool_prefix
from kvstore.index.lmdb_env import StoreDamaged
from kvstore.tiers.faulty import Fault, FaultKind, Faulty
from kvstore.tiers.posix_engine import PosixEngine

__all__ = ["FAULTS", "LOSING", "REFUSING", "ForkedDaemon", "forking"]

_READY_SECONDS = 60.0
_SLOW_SECONDS = 0.01

# By name: what a fault does to what was promised. Refusing ones keep blocks off the disk, losing
# ones damage what is written, or make the daemon drop what it reads.
REFUSING = ("write EIO", "write ENOSPC", "write EROFS", "sync EIO", "make ENOSPC", "commit fails")
LOSING = ("write flip", "write torn", "read flip", "read ends", "tier torn", "tier short")
READING = ("read EIO", "tier unavailable")
HARMLESS = ("read part", "write part", "slow")
FAULTS = (*REFUSING, *LOSING, *READING, *HARMLESS)

_PLANS = {
    "tier torn": [Fault(FaultKind.TORN_WRITE, "write")],
    "tier short": [Fault(FaultKind.SHORT_READ, "read")],
    "tier unavailable": [Fault(FaultKind.UNAVAILABLE, "read")],
}
_NUMBERS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS}


class Switch:
    """Which fault is on; read again at every use, so that it holds from the next call on."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def name(self) -> str:
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""

    def kind(self, call: str) -> str:
        """Return what happens to this kind of system call now; empty: nothing."""
        name = self.name()
        if name == "slow":
            time.sleep(_SLOW_SECONDS)
        what, _, kind = name.partition(" ")
        return kind if what == call else ""

    def check(self, call: str) -> str:
        """Likewise, and raise when that is an error."""
        kind = self.kind(call)
        if kind in _NUMBERS:
            raise OSError(_NUMBERS[kind], os.strerror(_NUMBERS[kind]))
        return kind


def _part(views: Sequence[Any], size: int) -> list[memoryview]:
    """Return the first `size` bytes of some buffers."""
    taken: list[memoryview] = []
    for view in views:
        if size > 0:
            taken.append(memoryview(view)[:size])
            size -= len(taken[-1])
    return taken


def _half(views: Sequence[Any]) -> int:
    return max(4096, sum(map(len, views)) // 2 // 4096 * 4096)


class Calls:
    """The system calls of the disk tier, as bad as the switch says."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def preadv(self, fd: int, views: Sequence[Any], at: int) -> int:
        kind = self._switch.check("read")
        if kind == "ends":
            return 0
        if kind == "part":
            return os.preadv(fd, _part(views, _half(views)), at)
        count = os.preadv(fd, views, at)
        if kind == "flip" and count:
            views[0][len(views[0]) // 3] ^= 0x10
        return count

    def pwritev(self, fd: int, views: Sequence[Any], at: int) -> int:
        kind = self._switch.check("write")
        if kind == "part":
            return os.pwritev(fd, _part(views, _half(views)), at)
        if kind == "torn":
            os.pwritev(fd, _part(views, _half(views)), at)
            return sum(map(len, views))
        count = os.pwritev(fd, views, at)
        if kind == "flip":
            # On the device, behind the back of whoever wrote. Through the page cache: one byte.
            other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            try:
                where = at + count // 3
                os.pwrite(other, bytes([os.pread(other, 1, where)[0] ^ 0x10]), where)
            finally:
                os.close(other)
        return count

    def fdatasync(self, fd: int) -> None:
        self._switch.check("sync")
        os.fdatasync(fd)


class SwitchedTier(Faulty):
    """A tier with one fault of `_PLANS` at a time."""

    own = Faulty.own | {"_switch"}

    def __init__(self, inner: Any, switch: Switch) -> None:
        super().__init__(inner)
        self._switch = switch

    def _due(self, operation: str) -> list[Fault]:
        self.plan = _PLANS.get(self._switch.name(), [])
        return super()._due(operation)


def _wrap(switch: Switch) -> None:
    """Put the faults between the daemon of this process and its disk."""
    # By name: other daemons' modules are none of this one's business.
    daemon: Any = importlib.import_module("kvstore.server.daemon")
    maker: Any = importlib.import_module("kvstore.tiers.segment_maker")
    store: Any = importlib.import_module("kvstore.index.lmdb_store").MetaStore
    tier, create, commit = daemon.DiskTier, maker.create_segment, store.commit_blocks
    calls = Calls(switch)

    def make_tier(directory: Path, capacity: int, *, threads: int) -> SwitchedTier:
        engine = PosixEngine(
            threads, preadv=calls.preadv, pwritev=calls.pwritev, fdatasync=calls.fdatasync
        )
        return SwitchedTier(tier(directory, capacity, engine=engine), switch)

    def create_segment(*arguments: Any) -> Any:
        switch.check("make")
        return create(*arguments)

    def commit_blocks(self: Any, *arguments: Any) -> None:
        if switch.kind("commit"):
            raise StoreDamaged("index", os.strerror(errno.EIO), errno.EIO)
        commit(self, *arguments)

    daemon.DiskTier = make_tier
    maker.create_segment = create_segment
    store.commit_blocks = commit_blocks


def _serve(directory: Path, flags: dict[str, Any], ready: Any, sabotage: Any) -> None:
    """Be a daemon."""
    log = os.open(directory / "daemon.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.dup2(ready.fileno(), 1)
    os.close(log)
    ready.close()
    _wrap(Switch(directory / "fault"))
    # What waits for a second in life must not here.
    for module, name in (("limits", "_INTERVAL_SECONDS"), ("use_times", "_APART_SECONDS")):
        setattr(importlib.import_module(f"kvstore.engine.{module}"), name, 0.05)
    if sabotage is not None:
        sabotage()
    code = importlib.import_module("kvstore.server.daemon").serve(load_config(flags))
    sys.stdout.flush()
    os._exit(code)


_context: Any = None


def forking() -> Any:
    """Return the context whose processes are forked from one that has imported everything."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["oracle_daemon", "oracle_crowd", "kvstore.server.daemon"])
    return _context


class ForkedDaemon:
    """One daemon after the other on one state directory.

    Attributes:
        address: its Unix socket.
        tcp: its loopback address; another one after each start.
        log: what all of them said.
    """

    def __init__(
        self, directory: Path, sabotage: Callable[[], None] | None = None, **flags: Any
    ) -> None:
        """Configure it; everything lies in `directory`.

        Args:
            directory: exists.
            sabotage: called in the daemon's process before it serves.
            flags: settings of `kvstore serve`, by key.
        """
        self.directory = directory
        self.flags = flags
        self.address = f"unix://{directory / 'kvstore.sock'}"
        self.tcp = ""
        self.log = directory / "daemon.log"
        self._sabotage = sabotage
        self._process: Any = None
        self._switch = directory / "fault"

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    def start(self, **more: Any) -> None:
        """Start it and wait until it serves."""
        flags = {
            "state": str(self.directory / "s"),
            "listen": [self.address, "127.0.0.1:0"],
            **self.flags,
            **more,
        }
        context = forking()
        ours, theirs = context.Pipe(duplex=False)
        arguments = (self.directory, flags, theirs, self._sabotage)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        line = b""
        end = time.monotonic() + _READY_SECONDS
        while not line.endswith(b"\n"):
            if not select.select([ours], [], [], max(0.0, end - time.monotonic()))[0]:
                break
            part = os.read(ours.fileno(), 4096)
            if not part:
                break
            line += part
        ours.close()
        if not line.startswith(b"kvstore ready "):
            self.kill()
            raise AssertionError(f"the daemon said {line!r}; its log:\n{self.log.read_text()}")
        listen = line.decode().split("listen=")[1].split()[0]
        self.tcp = listen.split(",")[1]

    def set_fault(self, name: str) -> None:
        """Switch a fault on, or all off."""
        fresh = self._switch.with_suffix(".new")
        fresh.write_text(name)
        fresh.rename(self._switch)

    def terminate(self) -> None:
        """Tell it to stop."""
        self._process.terminate()

    def stop(self) -> int:
        """Stop it in order; return its exit code."""
        self.terminate()
        return self._join()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        if self._process is not None:
            self._join()

    def _join(self) -> int:
        self._process.join(_READY_SECONDS)
        code: int | None = self._process.exitcode
        assert code is not None, f"the daemon does not end; its log:\n{self.log.read_text()}"
        return code

    def end(self) -> None:
        """Kill it and remove the memory that its next run would have taken over."""
        self.kill()
        for pool in Path("/dev/shm").glob(pool_prefix(self.directory / "s") + "*"):
            shutil.rmtree(pool, ignore_errors=True)
