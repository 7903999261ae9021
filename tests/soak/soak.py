"""A daemon under load for a long time, and one page about whether anything grew.

    soak.py --minutes 10 --out build/soak [--seed 1] [--processes 4] [--no-oracle]

Owns everything that it starts: one daemon with normal settings (host and disk tier, `through`),
client processes (`soak_load`) of which one is killed or stopped every other second and started
again, and the oracle's state machine in random mode with daemons of its own. Once a second the
first daemon is sampled. In the end all clients are killed, and nothing may be held any more.

Exits with 0 when every verdict of the report is good, else with 1. Whatever happens, what was
started is ended and the scratch directory is removed; the report stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from soak_load import open_counts, total
from soak_report import Verdict, verdicts, write_report
from soak_sampler import Sampler

from kvstore import Client, SpaceSpec, chain_keys
from kvstore.config import pool_prefix

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
_READY_SECONDS = 60.0
_PATIENCE_SECONDS = 60.0
_HOST, _DISK = "256MiB", "1GiB"
_ROWS_PER_PROCESS = 3
# Longer than a heartbeat, shorter than a lease: a stopped client is silent for a while.
_STOPPED_SECONDS = 4.0
_CHAOS_SECONDS = 2.0
# `kvstore.index.ghosts`: how many evicted keys are remembered.
REMEMBERED_KEYS = 100_000
_KEYS_AT_ONCE = 2_000


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


class Daemon:
    """The daemon that is watched.

    Attributes:
        address: its Unix socket.
        log: file that takes what it says.
    """

    def __init__(self, scratch: Path) -> None:
        """Start it; returns when it serves."""
        self.address = f"unix://{scratch / 'kvstore.sock'}"
        self.log = scratch / "daemon.log"
        self._state = scratch / "state"
        command = [sys.executable, "-m", "kvstore", "serve", "--state", str(self._state)]
        command += ["--listen", self.address, "--host-pool", _HOST]
        command += ["--disk", str(scratch / "disk"), "--disk-capacity", _DISK, "--no-save-host"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=_environment()
            )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _READY_SECONDS)
        line = self._process.stdout.readline() if ready else b""
        if not line.startswith(b"kvstore ready "):
            self.end()
            raise SystemExit(f"soak: the daemon does not start; its log:\n{self.log.read_text()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> int:
        """Stop it in order; return its exit code."""
        self._process.terminate()
        return self._process.wait(_PATIENCE_SECONDS)

    def end(self) -> None:
        """Kill it, if it is still there, and remove its memory."""
        self._process.kill()
        self._process.wait()
        for pool in Path("/dev/shm").glob(pool_prefix(self._state) + "*"):
            shutil.rmtree(pool, ignore_errors=True)


def fill_memory_of_keys(address: str) -> None:
    """Put and evict more keys than the daemon remembers: what is bounded is not to look like a leak.

    Under load the list of evicted keys takes a quarter of an hour to fill.
    """
    spec = SpaceSpec(model="soak warm-up", dtype="u8", block_tokens=1, shard_bytes=(16,))
    blocks = np.zeros((_KEYS_AT_ONCE, 16), np.uint8)
    with Client(address, timeout_s=_PATIENCE_SECONDS) as client:
        space = client.open_space(spec)
        for part in range(-(-REMEMBERED_KEYS // _KEYS_AT_ONCE) + 1):
            keys = chain_keys(range(_KEYS_AT_ONCE), 1, salt=str(part).encode())
            space.put(keys, blocks, timeout_s=_PATIENCE_SECONDS)
            end = time.monotonic() + _PATIENCE_SECONDS
            while space.evict(keys).skipped and time.monotonic() < end:
                time.sleep(0.01)


class Crowd:
    """Client processes, one of which is killed or stopped at a time.

    Attributes:
        born: processes started so far.
        stops: how often one was stopped.
    """

    def __init__(self, address: str, scratch: Path, processes: int, seed: int) -> None:
        """Start them."""
        self._address = address
        self._path = scratch / "counts"
        self.counts = open_counts(self._path, processes * _ROWS_PER_PROCESS)
        self._log = (scratch / "clients.log").open("ab")
        self.log = scratch / "clients.log"
        self._dice = random.Random(seed)
        self._stopped: dict[int, float] = {}
        self._next = _CHAOS_SECONDS
        self.born = self.stops = 0
        self._processes = [self._start(row) for row in range(processes)]

    def _start(self, row: int) -> subprocess.Popen[bytes]:
        self.born += 1
        worker = Path(__file__).with_name("soak_load.py")
        seed = self._dice.getrandbits(30)
        command = [sys.executable, str(worker), self._address, str(self._path), str(row), str(seed)]
        return subprocess.Popen(command, stderr=self._log, env=_environment())

    def moved(self) -> tuple[int, int]:
        """Return the bytes put and got so far."""
        sums = total(self.counts)
        return sums["put_bytes"], sums["got_bytes"]

    def wait_for_the_first(self) -> None:
        """Wait until a block has been read: processes take a while to start."""
        end = time.monotonic() + _READY_SECONDS
        while not total(self.counts)["checked"] and time.monotonic() < end:
            time.sleep(0.05)

    def trouble(self, seconds: float) -> None:
        """Do to them what is due `seconds` after the start."""
        for row, until in list(self._stopped.items()):
            if seconds >= until:
                del self._stopped[row]
                self._processes[row].send_signal(signal.SIGCONT)
        if seconds < self._next:
            return
        self._next = seconds + _CHAOS_SECONDS
        row = self._dice.randrange(len(self._processes))
        if self._dice.random() < 0.5:
            self._stopped.pop(row, None)
            self._processes[row].kill()
            self._processes[row].wait()
            self._processes[row] = self._start(row)
        elif row not in self._stopped:
            self.stops += 1
            self._processes[row].send_signal(signal.SIGSTOP)
            self._stopped[row] = seconds + _STOPPED_SECONDS

    def end(self) -> None:
        """Kill all of them."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._log.close()


