"""Walks an LMDB environment that may be damaged, in a process that may die of it.

Run as a program by `kvstore.index.lmdb_recovery`, with one JSON argument:

    {"sys_path": [...], "source": directory, "target": empty directory or null, "parent": pid}

It prints one JSON object and exits with 0: the fields of `CheckResult`, or "path" and "version"
if the format is another release's. Whatever else it does means that the walk failed. It imports
little, because a daemon waits for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if __name__ == "__main__":
    # Started without site-packages and without this program's directory: both come from there.
    sys.path[:] = json.loads(sys.argv[1])["sys_path"]

from kvstore.errors import FormatVersionError
from kvstore.index import records
from kvstore.index.lmdb_env import LmdbEnv, StoreDamaged
from kvstore.index.lmdb_file import DATA_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CheckResult", "walk"]

_PR_SET_PDEATHSIG: Final = 1


class CheckResult(NamedTuple):
    """What a walk found.

    Attributes:
        ok: every database was walked to its end and every record is intact.
        reason: one line, empty if ok.
        records: intact records.
        damaged: records whose checksum does not hold.
        copied: the intact records are in the target, durably.
    """

    ok: bool
    reason: str = ""
    records: int = 0
    damaged: int = 0
    copied: bool = False


class _Walk:
    def __init__(self, env: LmdbEnv) -> None:
        self._env = env
        self._ids: dict[bytes, bytes] = {}
        self.records = 0
        self.damaged = 0
        self.problems: list[str] = []

    def names(self) -> list[bytes]:
        """Return the databases, spaces early: their ids are what other checksums cover."""
        try:
            names = self._env.names()
        except StoreDamaged as error:
            self.problems.append(str(error))
            return []
        known = [name for name in names if records.is_database(name)]
        if len(known) < len(names):
            self.problems.append("an unknown database")
        return sorted(known, key=lambda name: (name != records.META, name != records.SPACES, name))

    def intact(self, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield one database's intact records, in ascending order."""
        last = b""
        try:
            for key, value in self._env.items(name):
                if key <= last:
                    self.problems.append("keys out of order")
                    return
                last = key
                if self._holds(name, key, value):
                    self.records += 1
                    yield key, value
                else:
                    self.damaged += 1
        except StoreDamaged as error:
            self.problems.append(str(error))

    def _holds(self, name: bytes, key: bytes, value: bytes) -> bool:
        if name == records.META:
            if key == records.FORMAT_KEY:
                return records.format_version(value, str(self._env.path)) is not None
            return key == records.USES_KEY and records.intact(b"", key, value)
        if name == records.SPACES:
            space_id = records.space_id_of(value)
            if len(key) != 4 or not records.intact(space_id, key, value):
                return False
            self._ids[key] = space_id
            return True
        owner = self._ids.get(key[:4])
        return owner is not None and records.intact(owner, key[4:], value)


def walk(source: Path, target: Path | None = None) -> CheckResult:
    """Walk an environment that may be damaged; copy what is intact. May kill the process.

    Args:
        source: directory of an environment that nobody writes to.
        target: empty directory for the copy; None only walks.

    Raises:
        FormatVersionError: it is of another release; nothing is to be copied.
    """
    env = LmdbEnv(source, readonly=True)
    try:
        env.check_size()
    except StoreDamaged as error:
        return CheckResult(False, str(error))
    found = _Walk(env)
    copied = False
    names = found.names()
    if target is None:
        for name in names:
            for _ in found.intact(name):
                pass
    else:
        copy = LmdbEnv(target, map_bytes=4 * (source / DATA_NAME).stat().st_size)
        try:
            for name in names:
                copy.put_sorted(name, found.intact(name))
            copy.sync()
            copied = True
        except StoreDamaged:
            # No room, perhaps. The verdict is about the source: walk it all the same.
            env.close()
            return walk(source)
        finally:
            copy.close()
    env.close()
    if found.damaged:
        found.problems.append(f"{found.damaged} damaged records")
    reason = "; ".join(found.problems)
    return CheckResult(not reason, reason, found.records, found.damaged, copied)


def main() -> None:
    """Walk what the argument names and print the result."""
    import ctypes
    import os
    import resource
    import signal

    arguments = json.loads(sys.argv[1])
    # With the daemon that waits: what it is killed for, a stop perhaps, ends this walk, too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != arguments["parent"]:
        return
    # Dying is an answer here; a core file of a mapped index would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    target = arguments["target"]
    try:
        result = walk(Path(arguments["source"]), Path(target) if target else None)._asdict()
    except FormatVersionError as error:
        result = {"path": error.path, "version": error.found}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
