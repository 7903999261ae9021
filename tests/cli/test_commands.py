"""The command line against a real daemon: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.cli.child import ChildDaemon
from kvstore.cli.output import count
from kvstore.keys import Keys

BLOCK_TOKENS = 16
TOKENS = list(range(10 * BLOCK_TOKENS))


def run(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "COLUMNS": str(columns)},
    )


class Daemon:
    """A daemon with one chain of ten blocks in it."""

    def __init__(self, directory: Path) -> None:
        options = ["--host-pool", "64MiB", "--disk", str(directory / "disk")]
        self.child = ChildDaemon(directory, [*options, "--disk-capacity", "256MiB"])
        self.client = kvstore.Client(self.child.address)
        spec = kvstore.SpaceSpec(
            model="a/model/with/quite/a/long/name",
            dtype="bfloat16",
            block_tokens=BLOCK_TOKENS,
            shard_bytes=(65536,),
        )
        self.space = self.client.open_space(spec)
        self.keys: Keys = kvstore.chain_keys(TOKENS, BLOCK_TOKENS)
        blocks = np.random.default_rng(0).integers(0, 256, (10, 65536), np.uint8)
        assert self.space.put(self.keys, blocks) == 10
        self.id = spec.fingerprint.hex()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command on this daemon."""
        return run(*arguments, "--address", self.child.address)

    def json(self, *arguments: str) -> Any:
        """Run a command that must succeed, and return its JSON."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path)
    yield running
    running.client.close()
    assert running.child.stop() == 0


def test_stats_and_spaces(daemon: Daemon) -> None:
    assert daemon.space.get(daemon.keys, np.empty((10, 65536), np.uint8)) == 10
    stats = daemon.json("stats")
    tiers = {tier["tier"]: tier for tier in stats["tiers"]}
    assert set(tiers) == {"host", "disk"}
    assert tiers["host"]["blocks"] == tiers["host"]["hit_blocks"] == 10
    assert tiers["host"]["capacity_bytes"] == 64 << 20
    (space,) = stats["spaces"]
    assert space["space"]["id"] == daemon.id
    (prefix,) = stats["prefixes"]
    assert (prefix["root"], prefix["key"]) == (daemon.keys[0].hex(), daemon.keys[9].hex())
    assert (prefix["requests"], prefix["hit_tokens"]) == (1, len(TOKENS))
    assert (prefix["shared_bytes"], prefix["blocks_host"]) == (10 * 65536, 10)
    assert space["spec"]["shard_bytes"] == [65536]
    (listed,) = daemon.json("spaces")
    # Usage comes with heartbeats, between the two calls too.
    assert listed | {"usage": None} == space | {"usage": None}

    shown = daemon.run("stats")
    assert shown.returncode == 0, shown.stderr
    for word in (
        "effective hit rate",
        "Tiers",
        "Spaces",
        "Prefixes",
        "Clients",
        "Times",
        daemon.id[:8],
    ):
        assert word in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 100
    assert "a/model/with/quite" not in shown.stdout
    every_field = daemon.run("spaces", "--long").stdout
    assert daemon.id in every_field
    assert "model: a/model/with/quite/a/long/name" in every_field


def busy_prefix() -> dict[str, Any]:
    from kvstore.cli.plain import plain
    from kvstore.proto import kvstore_pb2 as pb

    return plain(
        pb.HotPrefix(
            space_id=b"s" * 32,
            key=b"k" * 16,
            requests=10**9,
            hit_tokens=10**12,
            shared_tokens=65_536,
            shared_bytes=10**11,
            blocks_host=512,
            blocks_disk=512,
            idle_seconds=599,
        )
    )


def test_tables_fit_eighty_columns(daemon: Daemon) -> None:
    """Numbers of a busy server must not push a table over a terminal's edge."""
    from rich.console import Console

    from kvstore.cli import stats as command
    from kvstore.cli.plain import plain

    values = plain(daemon.client.stats())
    for tier in values["tiers"]:
        tier.update(capacity_bytes=10**13, used_bytes=10**13, blocks=5_000_000)
        tier.update(
            dirty_blocks=5_000_000,
            hit_blocks=99_999_999,
            hit_tokens=9_999_999_999,
            evicted_blocks=99_999_999,
        )
    tables = [
        command._tier_table(values["tiers"]),
        command._space_table(values["spaces"] * 3),
        command._client_table(values["clients"] * 3),
        command._timing_table(values["timings"]),
        command._prefix_table([busy_prefix()]),
    ]
    console = Console(width=200)
    assert {table.title for table in tables if console.measure(table).maximum > 80} == set()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (99_999, "99,999"),
        (100_000, "100k"),
        (1_234_567, "1.23M"),
        (99_960_000, "100M"),
        (999_600_000, "1G"),
        (12_345_678_901, "12.3G"),
        (10**15, "1000T"),
    ],
)
def test_large_counts_stay_short(value: int, shown: str) -> None:
    assert count(value) == shown


