"""What happens to an LMDB environment that no orderly stop has sealed.

A child process walks it (`kvstore.index.lmdb_check`) and copies what is intact; this process
never maps the file itself. See `kvstore.index.lmdb_store` for the protocol.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.errors import FormatVersionError
from kvstore.index.epoch_log import sync_directory
from kvstore.index.lmdb_check import CheckResult
from kvstore.index.lmdb_file import DATA_NAME
from kvstore.index.records import FORMAT_VERSION
from kvstore.syncpoint import reach

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ENV_NAME", "CheckResult", "check_in_child", "put_aside", "renew"]

ENV_NAME: Final = "index.mdb"

_COPY_PREFIX: Final = f"{ENV_NAME}.copy-"
_ASIDE: Final = re.compile(rf"{re.escape(ENV_NAME)}\.damaged-[0-9]+")
_KEPT_ASIDE: Final = 3


def check_in_child(path: Path, timeout_s: float, target: Path | None = None) -> CheckResult:
    """Walk the environment of a state directory in a child process, and wait for it.

    Args:
        path: the state directory; nobody writes to its environment meanwhile.
        timeout_s: seconds after which the child is killed.
        target: empty directory that receives a copy of what is intact; None only walks.

    Raises:
        FormatVersionError: the environment is of another release.
        OSError: no child can be started.
    """
    # Isolated and without site: nothing is imported but what the walk needs. The package may
    # have been found through an import hook, so its place is named as well.
    package = Path(sys.modules["kvstore"].__path__[0]).parent
    arguments = {
        "sys_path": [*filter(None, sys.path), os.fspath(package)],
        "source": os.fspath(path / ENV_NAME),
        "target": None if target is None else os.fspath(target),
        "parent": os.getpid(),
    }
    program = Path(__file__).with_name("lmdb_check.py")
    command = [sys.executable, "-I", "-S", os.fspath(program), json.dumps(arguments)]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return CheckResult(False, f"not walked within {timeout_s:g} s")
    if child.returncode < 0:
        return CheckResult(False, f"walking it ended in {signal.Signals(-child.returncode).name}")
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return CheckResult(False, f"walking it failed: {''.join(last) or child.returncode}")
    if "version" in answer:
        raise FormatVersionError(answer["path"], answer["version"], FORMAT_VERSION)
    return CheckResult(**answer)


def renew(path: Path, timeout_s: float, before_loss: Callable[[], None]) -> str | None:
    """Replace a state directory's environment by a copy of its intact records.

    Args:
        path: the state directory.
        timeout_s: for the walk.
        before_loss: called when something is lost, before that is out of sight.

    Returns:
        One line about what was lost, None if nothing was.

    Raises:
        FormatVersionError: the environment is of another release; it is left alone.
        OSError: files cannot be created or moved; the environment is as before.
    """
    directory = path / ENV_NAME
    for rest in path.glob(f"{_COPY_PREFIX}*"):
        shutil.rmtree(rest, ignore_errors=True)
    # A new name each time: a child whose parent was killed may still be writing to the last one,
    # and would go on doing so when that is the index.
    copy = Path(tempfile.mkdtemp(prefix=_COPY_PREFIX, dir=path))
    try:
        result = check_in_child(path, timeout_s, copy)
        if result.copied:
            if not result.ok:
                before_loss()
            return _exchange(path, directory, copy, result)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    if result.ok:
        return None  # there was no room for a copy, and the file can be walked
    before_loss()
    return f"{directory}: {result.reason}; starting empty, the old index is {put_aside(path)}"


def _exchange(path: Path, directory: Path, copy: Path, result: CheckResult) -> str | None:
    note = None
    if not result.ok:
        aside = _aside_name(path)
        aside.mkdir(mode=0o700)
        os.link(directory / DATA_NAME, aside / DATA_NAME)
        _prune(path)
        note = (
            f"{directory}: {result.reason}; {result.records} intact records kept, "
            f"the old index is {aside.name}"
        )
    reach("renew.copied")
    (copy / DATA_NAME).replace(directory / DATA_NAME)
    reach("renew.replaced")
    sync_directory(directory)
    return note


def put_aside(path: Path) -> str:
    """Move a state directory's environment out of the way and return its new name.

    Raises:
        OSError: it is still there.
    """
    aside = _aside_name(path)
    (path / ENV_NAME).rename(aside)
    sync_directory(path)
    _prune(path)
    return aside.name


def _aside_name(path: Path) -> Path:
    at = int(time.time())
    while (aside := path / f"{ENV_NAME}.damaged-{at}").exists():
        at += 1
    return aside


def _prune(path: Path) -> None:
    """Keep the newest few: they are evidence, not data, and each is as large as an index."""
    aside = [entry for entry in path.iterdir() if _ASIDE.fullmatch(entry.name)]
    aside.sort(key=lambda entry: int(entry.name.rpartition("-")[2]))
    for entry in aside[:-_KEPT_ASIDE]:
        shutil.rmtree(entry, ignore_errors=True)
