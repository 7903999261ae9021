"""`kvstore resize` against a real daemon, with a client that maps the pool."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import ConfigError

BLOCK = 1 << 20


def run(daemon: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", "resize", *arguments, "--address", daemon.address],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def _pool_bytes(daemon: Any) -> int:
    [pool] = daemon._pools
    return sum(slab.stat().st_size for slab in pool.glob("slab-*"))


def _space(client: kvstore.Client) -> Any:
    spec = kvstore.SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(BLOCK,))
    return client.open_space(spec)


def _stored(space: Any, seed: int, blocks: int) -> tuple[Any, Any]:
    keys = kvstore.chain_keys([seed * 1000 + i for i in range(16 * blocks)], 16)
    data = np.random.default_rng(seed).integers(0, 256, (blocks, BLOCK), np.uint8)
    assert space.put(keys, data) == blocks
    return keys, data


def test_memory_is_given_back_while_a_client_has_it_mapped(daemon: Any) -> None:
    with kvstore.Client(daemon.address) as client:
        space = _space(client)
        stored = [_stored(space, seed, 20) for seed in range(5)]
        for keys, data in stored[::-1]:
            assert np.array_equal(space.get(keys), data)
        done = run(daemon, "48MiB", "--tier", "host", "--json")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert (answer["done"], answer["bytes"]) == (True, 48 << 20)
        # 100 blocks were there, 48 fit.
        assert answer["evicted"] >= 52
        assert _pool_bytes(daemon) < 49 << 20
        assert client.stats().tiers[0].capacity_bytes == 48 << 20
        # What was read last is there still, and right, through slabs of which some are new.
        for keys, data in stored[:2]:
            assert np.array_equal(space.get(keys), data)
        more, bytes_ = _stored(space, 9, 10)
        assert np.array_equal(space.get(more), bytes_)

        done = run(daemon, "96MiB", "--tier", "host")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "the host tier takes 96 MiB at most\n"
        _stored(space, 10, 40)
        assert client.stats().tiers[0].used_bytes > 48 << 20
        before = [len(space.get(keys)) for keys, _ in stored]
    # What moved in memory is where the next daemon finds it.
    assert daemon.stop() == 0
    daemon.start()
    with kvstore.Client(daemon.address) as client:
        space = _space(client)
        for (keys, data), blocks in zip(stored, before, strict=True):
            got = space.get(keys)
            assert len(got) == blocks
            assert np.array_equal(got, data[:blocks])


def test_a_lease_is_waited_for_until_the_deadline(daemon: Any, until: Callable[..., None]) -> None:
    with kvstore.Client(daemon.address) as client:
        space = _space(client)
        keys, data = _stored(space, 1, 60)
        lease = space.acquire(keys).result(5)
        done = run(daemon, "32MiB", "--tier", "host", "--timeout", "300ms")
        assert done.returncode == 1
        assert "the rest is in use" in done.stdout
        answer = client.set_capacity("host", 32 << 20, 0.1)
        assert not answer.done
        assert answer.bytes > 32 << 20
        lease.release()
        until(lambda: _pool_bytes(daemon) < 33 << 20)
        got = space.get(keys)
        assert len(got) >= 24
        assert np.array_equal(got, data[: len(got)])


def test_a_disk_is_made_smaller_and_bigger(
    start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    where = tmp_path / "disk"
    daemon = start_daemon("--disk", str(where), "--disk-capacity", "128MiB")
    with kvstore.Client(daemon.address) as client:
        space = _space(client)
        stored = [_stored(space, seed, 20) for seed in range(4)]
        assert client.flush().done
        done = run(daemon, "48MiB", "--tier", "disk")
        assert done.returncode == 0, done.stderr
        assert "the disk tier takes 48 MiB at most; " in done.stdout
        size = sum(f.stat().st_size for f in where.glob("seg-*.kvs"))
        assert size < 49 << 20
        for keys, data in stored:
            assert np.array_equal(space.get(keys), data)  # from host
        assert run(daemon, "96MiB", "--tier", "disk").returncode == 0
    assert daemon.stop() == 0


def test_nonsense_is_refused_with_one_line(daemon: Any) -> None:
    for arguments, words in (
        (["1EiB", "--tier", "host"], "not a size"),
        (["900TiB", "--tier", "host"], "host pool of 900 TiB"),
        (["0", "--tier", "host"], "no size"),
        (["1GiB", "--tier", "gpu"], "tier"),
        (["1GiB", "--tier", "disk"], "this daemon has no disk tier"),
    ):
        done = run(daemon, *arguments)
        assert done.returncode == 1
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
    with kvstore.Client(daemon.address) as client:
        with pytest.raises(ConfigError):
            client.set_capacity("host", 1 << 60)
        assert client.stats().tiers[0].capacity_bytes == 128 << 20
