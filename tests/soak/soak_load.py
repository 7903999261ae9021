"""One client process of the soak: puts, gets, evictions, leases and aborts until it is killed.

    soak_load.py ADDRESS COUNTS ROW SEED

What it finds is counted in row ROW of the file COUNTS, which a kill does not take away. Keys come
from a window that moves with time, so that there are always new ones, and old ones are forgotten.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvstore.errors import AttachmentLost, DeadlineExceeded, ServerUnavailable

__all__ = ["COUNTS", "open_counts", "total"]

COUNTS = ("puts", "put_bytes", "gets", "got_bytes", "checked", "wrong", "unavailable", "bugs")
Counts = NDArray[np.uint64]

CHAINS = 48
LONGEST = 24
SHAPES = ((256 << 10,), (128 << 10, 96 << 10), (64 << 10,))
# The window of chains moves by one in this many seconds.
MOVE_SECONDS = 0.5
_THREADS = 3
_CALL_SECONDS = 30.0


def open_counts(path: Path, rows: int) -> Counts:
    """Return counters of all processes, shape (rows, len(COUNTS)), shared through a file."""
    size = 8 * rows * len(COUNTS)
    with path.open("a+b") as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    return np.frombuffer(memory, np.uint64).reshape(rows, len(COUNTS))


def total(counts: Counts) -> dict[str, int]:
    """Return the sums by name."""
    return dict(zip(COUNTS, map(int, counts.sum(axis=0)), strict=True))


def content(key: bytes, size: int) -> NDArray[np.uint8]:
    """Return the bytes that a block must have."""
    words = np.arange((size + 7) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(int.from_bytes(key[:8], "little"))
    words ^= words >> np.uint64(31)
    return words.view(np.uint8)[:size]


def keys_of(shape: int, number: int) -> list[bytes]:
    """Return the keys of a chain."""
    return [hashlib.md5(f"{shape}/{number}/{i}".encode()).digest() for i in range(LONGEST)]


class User:
    """One thread with one client."""

    def __init__(self, address: str, mapped: bool, seed: int, counts: Counts) -> None:
        self._dice = random.Random(seed)
        self._counts = dict(zip(COUNTS, range(len(COUNTS)), strict=True))
        self._row = counts
        self._client = kvstore.Client(address, map_memory=mapped, timeout_s=_CALL_SECONDS)
        self._mapped = mapped
        self._spaces: list[kvstore.Space] = []

    def count(self, name: str, amount: int = 1) -> None:
        self._row[self._counts[name]] += amount

    def run(self) -> None:
        """Use the daemon until killed."""
        while True:
            try:
                if not self._spaces:
                    self._spaces = [
                        self._client.open_space(
                            kvstore.SpaceSpec(
                                model="soak", dtype="u8", block_tokens=16, shard_bytes=shape
                            )
                        )
                        for shape in SHAPES
                    ]
                self._one()
            except (ServerUnavailable, DeadlineExceeded, AttachmentLost, TimeoutError):
                self.count("unavailable")
                time.sleep(0.05)
            except Exception:  # noqa: BLE001 whatever it is, it is counted, and the load goes on
                self.count("bugs")
                traceback.print_exc()
                time.sleep(0.05)
            time.sleep(self._dice.random() * 0.02)

    def _one(self) -> None:
        dice = self._dice
        at = dice.randrange(len(SHAPES))
        space, size = self._spaces[at], sum(SHAPES[at])
        # Young chains are asked for most, so that readers and writers meet.
        newest = int(time.time() / MOVE_SECONDS)
        keys = keys_of(at, newest - int(CHAINS * dice.random() ** 2))[: dice.randint(1, LONGEST)]
        what = dice.random()
        if what < 0.35:
            self._put(space, keys, size)
        elif what < 0.80:
            self._get(space, keys, size)
        elif what < 0.86:
            # Held, and forgotten now and then: the next kill gives it back.
            if self._mapped:
                lease = space.acquire(keys, deadline_s=0.1).result(_CALL_SECONDS)
                time.sleep(dice.random() * 0.1)
                if dice.random() < 0.97:
                    lease.release()
        elif what < 0.90:
            if self._mapped:
                grant = space.reserve(dice.randint(1, 4)).result(_CALL_SECONDS)
                self._client.attachment.abort(
                    grant.owner_id, grant.id, grant.slots, all_shards=True
                ).result(_CALL_SECONDS)
        elif what < 0.94:
            ticket = space.prefetch(keys, deadline_s=0.3)
            if dice.random() < 0.5:
                ticket.wait(0.1)
            else:
                ticket.cancel()
        elif what < 0.97:
            space.evict(keys, dice.choice((None, "host", "disk")))
        elif what < 0.99:
            space.pin(keys[:4], 0.5)
        else:
            space.lookup(keys)

    def _put(self, space: kvstore.Space, keys: list[bytes], size: int) -> None:
        blocks = np.stack([content(key, size) for key in keys])
        stored = space.put(keys, blocks, timeout_s=self._dice.choice((0.0, 0.2, 1.0)))
        self.count("puts")
        self.count("put_bytes", stored * size)

    def _get(self, space: kvstore.Space, keys: list[bytes], size: int) -> None:
        rows = space.get(keys, timeout_s=self._dice.choice((0.0, 0.2, 1.0)))
        self.count("gets")
        self.count("got_bytes", rows.nbytes)
        self.count("checked", len(rows))
        for key, row in zip(keys, rows, strict=False):
            if not np.array_equal(row, content(key, size)):
                self.count("wrong")


def main() -> None:
    """Be some clients until killed."""
    address, path, row, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    rows = path.stat().st_size // (8 * len(COUNTS))
    counts = open_counts(path, rows)
    for i in range(_THREADS):
        # One in three streams. Each thread has a row of its own: increments are not atomic.
        user = User(address, i != 2, seed * _THREADS + i, counts[row * _THREADS + i])
        threading.Thread(target=user.run, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
