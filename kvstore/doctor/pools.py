"""Pools in shared memory: the own one, and what daemons that died without a successor left.

A daemon removes what earlier daemons of its own state directory left. A pool whose state directory
is used no more (deleted, or a test's) stays until somebody removes it: this reports it, no more.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.doctor.finding import Finding, ok, warning
from kvstore.units import format_bytes

__all__ = ["SHARED_MEMORY", "Pool", "check_leftovers", "find_pools", "pool_prefix", "taken_bytes"]

SHARED_MEMORY: Final = Path("/dev/shm")

_NAME: Final = re.compile(r"kvstore-\d+-[0-9a-f]{12}-[0-9a-f]{12}")
# A daemon makes its pool's directory a moment before it opens a file in it.
_YOUNG_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool's directory.

    Attributes:
        path: of the directory.
        owner: user id.
        taken_bytes: memory that its files take.
        age_seconds: since something was made in it.
        used: whether a process that can be seen has a file in it open.
    """

    path: Path
    owner: int
    taken_bytes: int
    age_seconds: float
    used: bool


def pool_prefix(state: Path, user: int) -> str:
    """Return how the names of the pools of a state directory begin."""
    digest = hashlib.sha256(os.fsencode(state.resolve())).hexdigest()[:12]
    return f"kvstore-{user}-{digest}-"


def _open_directories(root: Path, processes: Path) -> set[str]:
    """Return the names below `root` in which a process has a file open."""
    start = f"{root}/"
    found = set()
    for process in os.scandir(processes):
        if not process.name.isdigit():
            continue
        try:
            # Bare strings: there may be many thousands of them.
            descriptors = os.listdir(f"{process.path}/fd")  # noqa: PTH208
        except OSError:
            continue  # gone, or another user's
        for descriptor in descriptors:
            try:
                target = os.readlink(f"{process.path}/fd/{descriptor}")  # noqa: PTH115
            except OSError:
                continue
            if target.startswith(start):
                found.add(target.removeprefix(start).partition("/")[0])
    return found


def find_pools(root: Path = SHARED_MEMORY, processes: Path = Path("/proc")) -> list[Pool]:
    """Return the pools of all daemons, by name. Some milliseconds for each hundred processes.

    Raises:
        OSError: shared memory or the processes cannot be listed.
    """
    names = sorted(path.name for path in root.iterdir() if _NAME.fullmatch(path.name))
    if not names:
        return []
    used = _open_directories(root, processes)
    pools = []
    for name in names:
        path = root / name
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode):
                continue
            size = sum(file.lstat().st_blocks * 512 for file in path.iterdir())
        except FileNotFoundError:
            continue  # removed meanwhile
        except PermissionError:
            size = 0
        age = time.time() - status.st_mtime
        pools.append(Pool(path, status.st_uid, size, age, name in used))
    return pools


def taken_bytes(pools: Sequence[Pool], prefix: str) -> int:
    """Return what a state directory's daemon has taken, or what the last one left to the next."""
    return sum(pool.taken_bytes for pool in pools if pool.path.name.startswith(prefix))


def check_leftovers(pools: Sequence[Pool], prefix: str, user: int) -> Iterator[Finding]:
    """Judge pools that nobody uses.

    Args:
        pools: all of them.
        prefix: of this state directory's; its daemon removes those itself when it starts.
        user: id of this process; of other users' pools only root sees whether they are used.
    """
    subject = "leftover pools"
    dead = [
        pool
        for pool in pools
        if not pool.used
        and pool.age_seconds > _YOUNG_SECONDS
        and user in (0, pool.owner)
        and not pool.path.name.startswith(prefix)
    ]
    if not dead:
        yield ok(subject, f"none in {SHARED_MEMORY}")
        return
    dead.sort(key=lambda pool: -pool.taken_bytes)
    size = format_bytes(sum(pool.taken_bytes for pool in dead))
    more = f" and {len(dead) - 1} more like it" if len(dead) > 1 else ""
    yield warning(
        subject,
        f"{len(dead)} of other state directories take {size}, and no process here has them open",
        f"unless another container uses them: rm -r {dead[0].path}{more}",
    )
