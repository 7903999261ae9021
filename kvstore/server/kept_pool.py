"""Which pool a daemon starts with: a fresh one, or the one that the last run kept."""

from __future__ import annotations

import logging
import os
import stat
from typing import TYPE_CHECKING

from kvstore.engine.host_index import (
    HOST_INDEX_NAME,
    DamagedHostIndex,
    HostIndex,
    read_host_index,
    remove_host_index,
)
from kvstore.errors import FormatVersionError
from kvstore.tiers.control import CONTROL_NAME

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["find_kept_pool"]

log = logging.getLogger("kvstore")


def find_kept_pool(
    state: Path, root: Path, prefix: str, machine: str, *, discard: bool
) -> HostIndex | None:
    """Return what the last run saved of its host tier, if this one can go on with it.

    What it cannot go on with is removed here, with one line in the log; the rest when the engine
    begins to grant.

    Args:
        state: the state directory, whose lock is held.
        root: directory of the pools.
        prefix: start of this state directory's pool names.
        machine: id of the kernel's boot.
        discard: go on with nothing.

    Raises:
        OSError: what is to be removed may be there still.
    """
    path = state / HOST_INDEX_NAME
    try:
        saved = read_host_index(path)
        problem = "" if saved is None else _problem(saved, root, prefix, machine)
    except (DamagedHostIndex, FormatVersionError, OSError) as error:
        saved, problem = None, str(error)
    if discard and (saved is not None or problem):
        problem = "as configured"
    if problem:
        log.warning("the saved contents of host memory are discarded: %s", problem)
    if saved is None or problem:
        remove_host_index(path)
        return None
    return saved


def _problem(saved: HostIndex, root: Path, prefix: str, machine: str) -> str:
    """Say why a pool is not the one that was saved; empty when it is."""
    if saved.machine != machine:
        return "the machine was booted since"
    pool = saved.pool
    if pool.parent != root or not pool.name.startswith(prefix):
        return f"{pool} is no pool of this state directory"
    try:
        status = pool.lstat()  # never through a link that another user planted
        control = (pool / CONTROL_NAME).lstat()
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    same = stat.S_ISREG(control.st_mode) and control.st_ino == saved.control_inode
    if not mine or not same:
        return f"{pool} is not the directory that it was"
    return ""
