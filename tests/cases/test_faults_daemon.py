"""Machines that take something away: memory, the index, the state directory, the other daemon."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from told_blocks import bytes_of, spec_of

from kvstore import Client, chain_keys

Until = Callable[..., None]

TOKENS, MORE = range(64), range(1000, 1064)

_LOCKED = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=16, max_readers=16)
with env.begin(write=True):
    print("locked", flush=True)
    sys.stdin.readline()
"""


def _serve(*options: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    """Start a daemon that is to be refused, after what `shell` does in a namespace of its own."""
    command = [sys.executable, "-m", "kvstore", "serve", *options]
    if shell:
        command = ["unshare", "--mount", "sh", "-ec", f'{shell}; exec "$@"', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_two_daemons_on_one_state_directory(daemon: Any, tmp_path: Path) -> None:
    state = daemon.directory / "s"
    before = sorted(p.name for p in state.iterdir())
    done = _serve("--state", str(state), "--listen", f"unix://{tmp_path}/other.sock")
    assert done.returncode == 1
    assert done.stderr == (
        f"kvstore: state: {state} is in use by another daemon (pid {daemon.pid})\n"
    )
    assert done.stdout == ""
    assert sorted(p.name for p in state.iterdir()) == before
    with Client(daemon.address) as client:
        assert client.hello().boot_id


def test_what_dead_daemons_left_goes_and_what_lives_stays(start_daemon: Any) -> None:
    other = start_daemon(name="other")
    daemon = start_daemon(name="mine")
    with Client(daemon.address) as client:
        assert client.open_space(spec_of()).put(chain_keys(TOKENS, 4), bytes_of(TOKENS)) == 16
    daemon.kill()
    [left] = daemon._pools
    assert list(left.glob("slab-*"))
    daemon.start()
    assert not left.exists()
    assert len([pool for pool in daemon._pools if pool.exists()]) == 1
    assert all(pool.exists() for pool in other._pools)


@pytest.fixture
def locked(daemon_with_disk: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Somebody has LMDB's only write lock: a tool that looks at the index, and got stuck."""
    index = daemon_with_disk.directory / "s" / "index.mdb"
    holder = subprocess.Popen(
        [sys.executable, "-c", _LOCKED, str(index)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    yield holder
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()


@pytest.fixture
def daemon_with_disk(start_daemon: Any, tmp_path: Path) -> Any:
    return start_daemon("--disk", str(tmp_path / "disk"), "--disk-capacity", "64MiB")


def test_an_index_that_somebody_locked_costs_the_disk_s_writes_only(
    daemon_with_disk: Any, request: pytest.FixtureRequest, until: Until
) -> None:
    daemon = daemon_with_disk
    with Client(daemon.address) as client:
        space = client.open_space(spec_of())
        assert space.put(chain_keys(TOKENS, 4), bytes_of(TOKENS)) == 16
        assert client.flush(60).done
        assert space.evict(chain_keys(TOKENS, 4), "host").copies == 16
        holder: subprocess.Popen[bytes] = request.getfixturevalue("locked")
        # What is there is served, from disk too; what comes is kept in memory.
        assert np.array_equal(space.get(chain_keys(TOKENS, 4), timeout_s=30), bytes_of(TOKENS))
        assert space.put(chain_keys(MORE, 4), bytes_of(MORE)) == 16
        assert not client.flush(0.5).done
        assert np.array_equal(space.get(chain_keys(MORE, 4)), bytes_of(MORE))
        assert client.stats().tiers[0].dirty_blocks > 0
        holder.kill()
        assert client.flush(60).done
        until(lambda: client.stats().tiers[0].dirty_blocks == 0, 60)


def _namespaces() -> str:
    """Return why a mount in a namespace of our own is not possible here; empty: it is."""
    if shutil.which("unshare") is None:
        return "no unshare"
    script = "mount -t tmpfs -o size=4m none /dev/shm"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stderr.strip() or "it fails" if done.returncode else ""


def test_shared_memory_smaller_than_the_pool_is_refused_in_one_line(tmp_path: Path) -> None:
    """A container's /dev/shm has 64 MiB unless somebody says otherwise."""
    if why := _namespaces():
        pytest.skip(f"no small /dev/shm can be mounted here: {why}")
    done = _serve(
        *("--state", str(tmp_path / "s"), "--listen", f"unix://{tmp_path}/k"),
        *("--host-pool", "128MiB"),
        shell="mount -t tmpfs -o size=64m none /dev/shm",
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("kvstore: host pool of 128 MiB")
    assert done.stderr.count("\n") == 1
    assert not list(Path("/dev/shm").glob(f"*{os.getpid()}*"))


def test_a_memory_cgroup_smaller_than_the_pool_is_refused_in_one_line(tmp_path: Path) -> None:
    group = _cgroup(32 << 20 << 3)
    if isinstance(group, str):
        pytest.skip(f"no memory control group can be made here: {group}")
    try:
        command = [
            *("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"),
            *(sys.executable, "-m", "kvstore", "serve", "--state", str(tmp_path / "s")),
            *("--listen", f"unix://{tmp_path}/k", "--host-pool", "1GiB"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("kvstore: host pool of 1 GiB")
        assert done.stderr.count("\n") == 1
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def _cgroup(limit_bytes: int) -> Path | str:
    """Make a memory control group of either version; return it, or why that is not possible."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    parent = Path("/sys/fs/cgroup") if unified else Path("/sys/fs/cgroup/memory")
    group = parent / f"kvstore-test-{os.getpid()}"
    limit = "memory.max" if unified else "memory.limit_in_bytes"
    if not parent.is_dir():
        return f"no {parent}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        return str(error)
    return group
