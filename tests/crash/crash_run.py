"""Lives and deaths: forks one life after the other on the same directories, and kills each.

The process that forks has no threads, and uses neither LMDB nor gRPC: a life costs a fork, not a
start of the interpreter. What a life said before its end is what the next one must find.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from crash_damage import DAMAGES, damage, files_of
from crash_life import SHARED_MEMORY, Life, Task, live
from crash_oracle import Oracle
from crash_points import POINTS
from power_loss import PowerLoss

from kvstore.config import pool_prefix
from kvstore.tiers.posix_engine import PosixEngine

__all__ = ["KINDS", "Findings", "Line", "forked"]

# Longer than any life: what is not over then hangs.
LIFE_SECONDS: Final = 300.0
# Kills on the same directories before new ones are made.
LIVES_PER_DIRECTORY: Final = 12
LOG_LINES: Final = 30
# Writes, syncs, renames and commits until the power goes: about as many as a life has.
POWER_STEPS: Final = 250
POWER_LOSS: Final = "power lost"
REFUSED: Final = "refused"
# Files that only an orderly stop leaves.
SAVED: Final = ("seal", "host-index", "slab-*", "control")
KINDS: Final = {"wrong": "wrong bytes", "lost": "lost acknowledged blocks", "leak": "leaks"}


@dataclass
class Findings:
    """What a run found.

    Attributes:
        kills: how often a life ended where.
        problems: one line each, by kind.
        checks: starts after which everything was compared.
        served: blocks whose bytes were compared.
        acknowledged: of those, the ones that had to be there.
        damages: which files were damaged, and how.
        kept: directories of lives that had problems.
        refusals: what was damaged where a life refused to start, and its line.
    """

    kills: Counter[str] = field(default_factory=Counter)
    problems: dict[str, list[str]] = field(default_factory=dict)
    checks: int = 0
    served: int = 0
    acknowledged: int = 0
    damages: Counter[str] = field(default_factory=Counter)
    kept: list[Path] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def problem_count(self) -> int:
        return sum(map(len, self.problems.values()))

    def add(self, kind: str, text: str) -> None:
        self.problems.setdefault(kind, []).append(text)


class Forked:
    """A life that was forked, seen from its parent."""

    def __init__(self, task: Task, log: Path) -> None:
        self.ended = False
        self._buffer = b""
        self._pipe, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._pipe)
                fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(fd, 1)
                os.dup2(fd, 2)
                live(task, theirs)
                code = 0
            except BaseException:  # noqa: BLE001 - the boundary of a process
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(theirs)

    def heard(self, deadline: float) -> list[Any] | None:
        """Return the next thing that it says; None when time is up, or it has `ended`."""
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._pipe], [], [], left)[0]:
                return None
            data = os.read(self._pipe, 1 << 16)
            if not data:
                self.ended = True
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        event: list[Any] = json.loads(line)
        return event

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Return its exit code, negative for a signal."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self._pipe)
        return os.waitstatus_to_exitcode(status)


@contextmanager
def forked(task: Task, log: Path) -> Iterator[Forked]:
    """Start a life; it is over when the block ends."""
    life = Forked(task, log)
    try:
        yield life
    except BaseException:
        life.kill()
        life.wait()
        raise


def install_power_loss(life: Life, seed: str, after: int) -> None:
    """Put the fake I/O layer under a life."""

    def lost(what: str) -> None:
        life.tell("power_lost", what)
        os.kill(os.getpid(), signal.SIGKILL)

    roots = [life.directory / "state", life.directory / "disk"]
    for root in roots:
        root.mkdir(exist_ok=True)
    PowerLoss(roots, seed, after, lost).install()
    # Looked up now: the engine's defaults are the real calls.
    life.io_engine = lambda: PosixEngine(2, pwritev=os.pwritev, fdatasync=os.fdatasync)


class Line:
    """Lives one after the other, on directories that are replaced from time to time."""

    def __init__(
        self,
        seed: int,
        findings: Findings,
        prepare: list[Callable[[Life], None]] | None = None,
    ) -> None:
        self.seed = seed
        self.findings = findings
        self.prepare = prepare or []
        self.random = random.Random(seed)
        self.lives = 0
        self._boots = 0
        self.machine = "boot-0"
        self._make()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.retire()

    def _make(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore-crash-"))
        self.oracle = Oracle()
        self._lived = 0
        self._damaged = self._scarred = False
        self._last_damage = ""

    @property
    def worn(self) -> bool:
        """Whether enough was lived on these directories."""
        return self._lived >= LIVES_PER_DIRECTORY

    def retire(self, *, keep: bool = False) -> None:
        """Give the directories up."""
        self._remove_pools()
        if keep:
            self.findings.kept.append(self.directory)
        else:
            shutil.rmtree(self.directory)

    def _remove_pools(self) -> None:
        for pool in SHARED_MEMORY.glob(pool_prefix(self.directory / "state") + "*"):
            shutil.rmtree(pool)

    def renew(self) -> None:
        """Start afresh."""
        self.retire()
        self._make()

    def damage(self, how: str = "", kind: str = "") -> str:
        """Damage one file of the stopped store: every block may be gone then, no epoch may be."""
        pools = SHARED_MEMORY.glob(pool_prefix(self.directory / "state") + "*")
        files = files_of(self.directory / "state", self.directory / "disk", *pools)
        kind = kind or self.random.choice(sorted(files))
        if kind not in files:
            return ""
        path = self.random.choice(files[kind])
        what = damage(self.random, how or self.random.choice(sorted(DAMAGES)), path)
        self._damaged = self._scarred = True
        self._last_damage = what
        self.oracle.forget_blocks()
        return what

    def task(self, **what: object) -> Task:
        self.lives += 1
        self._lived += 1
        return Task(
            self.directory,
            self.machine,
            f"{self.seed}/{self.lives}",
            self.oracle,
            damaged=self._damaged,
            scarred=self._scarred,
            prepare=self.prepare,
            **what,  # type: ignore[arg-type]
        )

    def kill_at(self, point: str, hit: int = 1) -> bool:
        """Kill a life at a named point; return whether it got there."""
        how = POINTS[point]
        if how.fresh:
            self.renew()
        if how.after:
            self.kill_at(how.after)
        task = self.task(theme=how.theme, point=point, hit=hit)
        # Whatever runs on other threads gets a moment, or none.
        delay = self.random.choice([0.0, self.random.uniform(0.0, 0.01)])
        return self._watch(task, delay, stop_at="point") == point

    def kill_any_time(self) -> None:
        """Kill a life at some moment of its work, or of its start."""
        starting = self.random.random() < 0.3
        theme = self.random.choice(["flush", "grow", "shrink", "bump", "restart", "start", "start"])
        seconds = self.random.uniform(0.0, 0.15) if starting else self.random.expovariate(4.0)
        self._watch(self.task(theme=theme), seconds, stop_at="forked" if starting else "started")

    def lose_power(self) -> None:
        """Let a life lose what is not synced, and memory with it, after so many steps."""
        after = self.random.randint(1, POWER_STEPS)
        seed = f"{self.seed}/{self.lives}"
        theme = self.random.choice(["flush", "grow", "grow", "shrink", "bump", "restart"])
        task = self.task(theme=theme)
        task.prepare = [*task.prepare, lambda life: install_power_loss(life, seed, after)]
        self._watch(task, 0.0, stop_at="")
        self._boots += 1
        self.machine = f"boot-{self._boots}"
        self._remove_pools()

    def stop_and_damage(self, how: str, kind: str) -> str:
        """Let a life stop, in order or not, damage a file, and let the next life start.

        Returns:
            what was damaged; empty when there is no such file.
        """
        if kind in SAVED or self.random.random() < 0.6:
            theme = self.random.choice(["flush", "bump"])
            self._watch(self.task(theme=theme, stops=True), 0.0, stop_at="")
        else:
            self.kill_any_time()
        what = self.damage(how, kind)
        if what and self._watch(self.task(works=False), 0.0, stop_at="") == REFUSED:
            self.renew()
        return what

    def close(self) -> None:
        """Let a life look at everything, and stop in order."""
        self._watch(self.task(works=False), 0.0, stop_at="")

    def _watch(self, task: Task, delay: float, stop_at: str) -> str:
        """Kill a life `delay` seconds after it said `stop_at`, or is idle; return where it was."""
        log = self.directory / f"life-{self.lives}.log"
        before = self.findings.problem_count
        where = "any time: while starting"
        due = stop_at == "forked"
        with forked(task, log) as life:
            deadline = time.monotonic() + (delay if due else LIFE_SECONDS)
            while (event := life.heard(deadline)) is not None:
                where = self._note(event, where)
                if event[0] == stop_at or (event[0] == "idle" and not due):
                    due = True
                    deadline = time.monotonic() + delay
            if not life.ended:
                if not due:
                    self.findings.add("failed", self._about(f"it hangs, last seen {where}"))
                life.kill()
                self.findings.kills[where] += 1
                # What it said between the last look and its death counts as well.
                while (event := life.heard(time.monotonic() + LIFE_SECONDS)) is not None:
                    self._note(event, where)
                life.wait()
            elif where.startswith(POWER_LOSS):
                life.wait()
                self.findings.kills[where] += 1
            elif (code := life.wait()) != 0:
                self.findings.add("failed", self._about(f"it ended by itself with {code}"))
        self._read_log(log, task)
        if self.findings.problem_count > before:
            # What was broken on purpose needs no looking at.
            self.retire(keep=not self.prepare)
            self._make()
        return where

    def _note(self, event: list[Any], where: str) -> str:
        """Take in what a life says; return where it is."""
        self.oracle.apply(tuple(event))
        match event:
            case ["problem", str(kind), str(text)]:
                self.findings.add(kind, self._about(text))
            case ["checked", int(served), int(acknowledged)]:
                self.findings.checks += 1
                self.findings.served += served
                self.findings.acknowledged += acknowledged
                self._damaged = False
            case ["started"]:
                return "any time: while working"
            case ["idle"]:
                return "any time: when all was done"
            case ["point", str(name)]:
                return name
            case ["refused", str(line)]:
                if "\n" in line:
                    self.findings.add("failed", self._about(f"refused with {line!r}"))
                self.findings.refusals.setdefault(self._last_damage, line)
                return REFUSED
            case ["power_lost", str(what)]:
                return f"{POWER_LOSS}: {what}"
        return where

    def _about(self, text: str) -> str:
        damaged = f" ({self._last_damage})" if self._last_damage else ""
        return f"life {self.lives}{damaged}: {text}"

    def _read_log(self, log: Path, task: Task) -> None:
        text = log.read_text(errors="replace") if log.exists() else ""
        if "Traceback" in text or ("ERROR" in text and not task.damaged):
            tail = "\n    ".join(text.splitlines()[-LOG_LINES:])
            self.findings.add("failed", self._about(f"its log says\n    {tail}"))
        else:
            log.unlink(missing_ok=True)
