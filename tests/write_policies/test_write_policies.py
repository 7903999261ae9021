"""What is written to disk, when, and what is not and why."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_invariants import check
from engine_world import SLOT_BYTES, World, chain, until

import kvstore
from kvstore.config import WritePolicy, load_config
from kvstore.engine.budget import DiskBudget
from kvstore.engine.steady_clock import SteadyClock
from kvstore.errors import ConfigError
from kvstore.index.lmdb_store import MetaStore, StoreDamaged
from kvstore.units import GIB

Make = Callable[..., World]


def test_what_is_used_once_wears_no_disk(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        for n in range(12):
            assert await player.put(chain(f"once{n}", 8)) == 8
        await world.settle()
        assert world.disk.written_bytes == 0
        assert world.counts("flushed_blocks") == 0
        # 96 blocks went through a pool of 32.
        assert world.counts("flush_skipped_not_reused_blocks") >= 64
        check(world.engine, quiet=True)

    make_world(host_blocks=32, flush_on_reuse=True).run(story)


def test_a_second_use_takes_the_block_and_its_ancestors_to_disk(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        keys = chain("twice", 8)
        assert await player.put(keys) == 8
        await world.settle()
        assert await player.load(keys[:5]) == 5
        await world.settle()
        assert world.tiers(keys) == "bbbbbhhh"
        assert world.disk.written_bytes == 5 * SLOT_BYTES
        # Used again it is not written again.
        assert await player.load(keys[:5]) == 5
        await world.settle()
        assert world.disk.written_bytes == 5 * SLOT_BYTES
        # A stream counts as a use, too.
        read = world.engine.start_read(world.space, keys[:7])
        read.close()
        await world.settle()
        assert world.tiers(keys) == "bbbbbbbh"
        check(world.engine, quiet=True)

    async def after(world: World) -> None:
        assert world.engine.recovered_blocks == 7

    make_world(flush_on_reuse=True).run(story, after)


def test_a_stop_writes_what_was_used_again_only(make_world: Make) -> None:
    async def story(world: World) -> None:
        player = world.player()
        once, twice = chain("once", 4), chain("twice", 4)
        await player.put(once)
        await player.put(twice)
        await player.load(twice)
        await world.engine.quiesce(10)
        assert world.tiers(once) + world.tiers(twice) == "hhhhbbbb"
        # Whoever asks for a flush gets one.
        assert await world.engine.flush(10) == (4, [])
        assert world.tiers(once) == "bbbb"
        check(world.engine, quiet=True)

    make_world(flush_on_reuse=True).run(story)


def test_the_budget_ends_writing_and_time_brings_it_back(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]

    def budget(state: Path) -> DiskBudget:
        day = 20 * SLOT_BYTES
        return DiskBudget(state / "disk-budget", day, SteadyClock(clock=lambda: now[0], boot="b"))

    async def story(world: World) -> None:
        player = world.player()
        first, second = chain("first", 16), chain("second", 16)
        assert await player.put(first) == 16
        await world.settle()
        assert await player.put(second) == 16
        await world.settle()
        assert world.disk.written_bytes == 20 * SLOT_BYTES
        assert world.tiers(second) == "b" * 4 + "h" * 12
        assert world.counts("flush_skipped_budget_blocks") >= 12
        _, skipped = await world.engine.flush(5)
        assert [b.key for b in skipped] == second[4:]
        assert "budget" in world.engine.why_skipped
        # Serving goes on, of host's own.
        assert await player.load(second) == 16
        assert world.disk.written_bytes == 20 * SLOT_BYTES
        check(world.engine, quiet=True)

    async def after(world: World) -> None:
        # Another run of the same day: nothing.
        player = world.player()
        keys = chain("third", 8)
        assert await player.put(keys) == 8
        await world.settle()
        assert world.disk.written_bytes == 0
        assert world.tiers(keys) == "h" * 8
        # A day later what waits is written, by itself.
        monkeypatch.setattr("kvstore.engine.flusher._BUDGET_SECONDS", 0.01)
        now[0] += 25 * 3600
        assert world.engine.flusher is not None
        world.engine.flusher.wake()
        await until(lambda: world.tiers(keys) == "b" * 8)
        await world.settle()
        check(world.engine, quiet=True)

    make_world(budget=budget).run(story, after)


def test_an_index_that_cannot_be_committed_is_the_reason(make_world: Make) -> None:
    class Full(MetaStore):
        full = False

        def commit_blocks(self, *args: Any) -> None:
            if self.full:
                problem = "mdb_txn_commit: No space left on device"
                raise StoreDamaged("/the/state/directory", problem, errno.ENOSPC)
            super().commit_blocks(*args)

    async def story(world: World) -> None:
        assert isinstance(world.store, Full)
        world.store.full = True
        assert await world.player().put(chain("a", 4)) == 4
        _, skipped = await world.engine.flush(60.0)
        assert len(skipped) == 4
        why = world.engine.why_skipped
        assert "index" in why
        assert "/the/state/directory" in why
        assert "No space left" in why
        world.store.full = False
        _, skipped = await world.engine.flush(60.0)
        assert not skipped
        assert "index" not in world.engine.why_skipped

    make_world(store_class=Full).run(story)


def test_without_room_the_reason_is_another(make_world: Make) -> None:
    async def story(world: World) -> None:
        assert await world.player().put(chain("long", 20)) == 20
        await world.settle()
        assert world.counts("flush_skipped_no_room_blocks") >= 12
        assert world.counts("flush_skipped_budget_blocks") == 0
        assert world.counts("flushed_bytes") == 8 * SLOT_BYTES
        assert world.engine.why_skipped == "no room on disk"

    make_world(disk_blocks=8).run(story)


def test_settings() -> None:
    where = {"host_pool": "64MiB", "disk": "/d"}
    config = load_config({**where, "write_policy": "reused", "disk_budget": "500GiB/day"})
    assert config.write_policy is WritePolicy.REUSED
    assert config.disk_budget == 500 * GIB
    assert load_config({**where, "disk_budget": "500GiB"}).disk_budget == 500 * GIB
    assert load_config(where).disk_budget is None
    for flags, problem in (
        ({**where, "disk_budget": "0"}, "disk_budget: "),
        ({**where, "disk_budget": "much"}, "disk_budget: "),
        ({"host_pool": "64MiB", "disk_budget": "1GiB"}, "disk_budget: needs disk"),
        ({**where, "write_policy": "never"}, "write_policy: "),
    ):
        with pytest.raises(ConfigError, match=problem) as refused:
            load_config(flags)
        assert "\n" not in str(refused.value)


def test_a_daemon_keeps_to_its_budget_over_a_restart(
    start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    block = 1 << 20
    options = ["--disk", str(tmp_path / "disk"), "--disk-capacity", "64MiB", "--discard-host"]
    daemon = start_daemon(*options, "--disk-budget", "6MiB")
    spec = kvstore.SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(block,))
    keys = kvstore.chain_keys(list(range(16 * 8)), 16)
    blocks = np.random.default_rng(1).integers(0, 256, (8, block), np.uint8)
    with kvstore.Client(daemon.address) as client:
        assert client.open_space(spec).put(keys, blocks) == 8
        flushed = client.flush()
        assert (flushed.done, flushed.skipped) == (True, 2)
        assert {b.reason for b in flushed.skipped_blocks} == {
            "the disk budget of 24 hours is spent"
        }
        command = [sys.executable, "-m", "kvstore", "stats", "--address", daemon.address]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert "disk budget: 0 B left of 6 MiB in 24 hours" in shown.stdout
        out = subprocess.run([*command, "--json"], capture_output=True, check=True, timeout=60)
        stats = json.loads(out.stdout)
        assert stats["tiers"][1]["budget_bytes"] == 6 << 20
        assert stats["counters"]["flush_skipped_budget_blocks"] >= 2
    assert daemon.stop() == 0
    daemon.start()
    with kvstore.Client(daemon.address) as client:
        space = client.open_space(spec)
        assert space.lookup(keys).blocks == 6
        assert np.array_equal(space.get(keys), blocks[:6])
        assert space.put(keys, blocks) == 8
        assert client.flush().skipped == 2
        assert client.stats().tiers[1].written_bytes == 0
