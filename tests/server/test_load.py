"""Sixty-four clients at once, killed and stopped as they go: not one wrong byte, nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_calls import MIB, Raw, chain

PROCESSES, CLIENTS = 16, 4
ASKED = "KVSTORE_TEST_LOAD_SECONDS" in os.environ
SECONDS = float(os.environ.get("KVSTORE_TEST_LOAD_SECONDS", "12"))
# What a daemon is held to when it is asked for by name: on a machine that others load as well,
# what is measured is not the daemon alone. `docs/reliability.md` has the figures.
MEASURED = "KVSTORE_TEST_LOAD_SECONDS" in os.environ
WORST_HEALTH_SECONDS = 1.0 if MEASURED else 30.0
WORST_SLICE_SECONDS = 0.05 if MEASURED else 10.0


class Pulse(threading.Thread):
    """Asks for the daemon's health every 10 ms, on a connection of its own."""

    def __init__(self, raw: Raw) -> None:
        super().__init__(daemon=True)
        self._raw = raw.again()
        self._stub = health_pb2_grpc.HealthStub(self._raw.channel)
        self._over = threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        while not self._over.wait(0.01):
            begun = time.perf_counter()
            self._stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            self.seconds.append(time.perf_counter() - begun)

    def end(self) -> float:
        """Stop; return the longest answer, in seconds."""
        self._over.set()
        self.join()
        self._raw.close()
        return max(self.seconds)


def _resident_mib(pid: int) -> float:
    """Return a process's own memory: the pool is shared memory and does not count."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon")


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.slow
def test_64_clients_killed_and_stopped_get_no_wrong_byte_and_leave_nothing(
    raw: Callable[..., Raw], tmp_path: Path, until: Callable[..., None]
) -> None:
    disk = ("--disk", str(tmp_path / "disk"), "--disk-capacity", "96MiB")
    server = raw("--host-pool", "64MiB", "--lease-ttl", "1s", "--heartbeat", "0.3s", *disk)
    descriptors = _descriptors(server.daemon.pid)
    pulse = Pulse(server)
    pulse.start()
    worker = Path(__file__).with_name("load_worker.py")
    command = [sys.executable, str(worker), server.daemon.address]
    command += [str(PROCESSES), str(CLIENTS), str(SECONDS), "7"]
    repository = Path(__file__).parents[2]
    crowd = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS + 60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )
    found = json.loads(crowd.stdout)
    until(lambda: not server.stats().clients)
    worst = pulse.end()
    slices = {t.name: t for t in server.stats().timings if t.name.startswith("loop_slice")}
    print(found, f"worst health {worst:.3f} s of {len(pulse.seconds)}")
    for name, timing in slices.items():
        quantiles = (timing.p50_seconds, timing.p99_seconds, timing.max_seconds)
        print(name, timing.count, *(f"{seconds * 1e3:.2f} ms" for seconds in quantiles))
    print(f"{_resident_mib(server.daemon.pid):.0f} MiB of its own memory")
    assert found["wrong"] == 0
    assert found["bugs"] == 0
    assert found["checked"] > 0
    assert found["stored"] > 0
    # Times are judged where somebody asks for them: another machine has others.
    if ASKED:
        assert worst < WORST_HEALTH_SECONDS
        assert slices["loop_slice_cpu"].max_seconds < WORST_SLICE_SECONDS

    stats = server.stats()
    assert (stats.leases, stats.grants, stats.granted_slots) == (0, 0, 0)
    assert (stats.stuck_slots, stats.stuck_bytes) == (0, 0)
    log = server.daemon.log.read_text()
    assert "Traceback" not in log
    assert " ERROR " not in log
    assert _resident_mib(server.daemon.pid) < 300
    # The connections are gone; what stays is what the tiers took.
    until(lambda: _descriptors(server.daemon.pid) < descriptors + 40)
    # And the whole pool is to be had again.
    space = server.open("after", (MIB,))
    keys = chain("after", 32)
    until(lambda: server.put(space, keys, MIB) == 32)
