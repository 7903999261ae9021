"""A crowd of client processes with mixed load, one of which is killed or stopped at a time.

    load_worker.py ADDRESS PROCESSES CLIENTS SECONDS SEED

Forks the processes before any of them has used gRPC. What they find is counted in shared memory,
which a kill does not take away; one JSON object with the sums is printed at the end.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
import traceback

import numpy as np
import numpy.typing as npt

import kvstore
from kvstore.errors import AttachmentLost, DeadlineExceeded, ServerUnavailable

COUNTS = ("gets", "checked", "wrong", "puts", "stored", "unavailable", "bugs")
CHAINS = 60
LONGEST = 24
SHAPES = ((65536,), (32768, 32768), (4096,))
# In the same second as a lease of one second ends.
STOPPED_SECONDS = 1.5

Counts = npt.NDArray[np.uint64]


def content(key: bytes, size: int) -> npt.NDArray[np.uint8]:
    """Return the bytes that a block must have."""
    seed = hashlib.sha256(key).digest()
    return np.frombuffer((seed * (size // len(seed) + 1))[:size], np.uint8)


def keys_of(shape: int, number: int) -> list[bytes]:
    """Return the keys of a chain."""
    name = f"{shape}/{number}"
    return [hashlib.md5(f"{name}/{i}".encode()).digest() for i in range(LONGEST)]


def one(spaces: list[kvstore.Space], dice: random.Random, counts: Counts) -> None:
    """Do one thing."""
    at = dice.randrange(len(spaces))
    space = spaces[at]
    size = sum(SHAPES[at])
    # Some chains are asked for by everybody, so that writers meet.
    number = int(CHAINS * dice.random() ** 2)
    keys = keys_of(at, number)[: dice.randint(1, LONGEST)]
    what = dice.random()
    if what < 0.35:
        blocks = np.stack([content(key, size) for key in keys])
        counts[4] += space.put(keys, blocks, timeout_s=dice.choice((0.0, 0.2, 1.0)))
        counts[3] += 1
    elif what < 0.8:
        out = np.zeros((len(keys), size), np.uint8)
        run = space.get(keys, out, timeout_s=dice.choice((0.0, 0.2, 1.0)))
        counts[0] += 1
        for key, got in zip(keys[:run], out, strict=False):
            counts[1] += 1
            if not np.array_equal(got, content(key, size)):
                counts[2] += 1
    elif what < 0.86:
        # Held, and forgotten half of the time: the next kill or the end gives it back.
        lease = space.acquire(keys, deadline_s=0.2).result(5)
        if dice.random() < 0.5:
            lease.release()
    elif what < 0.90:
        ticket = space.prefetch(keys, deadline_s=0.3)
        if dice.random() < 0.5:
            ticket.wait(0.1)
        else:
            ticket.cancel()
    elif what < 0.93:
        space.evict(keys, dice.choice((None, "host", "disk")))
    elif what < 0.96:
        space.pin(keys, 0.5)
    elif what < 0.98:
        space.unpin(keys)
    else:
        space.lookup(keys)


def use(address: str, mapped: bool, seed: int, counts: Counts) -> None:
    """Be one client until killed."""
    dice = random.Random(seed)
    client = kvstore.Client(address, map_memory=mapped, timeout_s=5.0)
    spaces: list[kvstore.Space] = []
    while True:
        try:
            if not spaces:
                spaces = [
                    client.open_space(
                        kvstore.SpaceSpec(
                            model="load", dtype="uint8", block_tokens=16, shard_bytes=shape
                        )
                    )
                    for shape in SHAPES
                ]
            one(spaces, dice, counts)
        except (ServerUnavailable, DeadlineExceeded, AttachmentLost, TimeoutError):
            counts[5] += 1
        except Exception:  # noqa: BLE001 whatever it is, it is counted, and the load goes on
            counts[6] += 1
            traceback.print_exc()
        time.sleep(dice.random() * 0.15)


def start(address: str, clients: int, seed: int, counts: Counts) -> int:
    """Fork a process with some clients; every fourth streams."""
    pid = os.fork()
    if pid:
        return pid
    for i in range(clients):
        client = (address, i % 4 != 3, seed * clients + i, counts)
        threading.Thread(target=use, args=client, daemon=True).start()
    while True:
        signal.pause()


def main() -> None:
    """Keep the crowd going."""
    address, processes, clients = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    seconds, seed = float(sys.argv[4]), int(sys.argv[5])
    memory = mmap.mmap(-1, 8 * len(COUNTS) * processes)
    counts = np.frombuffer(memory, np.uint64).reshape(processes, len(COUNTS))
    dice = random.Random(seed)
    born = 0
    pids = []
    for i in range(processes):
        born += 1
        pids.append(start(address, clients, seed + born, counts[i]))
    end = time.monotonic() + seconds
    stopped: list[tuple[float, int]] = []
    while time.monotonic() < end:
        time.sleep(0.5)
        while stopped and stopped[0][0] < time.monotonic():
            os.kill(pids[stopped.pop(0)[1]], signal.SIGCONT)
        at = dice.randrange(processes)
        if dice.random() < 0.5:
            stopped = [(when, who) for when, who in stopped if who != at]
            os.kill(pids[at], signal.SIGKILL)
            os.waitpid(pids[at], 0)
            born += 1
            pids[at] = start(address, clients, seed + born, counts[at])
        elif at not in [who for _, who in stopped]:
            os.kill(pids[at], signal.SIGSTOP)
            stopped.append((time.monotonic() + STOPPED_SECONDS, at))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    sums = counts.sum(axis=0).tolist()
    print(json.dumps({**dict(zip(COUNTS, map(int, sums), strict=True)), "processes": born}))


if __name__ == "__main__":
    main()
