"""How large a pool of shared memory can be: file system, memory and control group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.errors import ConfigError
from kvstore.units import format_bytes

__all__ = ["Room", "check_capacity", "memory_room"]

_MEMINFO: Final = Path("/proc/meminfo")
_SELF_CGROUP: Final = Path("/proc/self/cgroup")
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
# Kernels say "no limit" in version 1 as the largest multiple of a page below 2**63.
_NO_LIMIT: Final = 1 << 62
# Huge pages are set aside at boot: neither MemAvailable nor the control group counts them.
_HUGE_PAGE_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that could be taken now, by what limits them.

    Attributes:
        file_system_bytes: free in the pool's file system.
        memory_bytes: available memory of the machine; None where the pool does not count there.
        cgroup_bytes: what the control group's limits leave; None without a limit.
    """

    file_system_bytes: int
    memory_bytes: int | None
    cgroup_bytes: int | None

    @property
    def bytes(self) -> int:
        """The tightest of them."""
        limits = (self.file_system_bytes, self.memory_bytes, self.cgroup_bytes)
        return min(limit for limit in limits if limit is not None)

    def describe(self) -> str:
        """Name the numbers, for one line of an error message."""
        parts = [f"{format_bytes(self.file_system_bytes)} free in its file system"]
        if self.memory_bytes is not None:
            parts.append(f"{format_bytes(self.memory_bytes)} of memory available")
        if self.cgroup_bytes is not None:
            parts.append(f"{format_bytes(self.cgroup_bytes)} left by the control group's limit")
        return ", ".join(parts)


def memory_room(directory: Path) -> Room:
    """Return what a pool in `directory` could take now. About 0.1 ms; any thread.

    Raises:
        OSError: the directory is not there.
    """
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if stat.f_bsize >= _HUGE_PAGE_BYTES:
        return Room(free, None, None)
    return Room(free, _available_bytes(_MEMINFO), _cgroup_room(_SELF_CGROUP, _CGROUP_ROOT))


def check_capacity(directory: Path, capacity_bytes: int, already_bytes: int = 0) -> None:
    """Refuse a pool that cannot be.

    Args:
        directory: where the slabs will lie, or its parent.
        capacity_bytes: wanted.
        already_bytes: of those, what the pool has taken already.

    Raises:
        ConfigError: one line naming what there is.
    """
    room = memory_room(directory)
    if capacity_bytes - already_bytes > room.bytes:
        raise ConfigError(
            f"host pool of {format_bytes(capacity_bytes)} in {directory} is not possible: "
            f"{room.describe()}" + (f", {format_bytes(already_bytes)} taken" * bool(already_bytes))
        )


def _available_bytes(meminfo: Path) -> int | None:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    """Return the number in a file; None for no file and for "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file_bytes(directory: Path) -> int:
    """Return page cache that the kernel drops before it refuses memory."""
    try:
        text = (directory / "memory.stat").read_text()
    except OSError:
        return 0
    found = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    return int(found.get("total_inactive_file", found.get("inactive_file", "0")))


def _cgroup_room(self_cgroup: Path, root: Path) -> int | None:
    """Return the least that any enclosing control group leaves; None without a limit.

    Both versions: 2 has one hierarchy at `root`, 1 has one for memory in `root`/memory. A
    container sees its own group at the top, whatever path the kernel names.
    """
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        number, controllers, name = line.split(":", 2)
        if number == "0" and not controllers:
            top, limit_file, usage_file = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top = root / "memory"
            limit_file, usage_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / name.lstrip("/")
        for directory in (group, *group.parents):
            if directory == top.parent:
                break
            limit, usage = _number(directory / limit_file), _number(directory / usage_file)
            if limit is not None and usage is not None and limit < _NO_LIMIT:
                rooms.append(max(limit - usage + _inactive_file_bytes(directory), 0))
    return min(rooms) if rooms else None
