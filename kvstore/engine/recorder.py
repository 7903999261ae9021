"""Recording what is asked for, so that `kvstore replay` can try other tier sizes on it.

One JSON object a line:

    {"kvstore_trace": 1, "unix_seconds": …}                    first; a restart adds another one
    {"space": 0, "block_tokens": …, "block_bytes": …}          before a space is first named
    {"at": …, "op": "load", "space": 0, "keys": …}             a lease or a stream was asked for
    {"at": …, "op": "look", "space": 0, "keys": …}             somebody asked what is there
    {"at": …, "op": "store", "space": 0, "keys": …}            new blocks, each below the one before
    {"at": …, "dropped": 3}                                    events that are missing before this

`at`: seconds since the line "kvstore_trace". `keys`: 16 hexadecimal digits a block, in chain order;
`parent`, where there is one, is the key before the first. Keys are hashed once more, with a secret
that is made at each start and written nowhere: the file says which blocks are equal, and nothing of
what is in them. Spaces are numbers.

The event loop appends to a queue and does nothing else; a thread hashes, writes and flushes. The
queue is bounded in keys: what comes faster than it is written is dropped and counted. A file that
cannot be written any more ends the recording with one line in the log; the daemon goes on.

Don't forget to bump `TRACE_VERSION` when the layout changes; `kvstore.replay.recorded` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.engine.counters import Counters
    from kvstore.index import Block, SpaceIndex

__all__ = ["TRACE_VERSION", "Recorder"]

log = logging.getLogger(__name__)

TRACE_VERSION: Final = 1

_QUEUED_KEYS: Final = 1_000_000
_WRITE_SECONDS: Final = 0.2
_KEY_BYTES: Final = 8


class _Event(NamedTuple):
    at: float
    op: str
    space: SpaceIndex
    keys: Sequence[bytes]
    parent: bytes | None
    dropped: int


class Recorder:
    """Writes a trace. `load`, `look` and `store` are for the event loop, and never wait."""

    def __init__(self, path: Path, counters: Counters, queued_keys: int = _QUEUED_KEYS) -> None:
        """Open the file; `start` begins to write.

        Args:
            path: appended to, made when it is not there.
            counters: `recorded_events` and `recording_dropped_events` go there.
            queued_keys: most keys that wait to be written.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            fd, cut_short = _open(path)
        except OSError as error:
            raise ConfigError(f"record: {path}: {error.strerror}") from error
        self._path = path
        self._file: IO[str] = os.fdopen(fd, "w", encoding="utf-8")
        self._cut_short = cut_short
        self._counts = counters.counts
        self._limit = queued_keys
        self._queue: deque[_Event] = deque()
        # Keys that were ever queued (the loop's), and taken from the queue (the thread's).
        self._put = self._taken = 0
        self._dropped = 0
        self._failed = False
        self._secret = os.urandom(32)
        self._spaces: dict[SpaceIndex, int] = {}
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._began = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        """Write what is queued and close the file. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if not self._file.closed:
            try:
                self._file.close()
            except OSError as error:
                log.warning("recording: %s: %s", self._path, error.strerror)

    def load(self, space: SpaceIndex, keys: Sequence[bytes], parent: bytes | None) -> None:
        """A run is asked for, to be read."""
        self._add("load", space, keys, parent)

    def look(self, space: SpaceIndex, keys: Sequence[bytes], parent: bytes | None) -> None:
        """Somebody asks how much of a run is there."""
        self._add("look", space, keys, parent)

    def store(self, run: Sequence[Block]) -> None:
        """Blocks were committed, in chain order."""
        at = 0
        for end in range(1, len(run) + 1):
            if end == len(run) or run[end].parent is not run[end - 1]:
                first = run[at]
                parent = None if first.parent is None else first.parent.key
                self._add("store", first.space, [b.key for b in run[at:end]], parent)
                at = end

    def _add(self, op: str, space: SpaceIndex, keys: Sequence[bytes], parent: bytes | None) -> None:
        if self._failed or self._put - self._taken + len(keys) > self._limit:
            self._dropped += 1
            self._counts["recording_dropped_events"] += 1
            return
        self._put += len(keys)
        at = time.monotonic() - self._began
        self._queue.append(_Event(at, op, space, keys, parent, self._dropped))
        self._counts["recorded_events"] += 1

    def _run(self) -> None:
        try:
            if self._cut_short:
                self._file.write("\n")
            self._write({"kvstore_trace": TRACE_VERSION, "unix_seconds": time.time()})
            said = 0
            last = False
            while not last:
                last = self._stop.wait(_WRITE_SECONDS)
                while self._queue:
                    event = self._queue.popleft()
                    if event.dropped > said:
                        self._write({"at": round(event.at, 6), "dropped": event.dropped - said})
                        said = event.dropped
                    self._write_event(event)
                    self._taken += len(event.keys)
                self._file.flush()
        except OSError as error:
            # What is queued by now is lost, and everything later is dropped and counted.
            self._failed = True
            self._queue.clear()
            log.warning("recording ends: %s: %s", self._path, error.strerror)

    def _write_event(self, event: _Event) -> None:
        number = self._spaces.get(event.space)
        if number is None:
            number = self._spaces[event.space] = len(self._spaces)
            spec = event.space.spec
            block_bytes = event.space.shape.block_bytes
            self._write(
                {"space": number, "block_tokens": spec.block_tokens, "block_bytes": block_bytes}
            )
        fields = {
            "at": round(event.at, 6),
            "op": event.op,
            "space": number,
            "keys": "".join(map(self._hashed, event.keys)),
        }
        if event.parent:  # an empty one says that the keys begin a chain
            fields["parent"] = self._hashed(event.parent)
        self._write(fields)

    def _hashed(self, key: bytes) -> str:
        return hashlib.blake2b(key, digest_size=_KEY_BYTES, key=self._secret).hexdigest()

    def _write(self, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")


def _open(path: Path) -> tuple[int, bool]:
    """Open a file to append to; return its descriptor, and whether its last line is cut short.

    Raises:
        OSError: it cannot be written, or is a FIFO, whose reader could stop the daemon.
    """
    # Of a FIFO opening waits for a reader, without O_NONBLOCK.
    flags = os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, os.O_RDWR | flags, 0o600)
    except PermissionError:
        fd = os.open(path, os.O_WRONLY | flags, 0o600)
    found = os.fstat(fd)
    if stat.S_ISFIFO(found.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is a FIFO", str(path))
    # By a full disk, or a kill: the next line must not be taken for its rest.
    cut_short = False
    if stat.S_ISREG(found.st_mode) and found.st_size:
        with contextlib.suppress(OSError):
            cut_short = os.pread(fd, 1, found.st_size - 1) != b"\n"
    return fd, cut_short
