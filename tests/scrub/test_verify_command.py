"""`kvstore verify` against a real daemon: what it says, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.cli.verify import parse_fraction, parse_rate
from kvstore.errors import Busy, InvalidRequest

BLOCK = 65536
PAGE = 4096


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
    )


class Disk:
    """A daemon with a disk and one chain on it."""

    def __init__(self, daemon: Any, directory: Path, blocks: int) -> None:
        self.daemon, self.directory = daemon, directory
        self.client = kvstore.Client(daemon.address)
        self.space = self.client.open_space(
            kvstore.SpaceSpec(model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(BLOCK,))
        )
        self.keys = kvstore.chain_keys(list(range(16 * blocks)), 16)
        self.blocks = np.random.default_rng(1).integers(0, 256, (blocks, BLOCK), np.uint8)
        assert self.space.put(self.keys, self.blocks) == blocks
        assert self.client.flush().done

    def flip(self, block: int) -> None:
        """Change a byte in the middle of a block, found by its content."""
        [segment] = self.directory.glob("seg-*.kvs")
        data = segment.read_bytes()
        at = data.index(self.blocks[block].tobytes()[:64])
        with segment.open("r+b") as file:
            file.seek(at + BLOCK // 2)
            file.write(bytes([data[at + BLOCK // 2] ^ 1]))

    def verify(self, *options: str) -> subprocess.CompletedProcess[str]:
        return run("verify", *options, "--address", self.daemon.address)


@pytest.fixture
def disk(start_daemon: Callable[..., Any], tmp_path: Path) -> Any:
    made = []

    def make(blocks: int) -> Disk:
        where = tmp_path / "disk"
        daemon = start_daemon("--disk", str(where), "--disk-capacity", "64MiB")
        made.append(Disk(daemon, where, blocks))
        return made[-1]

    yield make
    for one in made:
        one.client.close()


def test_damage_is_found_told_and_gone(disk: Any) -> None:
    one = disk(10)
    done = one.verify()
    assert (done.returncode, done.stderr) == (0, "")
    assert "checked 10 of 10 blocks" in done.stdout
    assert "no damage found" in done.stdout

    one.space.evict(None, "host")
    one.flip(6)
    done = one.verify("--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert (found["done"], found["checked"], found["damaged"]) == (True, 10, 1)
    assert (found["dropped"], found["lost"]) == (4, 4)
    [fault] = found["faults"]
    assert fault["key"] == one.keys[6].hex()
    assert fault["space_id"] == one.space.spec.fingerprint.hex()
    assert (fault["problem"], fault["kept"]) == ("damaged", False)
    assert {"segment", "slot"} <= set(fault)
    got = one.space.get(one.keys)
    assert np.array_equal(got, one.blocks[:6])
    assert one.client.stats().counters["scrub_damaged_blocks"] == 1

    # Written again from memory, and told in words.
    assert one.space.put(one.keys, one.blocks) == 10
    assert one.client.flush().done
    one.flip(9)
    done = one.verify()
    assert done.returncode == 1
    assert f"damaged: {one.keys[9].hex()}" in done.stdout
    assert "whole in host: written again" in done.stdout
    assert "1 damaged: 1 copies dropped with what hung on them, 0 blocks lost" in done.stdout
    assert one.client.flush().done
    assert one.verify().returncode == 0


def test_one_at_a_time_and_it_ends_with_its_call(disk: Any, until: Callable[..., None]) -> None:
    one = disk(10)
    slow = one.client.verify(1.0, BLOCK)  # ten seconds
    assert not next(slow).done
    done = one.verify()
    assert done.returncode == 1
    assert done.stderr.startswith("kvstore: a verification is under way: ")
    assert done.stderr.count("\n") == 1
    with pytest.raises(Busy):
        next(one.client.verify())
    slow.close()
    until(lambda: one.verify("--fraction", "50%").returncode == 0)


def test_interrupted_it_says_what_it_saw(disk: Any, until: Callable[..., None]) -> None:
    one = disk(10)
    command = [sys.executable, "-m", "kvstore", "verify", "--rate", f"{BLOCK}/s", "--json"]
    process = subprocess.Popen(
        [*command, "--address", one.daemon.address], stdout=subprocess.PIPE, text=True
    )
    until(lambda: one.client.stats().counters.get("scrubbed_blocks", 0) >= 2, 20)
    # Its first progress has arrived by the time of a later block.
    until(lambda: one.client.stats().counters["scrubbed_blocks"] >= 3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert json.loads(out)["done"] is False
    until(lambda: one.verify().returncode == 0)


def test_a_daemon_that_stops_breaks_it_off(disk: Any) -> None:
    one = disk(10)
    slow = one.client.verify(1.0, BLOCK)
    assert not next(slow).done
    assert one.daemon.stop() == 0
    # In order, or with the channel: in no case as if all had been checked.
    with contextlib.suppress(kvstore.ServerUnavailable):
        assert not any(message.done for message in slow)


def test_nonsense_is_refused_with_one_line(daemon: Any) -> None:
    for options, word in (
        (["--fraction", "0"], "fraction"),
        (["--fraction", "200%"], "fraction"),
        (["--fraction", "some"], "fraction"),
        (["--rate", "fast"], "not a size"),
        (["--rate", "0"], "rate"),
        ([], "verify: this daemon has no disk tier"),
    ):
        done = run("verify", *options, "--address", daemon.address)
        assert done.returncode == 1
        assert word in done.stderr
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""


def test_parts_and_rates_as_people_write_them() -> None:
    assert parse_fraction("10%") == pytest.approx(0.1)
    assert parse_fraction("0.25") == 0.25
    assert parse_fraction("100%") == 1.0
    assert parse_rate("100MiB/s") == parse_rate("100 MiB") == 100 << 20
    with pytest.raises(InvalidRequest):
        parse_fraction("nan")
