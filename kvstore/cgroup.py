"""Control groups: what they allow this process, in versions 1 and 2.

The one place that reads them: the pool's limits, the automatic pool size and `kvstore doctor` ask here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MemoryLimit", "memory_limit", "processor_limit"]

_SELF: Final = Path("/proc/self/cgroup")
_ROOT: Final = Path("/sys/fs/cgroup")
# Version 1 says "no limit" as the largest multiple of a page below 2**63.
_NO_LIMIT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest memory limit of the groups around a process.

    Attributes:
        limit_bytes: what all processes of the group may take, shared memory included.
        room_bytes: of it, what is left when the kernel drops the page cache that it can.
    """

    limit_bytes: int
    room_bytes: int


def _groups(controller: str, self_cgroup: Path, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the directories of the groups around this process, and whether they are version 2.

    A container sees its own group at the top, whatever path the kernel names.
    """
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, name = line.split(":", 2)
        unified = number == "0" and not controllers
        if not unified and controller not in controllers.split(","):
            continue
        top = root if unified else root / controller
        group = top / name.lstrip("/")
        for directory in (group, *group.parents):
            if directory == top.parent:
                break
            yield directory, unified


def _number(path: Path) -> int | None:
    """Return the number in a file; None for no file and for "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file_bytes(directory: Path) -> int:
    try:
        text = (directory / "memory.stat").read_text()
    except OSError:
        return 0
    found = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    return int(found.get("total_inactive_file", found.get("inactive_file", "0")))


def memory_limit(self_cgroup: Path = _SELF, root: Path = _ROOT) -> MemoryLimit | None:
    """Return the limit with the least room; None without a limit."""
    limits = []
    for directory, unified in _groups("memory", self_cgroup, root):
        names = ("max", "current") if unified else ("limit_in_bytes", "usage_in_bytes")
        limit, usage = (_number(directory / f"memory.{name}") for name in names)
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            room = max(limit - usage + _inactive_file_bytes(directory), 0)
            limits.append(MemoryLimit(limit, room))
    return min(limits, key=lambda limit: limit.room_bytes, default=None)


def processor_limit(self_cgroup: Path = _SELF, root: Path = _ROOT) -> float | None:
    """Return how many processors' time the groups allow; None without a limit."""
    limits = []
    for directory, unified in _groups("cpu", self_cgroup, root):
        if unified:
            try:
                quota, _, period = (directory / "cpu.max").read_text().strip().partition(" ")
            except OSError:
                continue
        else:
            quota = str(_number(directory / "cpu.cfs_quota_us"))
            period = str(_number(directory / "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit() and int(period):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)