def test_pin_unpin_evict(daemon: Daemon, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(", ".join(map(str, TOKENS[: 4 * BLOCK_TOKENS])))
    pinned = daemon.json("pin", "--space", daemon.id[:8], "--tokens", str(prompt))
    assert pinned == {"pinned_blocks": 4, "keys": 4}
    assert daemon.json("spaces")[0]["pinned"] == 4

    evicted = daemon.json("evict", "--space", daemon.id, "--all")
    assert evicted["skipped"] > 0
    assert daemon.space.lookup(daemon.keys).blocks == 4

    assert daemon.json("unpin", "--space", daemon.id, "--all") == {"unpinned_blocks": 4}
    daemon.json("evict", "--space", daemon.id[:12].upper(), *(k.hex() for k in daemon.keys[:4]))
    assert daemon.space.lookup(daemon.keys).blocks == 0


def test_flush_prefetch_drain(daemon: Daemon) -> None:
    assert daemon.json("flush")["done"] is True
    assert daemon.json("spaces")[0]["blocks_disk"] == 10
    daemon.json("evict", "--space", daemon.id, "--all", "--tier", "host")
    assert daemon.json("spaces")[0]["blocks_host"] == 0
    hexadecimal = [key.hex() for key in daemon.keys]
    fetched = daemon.json("prefetch", "--space", daemon.id[:8], *hexadecimal)
    assert fetched == {"blocks": 10, "keys": 10}
    assert daemon.json("spaces")[0]["blocks_host"] == 10
    daemon.json("evict", "--space", daemon.id, "--all", "--tier", "host")
    hint = ("prefetch", "--space", daemon.id, *hexadecimal, "--priority", "-3")
    asked = daemon.json(*hint, "--deadline", "60s", "--wait", "0s")
    assert asked["keys"] == 10
    # What was only asked for comes all the same.
    assert daemon.json(*hint)["blocks"] == 10
    assert daemon.json("stats")["draining"] is False
    assert "drained" in daemon.run("drain").stdout
    # Who finds a daemon that stores nothing is told why.
    for looking in (("stats",), ("top", "--once"), ("doctor",)):
        seen = " ".join(daemon.run(*looking).stdout.split())
        assert "drained: nothing is stored until the next start" in seen
    more = kvstore.chain_keys([1] * BLOCK_TOKENS, BLOCK_TOKENS)
    assert daemon.space.put(more, np.zeros((1, 65536), np.uint8), timeout_s=0.1) == 0
    assert daemon.space.get(daemon.keys, np.empty((10, 65536), np.uint8)) == 10


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("pin", "--space", "ffff", "00"), "space: no space's id starts with 'ffff'"),
        (("explain", "3f2a"), "prompts: no file 3f2a; of a space, --tokens or --keys are"),
        (("pin", "--space", "ID", "0"), "keys: '0' is not hexadecimal, two digits a byte"),
        (("pin", "--space", "ID", "00"), "keys: key 0 has 1 bytes, the space's have 16"),
        (("evict", "--space", "ID"), "keys: give keys, or --tokens FILE, or --all"),
        (("evict", "--space", "ID", "--all", "00"), "keys: give keys, or --tokens FILE, or --all"),
        (("evict", "--space", "ID", "--all", "--tier", "gpu"), "tier: "),
        (("evict", "--space", "ID", "--all", "--tier", "attic"), "tier: "),
        (("pin", "--space", "ID", "--tokens", "/nowhere"), "tokens: cannot read /nowhere"),
        (
            ("prefetch", "--space", "ID", "--tokens", "/dev/null"),
            "tokens: /dev/null: holds no token ids",
        ),
        (("prefetch", "--space", "ID", "11" * 16, "--tier", "gpu"), "tier: "),
        (
            ("prefetch", "--space", "ID", "11" * 16, "--deadline", "soon"),
            "'soon' is not a duration",
        ),
    ],
)
def test_bad_input_is_one_line(daemon: Daemon, arguments: tuple[str, ...], line: str) -> None:
    done = daemon.run(*(daemon.id if word == "ID" else word for word in arguments))
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvstore: {line}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert daemon.space.lookup(daemon.keys).blocks == 10


