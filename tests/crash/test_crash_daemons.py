"""Real daemons, killed and damaged: the in-process test's claims, with everything around them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_damage import damage, files_of

import kvstore
from kvstore.config import pool_prefix
from kvstore.errors import KVStoreError

SHARED_MEMORY = Path("/dev/shm")
BLOCK = 16384
BLOCKS = 12
SPEC = kvstore.SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(BLOCK,))
# A few kinds of file, hit where it hurts most; `crashtest --damages` has them all.
DAMAGES = [
    ("data.mdb", "cut"),
    ("seal", "directory"),
    ("epochs", "directory"),
    ("host-index", "directory"),
    ("seg-*", "swap"),
    ("slab-*", "cut"),
]


def chain(number: int) -> kvstore.Keys:
    return kvstore.chain_keys(list(range(16 * BLOCKS * number, 16 * BLOCKS * (number + 1))), 16)


def rows(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, (BLOCKS, BLOCK), np.uint8)


def right(space: kvstore.client.Space, number: int) -> int:
    """Return how many blocks of a chain are there, all of them right."""
    found = space.get(chain(number), timeout_s=60)
    assert np.array_equal(found, rows(number)[: len(found)]), "a wrong byte"
    return len(found)


def pools(daemon: Any) -> list[Path]:
    return list(SHARED_MEMORY.glob(pool_prefix(daemon.directory / "s") + "*"))


def start_or_refuse(daemon: Any) -> str:
    """Start it; when it does not serve, return the line with which it refused."""
    before = daemon.log.read_text()
    with contextlib.suppress(pytest.fail.Exception):
        daemon.start()
        return ""
    said = daemon.log.read_text().removeprefix(before)
    assert "Traceback" not in said, said
    assert daemon._process.returncode == 1, said
    lines = [line for line in said.splitlines() if line.startswith("kvstore")]
    assert len(lines) == 1, said
    return str(lines[0])


def test_a_file_of_a_stopped_daemon_is_damaged(
    start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    seed = int(os.environ.get("KVSTORE_TEST_SEED", "3"))
    lots = random.Random(seed)
    disk = tmp_path / "disk"
    daemon = start_daemon("--disk", str(disk), "--disk-capacity", "16MiB", "--host-pool", "16MiB")
    state = daemon.directory / "s"
    for number, (kind, how) in enumerate(DAMAGES):
        with kvstore.Client(daemon.address, timeout_s=60) as client:
            space = client.open_space(SPEC)
            space.put(chain(number), rows(number))
            assert client.flush().done
        assert daemon.stop() == 0
        path = lots.choice(files_of(state, disk, *pools(daemon))[kind])
        spare = path.read_bytes()
        where = f"seed {seed}, sample {number}: {damage(lots, how, path)}"
        line = start_or_refuse(daemon)
        if line:
            print(f"{where}: {line}")
            # It names the file, and serves again once that is right.
            assert path.name in line, f"{where}: {line}"
            if path.is_dir():
                shutil.rmtree(path)
            path.write_bytes(spare)
            assert not start_or_refuse(daemon), where
        with kvstore.Client(daemon.address, timeout_s=60) as client:
            space = client.open_space(SPEC)
            for earlier in range(number + 1):
                right(space, earlier)
        if path.is_dir():
            shutil.rmtree(path)


def test_what_was_flushed_is_there_after_kill_9_at_any_time(
    start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    lots = random.Random(7)
    daemon = start_daemon(
        "--disk", str(tmp_path / "disk"), "--disk-capacity", "64MiB", "--host-pool", "16MiB"
    )
    flushed: list[int] = []
    for life in range(2):
        with kvstore.Client(daemon.address, timeout_s=60) as client:
            space = client.open_space(SPEC)
            assert [right(space, number) for number in flushed] == [BLOCKS] * len(flushed)
            killer = threading.Timer(lots.uniform(0.05, 0.6), daemon.kill)
            killer.start()
            with contextlib.suppress(KVStoreError):
                for number in range(100 * life, 100 * life + 40):
                    if space.put(chain(number), rows(number)) < BLOCKS:
                        break
                    if client.flush().done:
                        flushed.append(number)
            killer.join()
        daemon.start()
    with kvstore.Client(daemon.address, timeout_s=60) as client:
        space = client.open_space(SPEC)
        assert [right(space, number) for number in flushed] == [BLOCKS] * len(flushed)
    assert len(pools(daemon)) == 1


@pytest.mark.parametrize("point", ["adoption.invalidated"])
def test_killed_on_the_way_to_the_next_daemon(
    point: str, start_daemon: Callable[..., Any], tmp_path: Path, until: Callable[..., None]
) -> None:
    daemon = start_daemon(
        "--disk", str(tmp_path / "disk"), "--disk-capacity", "16MiB", "--host-pool", "16MiB"
    )
    with kvstore.Client(daemon.address, timeout_s=60) as client:
        space = client.open_space(SPEC)
        space.put(chain(0), rows(0))
        assert client.flush().done
    reached = tmp_path / "reached"
    assert daemon.stop() == 0
    daemon.environment["KVSTORE_SYNC_POINT"] = f"{point}:{reached}"
    starting = threading.Thread(target=lambda: start_in_vain(daemon))
    starting.start()
    until(reached.exists, 60)
    os.kill(daemon.pid, signal.SIGKILL)
    starting.join()
    del daemon.environment["KVSTORE_SYNC_POINT"]
    daemon.start()
    with kvstore.Client(daemon.address, timeout_s=60) as client:
        assert right(client.open_space(SPEC), 0) == BLOCKS
    assert len(pools(daemon)) == 1


def start_in_vain(daemon: Any) -> None:
    """Start a daemon that somebody kills before it is ready."""
    with contextlib.suppress(pytest.fail.Exception):
        daemon.start()