class Oracle:
    """The oracle's state machine in random mode, in a process of its own."""

    def __init__(self, scratch: Path, seconds: float, seed: int) -> None:
        """Start it."""
        self.log = scratch / "oracle.log"
        runner = ROOT / "tests" / "oracle" / "oracle_run.py"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(runner), str(seconds), str(seed)],
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
            )

    def result(self) -> dict[str, Any]:
        """Wait for its end; return what it counted."""
        try:
            said, _ = self._process.communicate(timeout=5 * _PATIENCE_SECONDS)
            counted: dict[str, Any] = json.loads(said)
        except (subprocess.TimeoutExpired, ValueError):
            return {"examples": 0, "steps": 0, "failed": True}
        return counted

    def end(self) -> None:
        """Kill it, if it is still there."""
        self._process.kill()
        self._process.wait()


def _released(sampler: Sampler) -> Verdict:
    """Wait until nothing is held by anybody; judge that."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        stats = sampler.stats()
        held = (stats.leases, stats.grants, stats.granted_slots, stats.stuck_slots)
        if not any(held) or time.monotonic() > end:
            break
        time.sleep(0.1)
    figures = "{} leases, {} grants, {} granted slots, {} stuck slots".format(*held)
    return Verdict("nothing is held once all clients are dead", not any(held), figures)


def _tail(path: Path, lines: int = 40) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def run(
    minutes: float, out: Path, seed: int, processes: int, oracle: bool, warm: bool, command: str
) -> int:
    """Run the soak, write its report, return the exit code."""
    seconds = minutes * 60
    out.mkdir(parents=True, exist_ok=True)
    judged: list[Verdict] = []
    with contextlib.ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="soak-", dir=out))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        daemon = Daemon(scratch)
        stack.callback(daemon.end)
        if warm:
            fill_memory_of_keys(daemon.address)
        crowd = Crowd(daemon.address, scratch, processes, seed)
        stack.callback(crowd.end)
        beside = Oracle(scratch, seconds, seed) if oracle else None
        if beside is not None:
            stack.callback(beside.end)
        sampler = Sampler(daemon.pid, daemon.address, crowd.moved)
        sampler.start()
        try:
            crowd.wait_for_the_first()
            sampler.run(seconds, crowd.trouble)
            crowd.end()
            judged += verdicts(sampler.samples)
            judged.append(_released(sampler))
        finally:
            sampler.close()
        code = daemon.stop()
        sums = total(crowd.counts)
        log = daemon.log.read_text(errors="replace")
        bad = log.count("Traceback") + log.count(" ERROR ")
        judged.append(
            Verdict(
                "0 wrong bytes", sums["wrong"] == 0 < sums["checked"], f"{sums['checked']} blocks"
            )
        )
        judged.append(
            Verdict("no client met an unexpected error", not sums["bugs"], f"{sums['bugs']}")
        )
        judged.append(
            Verdict("stopped in order, no error in its log", not code and not bad, f"exit {code}")
        )
        found = {"examples": 0, "steps": 0, "failed": False}
        if beside is not None:
            found = beside.result()
            judged.append(
                Verdict(
                    "the oracle found nothing",
                    not found["failed"],
                    f"{found['examples']} examples, {found['steps']} steps",
                )
            )
        facts = [
            ("time", f"{minutes:g} minutes, seed {seed}"),
            ("daemon", f"host pool {_HOST}, disk {_DISK}, write policy through"),
            ("clients", f"{processes} processes with {_ROWS_PER_PROCESS} clients each"),
            ("killed and started again", f"{crowd.born - processes} processes"),
            ("stopped for a while", f"{crowd.stops} times"),
            ("puts", f"{sums['puts']}, {sums['put_bytes'] / 2**30:.1f} GiB"),
            ("gets", f"{sums['gets']}, {sums['got_bytes'] / 2**30:.1f} GiB"),
            ("calls that found the daemon away or slow", f"{sums['unavailable']}"),
        ]
        page = write_report(out, command, sampler.samples, judged, facts)
        good = all(verdict.good for verdict in judged)
        if not good:
            for path in (daemon.log, crowd.log, *([] if beside is None else [beside.log])):
                shutil.copy(path, out / path.name)
                print(f"-- {path.name}\n{_tail(path)}", file=sys.stderr)
    print("\n".join(map(str, judged)))
    print(f"soak: {'good' if good else 'NOT good'}; see {page}")
    return 0 if good else 1


def main(arguments: Sequence[str]) -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="soak", description="Load a daemon, watch what grows.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--no-oracle", action="store_true", help="without the state machine")
    parser.add_argument("--cold", action="store_true", help="do not fill the list of evicted keys")
    parser.add_argument("--command", help="what the report says that it was made by")
    given = parser.parse_args(arguments)
    if not 0.1 <= given.minutes <= 10_000:
        parser.error("--minutes: within 0.1 … 10000")
    if not 1 <= given.processes <= 64:
        parser.error("--processes: within 1 … 64")
    # A directory of this machine is nobody else's business.
    command = given.command or f"tests/soak/soak.py {shlex.join(arguments)}"
    return run(
        given.minutes,
        given.out.resolve(),
        given.seed,
        given.processes,
        not given.no_oracle,
        not given.cold,
        command,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