def test_no_daemon(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/nobody.sock"
    for command in (["stats"], ["spaces"], ["flush"], ["drain"], ["pin", "--space", "a", "00"]):
        done = run(*command, "--address", address)
        assert done.returncode == 1
        assert done.stderr == (
            f"kvstore: no daemon answers at {address}; "
            f"start one with `kvstore serve --listen {address}`\n"
        )


def test_a_daemon_that_is_stopped(daemon: Daemon) -> None:
    """It listens: to start another one would be wrong advice."""
    os.kill(daemon.child.pid, signal.SIGSTOP)
    try:
        done = daemon.run("stats")
    finally:
        os.kill(daemon.child.pid, signal.SIGCONT)
    assert done.returncode == 1
    assert "listens, but does not answer: it is stopped, stuck" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["stat"], "No such command 'stat'"),
        (["stats", "--color"], "No such option: --color"),
        (["pin", "00"], "Missing option '--space'"),
        (["bench", "--rounds", "many"], "Invalid value for '--rounds'"),
    ],
)
def test_wrong_command_line(arguments: list[str], line: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


def test_bad_settings_end_before_anything_is_made(tmp_path: Path) -> None:
    state = tmp_path / "state"
    done = run("serve", "--state", str(state), "--write-policy", "sometimes")
    assert done.returncode == 1
    assert done.stderr == (
        "kvstore: write_policy: 'sometimes': should be 'through', 'reused' or 'evict'\n"
    )
    assert not state.exists()


@pytest.mark.vllm
def test_demo_without_a_model(tmp_path: Path) -> None:
    done = run("demo", "--model", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("kvstore: model: no checkpoint in ")


def test_output_into_a_closed_pipe(daemon: Daemon) -> None:
    """`kvstore stats | head -1` ends quietly."""
    command = f"{sys.executable} -m kvstore stats --json --address {daemon.child.address} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in (
        *("serve", "stats", "spaces", "pin", "unpin", "evict"),
        *("prefetch", "flush", "drain", "demo", "bench"),
    ):
        assert f"\n  {command} " in done.stdout


def test_what_is_on_no_disk_is_not_called_safe(start_daemon: Callable[..., Any]) -> None:
    without = start_daemon()
    with kvstore.Client(without.address) as client:
        space = client.open_space(
            kvstore.SpaceSpec(model="m", dtype="bf16", block_tokens=16, shard_bytes=(65536,))
        )
        assert space.put(kvstore.chain_keys(range(32), 16), np.zeros((2, 65536), np.uint8)) == 2

    for name, said in (("flush", "0 blocks written, 2 skipped"), ("drain", "2 blocks are not on")):
        done = run(name, "--address", without.address)
        assert done.returncode == 1
        assert said in done.stdout
    assert "this daemon has no disk tier" in run("flush", "--address", without.address).stdout


@pytest.mark.parametrize("command", [("spaces",), ("stats", "--json"), ("pins",)])
def test_a_full_disk_behind_the_output_is_one_line(
    daemon: Daemon, command: tuple[str, ...]
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", *command, "--address", daemon.child.address],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "kvstore: standard output: No space left on device\n"
