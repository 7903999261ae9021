"""What stories of restarts are told with: known blocks, and a daemon that stops and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import Client, Keys, SpaceSpec, chain_keys
from kvstore.engine.host_index import HOST_INDEX_NAME, read_host_index
from kvstore.errors import ServerUnavailable

Until = Callable[..., None]
Start = Callable[..., Any]

BLOCK = 1 << 20
WORKER = Path(__file__).parents[1] / "client" / "worker.py"
SHARDS = (BLOCK, BLOCK // 2)


def spec_of(model: str = "warm", shards: tuple[int, ...] = (BLOCK,)) -> SpaceSpec:
    return SpaceSpec(model=model, dtype="d", block_tokens=4, shard_bytes=shards)


def chain(name: str, count: int, block_bytes: int = BLOCK) -> tuple[Keys, NDArray[np.uint8]]:
    """Return a chain and its bytes; equal names give equal ones."""
    rng = np.random.default_rng(list(name.encode()))
    blocks = rng.integers(0, 256, (count, block_bytes), np.uint8)
    return chain_keys(range(4 * count), 4, salt=name.encode()), blocks


def store(space: Any, name: str, count: int, block_bytes: int = BLOCK) -> None:
    keys, blocks = chain(name, count, block_bytes)
    assert space.put(keys, blocks, timeout_s=10) == count


def load(space: Any, name: str, count: int, block_bytes: int = BLOCK) -> int:
    """Return how many blocks come; whatever comes must be right."""
    keys, blocks = chain(name, count, block_bytes)
    got = space.get(keys, timeout_s=10)
    assert np.array_equal(got, blocks[: len(got)]), "a wrong byte"
    return len(got)


def host_hits(client: Client) -> int:
    [host] = [t for t in client.stats().tiers if t.tier == 2]
    return int(host.hit_blocks)


def counter(client: Client, name: str) -> int:
    return int(client.stats().counters[name])


def index_of(daemon: Any) -> Path:
    state: Path = daemon.directory / "s"
    return state / HOST_INDEX_NAME


def pool_of(daemon: Any) -> Path:
    saved = read_host_index(index_of(daemon))
    assert saved is not None
    return saved.pool


def log_of(daemon: Any) -> str:
    text: str = daemon.log.read_text()
    assert "Traceback" not in text, text
    return text


def stop(daemon: Any) -> None:
    assert daemon.stop() == 0


def go_on(daemon: Any, client: Client) -> None:
    """Start the daemon again, and wait until the client has found it."""
    daemon.start()
    client.attachment.wait_active(10)
    end = time.monotonic() + 10
    while True:
        try:
            client.hello()
        except ServerUnavailable:
            assert time.monotonic() < end
            time.sleep(0.01)
        else:
            return


def restart(daemon: Any, client: Client) -> None:
    stop(daemon)
    go_on(daemon, client)


def checked(client: Client) -> bool:
    """Return whether everything that was adopted has been compared with its digests."""
    counts = client.stats().counters
    done = counts["adopted_checked_blocks"] + counts["adopted_damaged_blocks"]
    return bool(done == counts["adopted_blocks"])


def disk_of(tmp_path: Path) -> tuple[str, ...]:
    return ("--disk", str(tmp_path / "disk"), "--disk-capacity", "256MiB")
