"""`kvstore doctor`: against a real daemon, without one, and with one that has a dead disk."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import kvstore
from kvstore.config import load_config
from kvstore.doctor import examination
from kvstore.engine import Engine
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.doctor import Doctor
from kvstore.units import MIB


def run(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore", "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "COLUMNS": str(columns)},
    )


def seen(*arguments: str, code: int = 0) -> dict[str, Any]:
    """Run it for its JSON; return that, with the findings by subject."""
    done = run(*arguments, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    levels = [finding["level"] for finding in result["findings"]]
    assert (levels.count("error"), levels.count("warning")) == (
        result["errors"],
        result["warnings"],
    )
    assert bool(code) == bool(result["errors"])
    found = {finding["subject"]: finding for finding in result["findings"]}
    assert len(found) == len(levels)
    return {**result, "findings": found}


def test_daemon_looks_with_its_own_settings(
    start_daemon: Callable[..., Any], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    daemon = start_daemon("--disk", str(disk), "--disk-capacity", "64MiB", "--io-threads", "3")
    result = seen("--address", daemon.address)
    assert result["daemon"] == daemon.address
    found = result["findings"]
    assert found["host tier"]["text"] == "works"
    assert found["disk tier"]["text"].startswith("works, posix")
    assert found["state directory"]["text"].startswith(str(daemon.directory / "s"))
    assert found["disk directory"]["text"].startswith(str(disk))
    assert found["disk space"]["text"].startswith("capacity 64 MiB")
    assert "pool of 128 MiB" in found["shared memory"]["text"]
    assert "3 I/O threads" in found["processors"]["text"]
    # Its own pool is in use, and nobody's leftover.
    (pool,) = Path("/dev/shm").glob(f"{_prefix(daemon)}*")
    assert str(pool) not in json.dumps(result)

    shown = run("--address", daemon.address)
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"as seen by the daemon at {daemon.address}:")
    for line in shown.stdout.splitlines()[1:]:
        assert len(line) <= 80
    for subject in found:
        assert f" {subject} " in shown.stdout
    assert "no errors, " in shown.stdout.splitlines()[-1]

    # What the daemon has taken is not asked for a second time by who looks from outside.
    with kvstore.Client(daemon.address) as client:
        spec = kvstore.SpaceSpec(model="m", dtype="f", block_tokens=1, shard_bytes=(65536,))
        keys = kvstore.chain_keys([1], 1)
        assert client.open_space(spec).put(keys, np.zeros((1, 65536), np.uint8)) == 1
    outside = seen("--state", str(daemon.directory / "s"), "--host-pool", "128MiB")
    assert outside["daemon"] is None
    assert outside["findings"]["memory"]["text"].endswith("the pool wants 112 MiB more")


def _prefix(daemon: Any) -> str:
    from kvstore.doctor.pools import pool_prefix

    return pool_prefix(daemon.directory / "s", os.geteuid())


def test_killed_daemon_leaves_a_pool(daemon: Any, tmp_path: Path) -> None:
    """Not a leftover to whoever looks for its own state: its next start removes it."""
    from kvstore.doctor.pools import find_pools

    def pools() -> list[bool]:
        return [pool.used for pool in find_pools() if pool.path.name.startswith(_prefix(daemon))]

    assert pools() == [True]
    daemon.kill()
    assert pools() == [False]
    daemon.start()
    assert pools() == [True]
    assert daemon.stop() == 0
    assert pools() == []


def test_before_the_first_start(tmp_path: Path) -> None:
    """Nothing is made, and what cannot work is an error with an exit code."""
    state, disk = tmp_path / "state", tmp_path / "disk"
    settings = tmp_path / "kvstore.toml"
    settings.write_text(f'state = "{state}"\nhost-pool = "32MiB"\n')
    result = seen("--offline", "--config", str(settings))
    assert result["daemon"] is None
    assert "not there yet" in result["findings"]["state directory"]["text"]
    assert "no disk tier" in result["findings"]["disk directory"]["text"]
    assert "pool of 32 MiB" in result["findings"]["shared memory"]["text"]

    state.touch()
    flags = ("--config", str(settings), "--disk", str(disk), "--disk-capacity", "1000TiB")
    found = seen(*flags, "--host-pool", "1000TiB", code=1)["findings"]
    levels = {subject: finding["level"] for subject, finding in found.items()}
    for subject in ("state directory", "disk space", "shared memory", "memory"):
        assert levels[subject] == "error", subject
        assert found[subject]["advice"]
    shown = run(*flags, "--host-pool", "1000TiB", columns=60)
    assert shown.returncode == 1
    assert "as seen by this process:" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert not disk.exists()


def test_no_daemon_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first start that is as it should be; where one was named, it is not."""
    address = f"unix://{tmp_path}/nobody.sock"
    monkeypatch.setenv("KVSTORE_ADDRESS", address)
    for named, level in (((), "warning"), (("--address", address), "error")):
        found = seen(*named, code=int(level == "error"))["findings"]
        assert found["daemon"]["level"] == level
        assert found["daemon"]["text"] == f"none at {address}"
        assert found["shared memory"]["text"]


