"""A machine that loses its power: a fake I/O layer that knows what was synced and what was not.

Kill -9 keeps the page cache, so it says nothing about the order of syncs. Here every write goes to
the real files, and beside them it is kept what a device would be sure to have:

* of a file, by inode: its bytes at the last fsync or fdatasync, and every write since;
* of a directory: its entries at its last fsync;
* of LMDB's data file: its bytes after the last commit. LMDB's own order is taken on trust: it
  syncs data pages before the meta page that makes them current. What is tested is ours.

At the loss each sector that was written since is one of its versions by lot: the synced one, or any
that was written later; a file's length is the synced one or the present one; an entry that was
made, replaced or removed since is as before or as now, each for itself. That is more than most
file systems allow, and what POSIX promises. The result is put in place of the directories, as the
next start finds it.

The layer is put under everything by replacing functions of `os`, and the engine's own system calls
(`PosixEngine(pwritev=…, fdatasync=…)`), which C code or a reference would hide from that.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from kvstore.index.lmdb_env import LmdbEnv

__all__ = ["PowerLoss"]

# What a device writes as a whole.
SECTOR_BYTES: Final = 512
LMDB_NAME: Final = "data.mdb"

# How what is not synced ends, when the power goes: each lot for itself, nothing of it, all of it.
MOODS: Final = ("lots", "lots", "nothing", "all")


def _path_of(fd: int) -> str:
    return os.fspath(Path(f"/proc/self/fd/{fd}").readlink()).removesuffix(" (deleted)")


class _File:
    """A file as the device is sure to have it, and the writes since."""

    def __init__(self, synced: bytes) -> None:
        self.synced = synced
        self.writes: list[tuple[int, bytes]] = []

    def sync(self, data: bytes) -> None:
        self.synced = data
        self.writes.clear()

    def after_loss(self, now: bytes, lots: random.Random, mood: str) -> bytes:
        """Return what the device has."""
        if mood == "all":
            return now
        if mood == "nothing":
            return self.synced
        length = lots.choice([len(self.synced), len(now)])
        result = bytearray(self.synced.ljust(length, b"\0")[:length])
        versions: dict[int, list[bytes]] = {}
        # Also what no function of ours was seen to write.
        for offset, data in [*self.writes, (0, now)]:
            for at in range(offset // SECTOR_BYTES, -(-(offset + len(data)) // SECTOR_BYTES)):
                first, last = max(offset, at * SECTOR_BYTES), (at + 1) * SECTOR_BYTES
                part = data[first - offset : last - offset]
                whole = len(part) == SECTOR_BYTES or first + len(part) >= length
                if whole and part != self.synced[first : first + len(part)]:
                    versions.setdefault(at, []).append(part)
        for at, parts in sorted(versions.items()):
            if lots.random() < 0.5:
                part = lots.choice(parts)
                first = at * SECTOR_BYTES
                result[first : first + len(part)] = part[: max(0, length - first)]
        return bytes(result[:length])


class PowerLoss:
    """Watches the files below some directories, and ends their power after so many events.

    Attributes:
        events: writes, syncs and commits so far.
    """

    def __init__(
        self, roots: Sequence[Path], seed: str, after: int, on_loss: Callable[[str], None]
    ) -> None:
        """Watch; `install` puts the layer in place.

        Args:
            roots: directories; what is in them now is on the device.
            seed: of the lots.
            after: events until the power goes.
            on_loss: called then, with the image in place of the directories; never returns.
        """
        self.roots = [os.fspath(root) for root in roots]
        self.lots = random.Random(seed)
        self.after = after
        self.on_loss = on_loss
        self.events = 0
        # Held through every call that changes something: the loss is at one instant for all.
        self.lock = threading.RLock()
        self.files: dict[int, _File] = {}
        self.entries: dict[str, dict[str, int]] = {}
        # Descriptors of what lost a name and may have it back.
        self._nameless: dict[int, int] = {}
        self.index: dict[str, bytes] = {}
        for root in self.roots:
            for directory, _, _ in os.walk(root):
                self._sync_directory(directory)

    def _ours(self, path: str) -> bool:
        return any(path == root or path.startswith(root + "/") for root in self.roots)

    def _read(self, path: str) -> bytes:
        with open(path, "rb") as file:  # noqa: PTH123 - Path.open may be watched
            return file.read()

    def _list(self, directory: str) -> dict[str, int]:
        with os.scandir(directory) as found:
            return {entry.name: entry.inode() for entry in found}

    def _sync_directory(self, directory: str) -> None:
        """Its entries are durable. A file seen for the first time is as it is now."""
        self.entries[directory] = self._list(directory)

    def _step(self, what: str) -> None:
        """Something is about to happen."""
        self.events += 1
        if self.events == self.after:
            self._lose(what)

    def _wrote(self, fd: int, offset: int, data: bytes) -> None:
        """Bytes are about to be written."""
        path = _path_of(fd)
        if self._ours(path):
            self._known(os.fstat(fd), path).writes.append((offset, data))
            self._step(f"write {Path(path).name}")

    def _known(self, status: os.stat_result, path: str) -> _File:
        """Return a file's record; one that is new has no synced byte."""
        file = self.files.get(status.st_ino)
        if file is None:
            synced = self._read(path) if self._was_there(path, status.st_ino) else b""
            file = self.files[status.st_ino] = _File(synced)
        return file

    def _was_there(self, path: str, inode: int) -> bool:
        directory, _, name = path.rpartition("/")
        return self.entries.get(directory, {}).get(name) == inode

    def _synced(self, fd: int) -> None:
        """A sync returned."""
        path = _path_of(fd)
        if not self._ours(path):
            return
        self._step(f"sync {Path(path).name}")
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            self._sync_directory(path)
        else:
            with open(f"/proc/self/fd/{fd}", "rb") as file:  # noqa: PTH123
                data = file.read()
            self.files.setdefault(status.st_ino, _File(b"")).sync(data)

    def _commit_boundary(self, directory: Path) -> None:
        """LMDB has made a transaction durable, or is about to begin one."""
        path = directory / LMDB_NAME
        if path.exists():
            self.index[os.fspath(path)] = self._read(os.fspath(path))
        self._step("commit")

    def _lose(self, what: str) -> None:
        """The power goes: put what the device has in place, then tell."""
        mood = self.lots.choice(MOODS)
        for root in self.roots:
            image = root + ".image"
            self._image(root, image, mood)
            shutil.rmtree(root)
            os.rename(image, root)  # noqa: PTH104
        self.on_loss(re.sub("[0-9]{6}", "NNNNNN", what))

    def _image(self, directory: str, image: str, mood: str) -> None:
        os.mkdir(image, 0o700)  # noqa: PTH102
        before, now = self.entries.get(directory, {}), self._list(directory)
        present = {inode: f"{directory}/{name}" for name, inode in now.items()}
        for name in sorted({*before, *now}):
            then, here = before.get(name), now.get(name)
            choice = here if mood == "all" else then if mood == "nothing" else None
            if mood == "lots":
                choice = self.lots.choice([then, here])
            if choice is None:
                continue
            source = present.get(choice)
            target = f"{image}/{name}"
            if source is not None and os.path.isdir(source):  # noqa: PTH112
                self._image(source, target, mood)
            else:
                data = self._content(choice, source, f"{directory}/{name}", mood)
                with open(target, "wb") as file:  # noqa: PTH123
                    file.write(data)

    def _content(self, inode: int, source: str | None, path: str, mood: str) -> bytes:
        if path in self.index and path == source:
            return self.index[path]
        if source is None:
            fd = self._nameless.get(inode)
            now = b"" if fd is None else self._read(f"/proc/self/fd/{fd}")
        else:
            now = self._read(source)
        file = self.files.get(inode)
        if file is None:
            # Never written to since it was on the device, or new and never synced.
            return now if self._was_there(path, inode) else self.lots.choice([now, b""])
        return file.after_loss(now, self.lots, mood)

    def install(self) -> None:
        """Put the layer under this process, for good."""
        for name in ("fsync", "fdatasync"):
            patch.object(os, name, self._sync).start()
        for name in ("pwrite", "pwritev"):
            patch.object(os, name, self._watched_write(getattr(os, name))).start()
        for name in ("unlink", "remove", "rename", "replace"):
            patch.object(os, name, self._watched_change(getattr(os, name))).start()
        write = LmdbEnv.write

        def commit(env: LmdbEnv, name: bytes, body: Callable[[Any], Any]) -> Any:
            # The environment's lock first: it is held around calls that come here.
            with env.use(), self.lock:
                self._commit_boundary(env.path)
                result = write(env, name, body)
                self._commit_boundary(env.path)
                return result

        patch.object(LmdbEnv, "write", commit).start()

    def _sync(self, fd: int) -> None:
        """Stand in for fsync. What is durable is ours to say: no device is waited for."""
        with self.lock:
            self._synced(fd)

    def _watched_write(self, real: Callable[[int, Any, int], int]) -> Any:
        def call(fd: int, data: Any, offset: int) -> int:
            with self.lock:
                parts = data if isinstance(data, (list, tuple)) else [data]
                self._wrote(fd, offset, b"".join(bytes(part) for part in parts))
                return real(fd, data, offset)

        return call

    def _watched_change(self, real: Callable[..., Any]) -> Any:
        def call(*paths: Any, **options: Any) -> Any:
            with self.lock:
                full = [self._full(os.fspath(path), options.get("dir_fd")) for path in paths]
                if any(map(self._ours, full)):
                    for path in full:
                        self._keep(path)
                    self._step(f"{real.__name__} {Path(full[0]).name}")
                return real(*paths, **options)

        return call

    def _full(self, path: str, directory_fd: int | None) -> str:
        if directory_fd is None:
            return path
        return f"{_path_of(directory_fd)}/{path}"

    def _keep(self, path: str) -> None:
        """A name goes: after the loss it may be back, with its bytes."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return
        if stat.S_ISREG(os.fstat(fd).st_mode):
            # Open for good, so that no other file gets its number.
            self._nameless[os.fstat(fd).st_ino] = fd
        else:
            os.close(fd)
