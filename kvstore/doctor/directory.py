"""A directory that the daemon keeps files in: whose it is, and what lies under it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.doctor.finding import Finding, error, ok, warning
from kvstore.mounts import Mount, find_mount

__all__ = ["Directory", "check_access", "look_at"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_LOOK = stat.S_IRGRP | stat.S_IROTH | stat.S_IXGRP | stat.S_IXOTH


@dataclass(frozen=True, slots=True)
class Directory:
    """What was seen of a directory, or of the nearest one above when it is missing.

    Attributes:
        path: the directory.
        there: the directory itself, or the nearest existing path above it.
        is_directory: whether `there` is one.
        owner: user id.
        mode: permission bits.
        writable: whether this process may create names in it.
        mount: of its file system; None when it cannot be told.
        total_bytes: size of the file system.
        free_bytes: of it, what this process may use.
    """

    path: Path
    there: Path
    is_directory: bool
    owner: int
    mode: int
    writable: bool
    mount: Mount | None
    total_bytes: int
    free_bytes: int

    @property
    def exists(self) -> bool:
        """Whether the directory is there itself."""
        return self.path == self.there


def look_at(path: Path, mounts: Sequence[Mount]) -> Directory:
    """Look at a directory. Blocks when its file system does.

    Raises:
        OSError: it cannot be looked at.
    """
    there = path
    while not there.exists():
        there = there.parent
    status = there.stat()
    space = os.statvfs(there)
    return Directory(
        path=path,
        there=there,
        is_directory=stat.S_ISDIR(status.st_mode),
        owner=status.st_uid,
        mode=stat.S_IMODE(status.st_mode),
        writable=os.access(there, os.W_OK | os.X_OK, effective_ids=True),
        mount=find_mount(mounts, there),
        total_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
    )


def check_access(subject: str, seen: Directory, user: int) -> Iterator[Finding]:
    """Judge whether the daemon, and nobody else, can use a directory.

    Args:
        subject: of the finding.
        seen: the directory.
        user: id that the daemon runs as.
    """
    path = seen.path
    if not seen.is_directory:
        yield error(subject, f"{seen.there} is not a directory", "move it away, or name another")
    elif not seen.exists:
        if seen.writable:
            yield ok(subject, f"{path} is not there yet; the daemon makes it")
        else:
            yield error(
                subject,
                f"{path} is missing, and user {user} may not write to {seen.there}",
                f"create it for the daemon's user: install -d -m 700 -o USER {path}",
            )
    elif seen.owner != user and user != 0:
        yield error(
            subject,
            f"{path} belongs to user {seen.owner}, not to user {user}",
            f"run as its owner, or: chown -R {user} {path}",
        )
    elif not seen.writable:
        yield error(
            subject,
            f"{path} is not writable for user {user} (mode {seen.mode:o})",
            f"chmod 700 {path}",
        )
    elif seen.mode & _OTHERS_WRITE:
        yield error(
            subject,
            f"{path} can be written by other users (mode {seen.mode:o})",
            f"chmod 700 {path}",
        )
    elif seen.owner != user:
        yield warning(
            subject,
            f"{path} belongs to user {seen.owner}; a daemon of user {user} leaves files there "
            "that the owner cannot use",
            "run the daemon and this command as the owner",
        )
    elif seen.mode & _OTHERS_LOOK:
        yield warning(
            subject,
            f"{path} can be looked into by other users (mode {seen.mode:o})",
            f"chmod 700 {path}",
        )
    else:
        yield ok(subject, f"{path}, owner {seen.owner}, mode {seen.mode:o}")
