"""Stories of caches that made nothing faster, and of users who could not tell why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_world import World, spec_of
from told_blocks import bytes_of
from told_blocks import spec_of as told_spec

from kvstore import Client, chain_keys
from kvstore.engine.counters import UsageCounts
from kvstore.index.space_index import SpaceIndex
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.metrics import EngineCollector

TOKENS = range(64)
SPACES = 10_000


def _tier(client: Client, tier: pb.Tier) -> Any:
    [found] = [t for t in client.stats().tiers if t.tier == tier]
    return found


def test_no_reuse_after_restart_duplicates_on_disk(start_daemon: Any, tmp_path: Path) -> None:
    options = ("--disk", str(tmp_path / "disk"), "--disk-capacity", "64MiB", "--no-save-host")
    daemon = start_daemon(*options)
    keys, blocks = chain_keys(TOKENS, 4), bytes_of(TOKENS)
    with Client(daemon.address) as client:
        assert client.open_space(told_spec()).put(keys, blocks) == 16
        assert client.flush(60).done
        used = _tier(client, pb.TIER_DISK).used_bytes
    for end in (daemon.stop, daemon.kill):
        end()
        daemon.start()
        with Client(daemon.address) as client:
            space = client.open_space(told_spec())
            assert space.lookup(keys).blocks == 16
            assert space.put(keys, blocks) == 16
            assert np.array_equal(space.get(keys, timeout_s=30.0), blocks)
            assert client.flush(60).done
            disk = _tier(client, pb.TIER_DISK)
            assert (disk.blocks, disk.used_bytes, disk.written_bytes) == (16, used, 0)


def test_pinning_a_huge_pool_stalled_start_up(start_daemon: Any) -> None:
    """Ready before any of the pool is taken; then slab by slab, as it is needed."""
    daemon = start_daemon("--host-pool", "2GiB")
    [pool] = daemon._pools
    assert not list(pool.glob("slab-*"))
    with Client(daemon.address) as client:
        space = client.open_space(told_spec())
        assert space.put(chain_keys(TOKENS, 4), bytes_of(TOKENS), timeout_s=60.0) == 16
        host = _tier(client, pb.TIER_HOST)
        assert host.capacity_bytes == 2 << 30
        # A slab is a sixty-fourth of the pool; one more is made ahead.
        assert host.allocated_bytes <= 2 * (2 << 30) // 64


def test_users_could_not_tell_which_path_was_in_use(start_daemon: Any, tmp_path: Path) -> None:
    options = ("--disk", str(tmp_path / "disk"), "--disk-capacity", "64MiB")
    daemon = start_daemon(*options)
    with Client(daemon.address) as client:
        engine = _tier(client, pb.TIER_DISK).io_engine
        assert engine in ("posix", "posix-buffered")
        assert any(f", {engine}" in finding.text for finding in client.doctor())


@pytest.mark.parametrize("option", ["--disk", "--state"])
def test_an_unwritable_directory_disabled_the_tier_silently(tmp_path: Path, option: str) -> None:
    """Mode bits do not stop root: nobody may write below /proc."""
    options: Sequence[str] = (option, "/proc/kvstore-test")
    if option == "--disk":
        options = (*options, "--state", str(tmp_path / "s"))
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "serve", "--host-pool", "16MiB", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    [line] = [said for said in done.stderr.splitlines() if said.startswith("kvstore: ")]
    assert line.startswith(f"kvstore: {option[2:]}: /proc/kvstore-test")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_unbounded_metric_labels(make_world: Callable[..., World]) -> None:
    async def story(world: World) -> None:
        engine = world.engine
        collector = EngineCollector(engine)

        def series() -> set[tuple[str, tuple[str, ...]]]:
            found = set()
            for family in collector.collect():
                for sample in family.samples:
                    found.add((sample.name, tuple(sorted(sample.labels.items()))))
            return found  # type: ignore[return-value]

        before = series()
        for number in range(SPACES):
            spec = spec_of(f"model {number}")
            space = SpaceIndex(spec.fingerprint, spec, 0)
            engine.index.spaces[space.id] = space
            engine.usage[space.id] = UsageCounts(requests=1)
        assert len(series()) == len(before) < 300

    make_world().run(story)
