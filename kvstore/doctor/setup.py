"""What is examined: the part of a daemon's settings that the machine has to carry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Setup"]


@dataclass(frozen=True, slots=True)
class Setup:
    """A daemon's demands, of one that runs or of one that would.

    Attributes:
        state: state directory; need not exist.
        host_pool_bytes: size of the host pool.
        disk: directory of the disk tier; None: there is none.
        disk_capacity_bytes: of the disk tier; None: a share of what is free.
        io_threads: threads of the disk tier.
    """

    state: Path
    host_pool_bytes: int
    disk: Path | None = None
    disk_capacity_bytes: int | None = None
    io_threads: int = 4
