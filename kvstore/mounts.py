"""Which file system holds a path, and with which options it is mounted."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "NETWORK",
    "VOLATILE",
    "Mount",
    "find_mount",
    "network_filesystem",
    "parse_mounts",
    "read_mounts",
]

# File systems of other machines, or shared with them: no coherent mappings, no dependable locks.
NETWORK: Final = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "fuse.ceph",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs3",
        "nfs4",
        "ocfs2",
        "panfs",
        "pvfs2",
        "smb2",
        "smb3",
        "smbfs",
        "wekafs",
    ]
)
# Their contents are gone with the machine's boot.
VOLATILE: Final = frozenset(("ramfs", "tmpfs"))

_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system.

    Attributes:
        point: where.
        kind: type of the file system, such as ``xfs``.
        source: device or name behind it.
        options: of the mount and of the file system.
    """

    point: str
    kind: str
    source: str
    options: frozenset[str]

    def option(self, name: str) -> str | None:
        """Return the value of an option ``name=value``, None without it."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name and value:
                return value
        return None


def parse_mounts(text: str) -> list[Mount]:
    """Parse the contents of ``/proc/self/mountinfo``; lines of another form are left out."""
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 3:
            continue
        point = _ESCAPE.sub(lambda escape: chr(int(escape[1], 8)), fields[4])
        options = frozenset(option for part in (fields[5], rest[2]) for option in part.split(","))
        mounts.append(Mount(point, rest[0], rest[1], options))
    return mounts


def read_mounts() -> list[Mount]:
    """Return what is mounted now, in the order of mounting.

    Raises:
        OSError: there is no ``/proc``.
    """
    return parse_mounts(Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape"))


def find_mount(mounts: Sequence[Mount], path: Path) -> Mount | None:
    """Return the mount that holds an existing path; links are followed."""
    real = os.path.realpath(path)
    best: Mount | None = None
    for mount in mounts:
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        # A later mount on the same point hides the earlier one.
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def network_filesystem(path: Path, mounts: Sequence[Mount] | None = None) -> str | None:
    """Return the type of the network file system that holds `path`, None if it is a local one.

    Args:
        path: an existing directory.
        mounts: what is mounted; None: now.

    Raises:
        OSError: there is no ``/proc``.
    """
    mount = find_mount(read_mounts() if mounts is None else mounts, path)
    return mount.kind if mount is not None and mount.kind in NETWORK else None
