"""A daemon with a GPU pool, from outside: what it prints, announces, refuses and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.config import pool_prefix

BLOCK = 4096


@contextmanager
def daemon(directory: Path, *flags: str) -> Iterator[tuple[str, str, int]]:
    """Run a daemon; yield its address, its ready line, and its process id."""
    address = f"unix://{directory}/s"
    command = [sys.executable, "-m", "kvstore", "serve", "--state", str(directory / "state")]
    command += ["--listen", address, "--host-pool", "32MiB"]
    # What is saved would stay in shared memory after the test.
    command += ["--no-save-host", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield address, process.stdout.readline(), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


def command(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *arguments],
        env={**os.environ, "KVSTORE_ADDRESS": address},
        capture_output=True,
        text=True,
        check=False,
    )


def open_files(pid: int) -> list[str]:
    links = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        # It closes files meanwhile, of the connection that has just ended, say.
        with suppress(FileNotFoundError):
            links.append(str(file.readlink()))
    return links


def test_blocks_come_up_over_the_wire(tmp_path: Path) -> None:
    flags = ["--disk", str(tmp_path / "disk"), "--disk-capacity", "64MiB", "--gpu-pool", "8MiB"]
    with daemon(tmp_path, *flags, "--gpu-devices", "simulated:2") as (address, ready, pid):
        assert "gpu=16MiB:2devices" in ready
        with kvstore.Client(address) as client:
            space = client.open_space(
                kvstore.SpaceSpec(
                    model="m", dtype="bfloat16", block_tokens=16, shard_bytes=(BLOCK, BLOCK)
                )
            )
            keys = kvstore.chain_keys(list(range(16 * 8)), block_tokens=16)
            blocks = np.random.default_rng(1).integers(0, 256, (8, 2 * BLOCK), np.uint8)
            assert space.put(keys, blocks, timeout_s=60) == 8
            ticket = space.prefetch(keys, tier="gpu", deadline_s=60)
            assert ticket.wait(60) == 8
            assert set(space.lookup(keys).tiers) == {"gpu"}
            # A client that names no device gets host slots.
            out = np.zeros_like(blocks)
            assert space.get(keys, out, timeout_s=60) == 8
            assert (out == blocks).all()
            stats = json.loads(command(address, "stats", "--json").stdout)
            [gpu] = [tier for tier in stats["tiers"] if tier["tier"] == "gpu"]
            assert (gpu["blocks"], gpu["state"], gpu["io_engine"]) == (8, "ok", "host")
            assert [device["name"] for device in gpu["devices"]] == ["simulated 0", "simulated 1"]
            assert "from disk through host memory" in command(address, "stats").stdout
            said = command(address, "doctor").stdout
            assert "gpu tier" in said
            refused = command(address, "resize", "1GiB", "--tier", "gpu")
            assert refused.returncode != 0
            assert "keeps its size" in refused.stderr
            assert space.evict(keys, "gpu").copies == 8
            assert set(space.lookup(keys).tiers) == {"host"}
        pools = pool_prefix(tmp_path / "state") + "*/gpu-*"
        assert sum("memfd:kvstore-simulated" in link for link in open_files(pid)) == 2
        assert list(Path("/dev/shm").glob(pools))
    assert not list(Path("/dev/shm").glob(pools))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--gpu-pool", "2GiB", "--gpu-devices", "simulated:1"], "only 1 GiB of 1 GiB are free"),
        (["--gpu-pool", "1MiB", "--gpu-devices", "simulated:x"], "gpu_devices: simulated:x"),
        (["--gpu-devices", "0"], "gpu_devices: needs gpu_pool"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, flags: list[str], line: str) -> None:
    state = ["--state", str(tmp_path), "--listen", f"unix://{tmp_path}/s", "--host-pool", "16MiB"]
    answer = command("", "serve", *state, *flags)
    assert answer.returncode != 0
    assert line in answer.stderr.splitlines()[-1]
    assert "Traceback" not in answer.stderr
