"""How large a pool of shared memory can be: file system, memory and control group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.cgroup import memory_limit
from kvstore.errors import ConfigError
from kvstore.units import format_bytes

__all__ = ["Room", "check_capacity", "memory_room"]

_MEMINFO: Final = Path("/proc/meminfo")
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
    limit = memory_limit()
    left = None if limit is None else limit.room_bytes
    return Room(free, _available_bytes(_MEMINFO), left)


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