def test_stopped_daemon_is_not_a_missing_one(daemon: Any) -> None:
    daemon.signal(signal.SIGSTOP)
    try:
        for address in (daemon.address, daemon.tcp):
            result = seen("--address", address, code=1)
            assert result["daemon"] is None
            assert result["findings"]["daemon"]["level"] == "error"
            assert "listens, but does not answer" in result["findings"]["daemon"]["text"]
            assert result["findings"]["memory"]["text"]
    finally:
        daemon.signal(signal.SIGCONT)
    assert seen("--address", daemon.address)["daemon"] == daemon.address


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--host-pool", "much"), "kvstore: host_pool: 'much' is not a size"),
        (("--disk-capacity", "1GiB"), "kvstore: disk_capacity: needs disk"),
        (("--config", "/nowhere"), "kvstore: config: /nowhere: No such file"),
        (("--offline", "--address", "unix:///x"), "kvstore: address: not together with"),
    ],
)
def test_bad_settings_are_one_line(arguments: tuple[str, ...], line: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_too_little_memory_for_any_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic size is impossible: that is a finding, and the rest is examined."""
    from kvstore import config
    from kvstore.cli import doctor
    from kvstore.errors import ConfigError

    def impossible() -> int:
        raise ConfigError("host_pool: auto finds too little memory (1 MiB available)")

    field = config.ServeConfig.model_fields["host_pool"]
    monkeypatch.setattr(field, "default_factory", impossible)
    config.ServeConfig.model_rebuild(force=True)
    try:
        settings, (found,) = doctor._settings({}, None)
    finally:
        monkeypatch.undo()
        config.ServeConfig.model_rebuild(force=True)
    assert settings.host_pool == 16 * MIB
    assert found["level"] == "error"
    assert "1 MiB available" in found["text"]


class _Engine:
    """What the doctor asks an engine."""

    def __init__(self, disk_state: str = "ok") -> None:
        usage = SimpleNamespace(capacity_bytes=16 * MIB)
        self.reservations = SimpleNamespace(closed=False)
        self.host = SimpleNamespace(state="ok", usage=lambda: usage)
        self.disk_state = disk_state
        self.disk = SimpleNamespace(io_engine="posix", usage=lambda: usage)
        self.gpu = self.gpu_reader = None


def _doctor(tmp_path: Path, wait_seconds: float = 30.0, disk_state: str = "ok") -> Doctor:
    flags = {"state": tmp_path / "state", "host_pool": "16MiB", "disk": tmp_path / "disk"}
    settings = load_config(flags)
    return Doctor(settings, cast("Engine", _Engine(disk_state)), wait_seconds)


def _by_subject(answer: pb.DoctorResponse) -> dict[str, pb.DoctorFinding]:
    return {finding.subject: finding for finding in answer.findings}


def test_degraded_tier_is_an_error(tmp_path: Path) -> None:
    doctor = _doctor(tmp_path, disk_state="degraded: write failed: Input/output error")
    found = _by_subject(asyncio.run(doctor.examine()))
    assert (found["host tier"].level, found["disk tier"].level) == ("ok", "error")
    assert found["disk tier"].text == "degraded: write failed: Input/output error"


def test_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer names it in time, the loop runs on, nobody starts a second look beside it."""
    hangs, goes_on = threading.Event(), threading.Event()
    looks: list[Path] = []

    def hang(directory: Path) -> int:
        looks.append(directory)
        hangs.set()
        goes_on.wait()
        return 512

    monkeypatch.setattr(examination, "direct_alignment", hang)
    doctor = _doctor(tmp_path, wait_seconds=0.2)

    async def scenario() -> None:
        first, second = await asyncio.gather(doctor.examine(), doctor.examine())
        assert hangs.is_set()
        for answer in (first, second):
            last = answer.findings[-1]
            assert (last.subject, last.level) == ("disk direct I/O", "error")
            assert "no answer within 0.2 s" in last.text
            assert "disk mount" in _by_subject(answer)
        goes_on.set()
        doctor._wait_seconds = 30.0
        done = await doctor.examine()
        assert _by_subject(done)["disk direct I/O"].level == "ok"
        assert len(looks) == 1
        assert _by_subject(await doctor.examine())["clock"].text
        assert len(looks) == 2

    try:
        asyncio.run(scenario())
    finally:
        goes_on.set()


def test_check_with_a_bug_does_not_take_the_daemon_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Path) -> int:
        raise KeyError("oops")

    monkeypatch.setattr(examination, "direct_alignment", broken)
    found = _by_subject(asyncio.run(_doctor(tmp_path).examine()))
    assert found["disk direct I/O"].level == "error"
    assert "oops" in found["disk direct I/O"].text
