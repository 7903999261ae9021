"""The pool's directory: one daemon run, one fresh directory."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.tiers.control import CONTROL_NAME

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

__all__ = [
    "create_pool",
    "gpu_generations_path",
    "remove_gpu_files",
    "remove_pool",
    "remove_stale_pools",
    "remove_strays",
    "slab_path",
]

_log = logging.getLogger(__name__)

_GPU = "gpu-"


def slab_path(directory: Path, group: int, shard: int) -> Path:
    """Return where a slab lies."""
    return directory / f"slab-{group}-{shard}"


def gpu_generations_path(directory: Path, group: int) -> Path:
    """Return where the generations of a GPU slab group lie."""
    return directory / f"{_GPU}{group}"


def remove_gpu_files(directory: Path) -> None:
    """Remove what the GPU tier of an earlier daemon left, if the directory is there at all."""
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            if path.name.startswith(_GPU):
                path.unlink(missing_ok=True)


def create_pool(directory: Path) -> None:
    """Create the directory, for its owner alone.

    Raises:
        ConfigError: it exists, or its parent does not or is not writable.
    """
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        raise ConfigError(f"pool directory {directory} exists already") from None
    except OSError as error:
        raise ConfigError(f"cannot create pool directory {directory}: {error.strerror}") from error


def remove_pool(directory: Path) -> None:
    """Remove slabs, control file and directory. What does not belong there stays, with a warning.

    Nothing happens when the directory is gone. Processes that map the slabs keep their memory.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            if path.name.startswith(("slab-", _GPU)) or path.name == CONTROL_NAME:
                _remove(path)
        try:
            directory.rmdir()
        except OSError as error:
            _log.warning("cannot remove pool directory %s: %s", directory, error.strerror)


def remove_strays(directory: Path, ours: Collection[Path]) -> None:
    """Remove slabs that nobody knows any more from a pool that was adopted."""
    for path in directory.iterdir():
        if path.name.startswith("slab-") and path not in ours:
            _remove(path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        # Somebody put something else in its place: that is no reason not to start.
        _log.warning("cannot remove %s: %s", path, error.strerror)


def remove_stale_pools(root: Path, prefix: str, keep: Path) -> list[Path]:
    """Remove the pools that dead daemons of this state directory left.

    The caller holds the state directory's lock, so that nobody else's pool has this prefix.

    Args:
        root: directory of the pools, e.g. ``/dev/shm``; anybody may create names there.
        prefix: start of this state directory's pool names; not empty.
        keep: the pool in use.

    Returns:
        What was removed.

    Raises:
        ValueError: the prefix is empty.
    """
    if not prefix:
        raise ValueError("an empty prefix names every directory")
    removed = []
    for path in sorted(root.iterdir()):
        if not path.name.startswith(prefix) or path == keep:
            continue
        status = path.lstat()  # never through a link that another user planted
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            continue
        remove_pool(path)
        if not path.exists():
            removed.append(path)
    return removed
