"""One picture a second of a daemon: what it takes, what it holds, how fast it answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore import Client
from kvstore.proto import kvstore_pb2 as pb

__all__ = ["Sample", "Sampler", "memory_of"]

_MIB = 1 << 20
_PULSE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """One second.

    Attributes:
        seconds: since the start.
        rss_mib: memory of the daemon's own: anonymous, without the pool.
        shared_mib: of the pool's pages, those that the daemon has mapped.
        pss_mib: its share of everything, as the kernel counts it.
        descriptors: open files of the daemon.
        threads: of the daemon.
        leases, grants: held by clients.
        stuck_slots: granted to clients that are silent or presumed dead.
        host_mib, disk_mib: in slots that are used.
        put_mib_s, got_mib_s: moved by clients in this second.
        health_ms: slowest health check of this second.
    """

    seconds: float
    rss_mib: float
    shared_mib: float
    pss_mib: float
    descriptors: int
    threads: int
    leases: int
    grants: int
    stuck_slots: int
    host_mib: float
    disk_mib: float
    put_mib_s: float
    got_mib_s: float
    health_ms: float

    @classmethod
    def names(cls) -> list[str]:
        """Return the columns."""
        return [field.name for field in fields(cls)]


def _kib(path: Path, *names: str) -> list[int]:
    """Return fields of a file of the kernel's, in KiB."""
    found = dict.fromkeys(names, 0)
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0])
    return list(found.values())


def memory_of(pid: int) -> tuple[float, float, float]:
    """Return a process's anonymous, shared and proportional memory, in MiB."""
    proc = Path(f"/proc/{pid}")
    anonymous, shared = _kib(proc / "status", "RssAnon", "RssShmem")
    [pss] = _kib(proc / "smaps_rollup", "Pss")
    return anonymous / 1024, shared / 1024, pss / 1024


class Sampler:
    """Takes a sample a second, and asks for the daemon's health all the time.

    Attributes:
        samples: so far.
    """

    def __init__(self, pid: int, address: str, moved: Callable[[], tuple[int, int]]) -> None:
        """Connect.

        Args:
            pid: of the daemon.
            address: of its Unix socket.
            moved: returns the bytes put and got by all clients so far.
        """
        self._pid = pid
        self._moved = moved
        self._client = Client(address, name="soak sampler", timeout_s=60.0)
        self._channel = grpc.insecure_channel(
            address.replace("unix://", "unix:"), [("grpc.use_local_subchannel_pool", 1)]
        )
        self._over = threading.Event()
        self._slowest = 0.0
        self._pulse = threading.Thread(target=self._check_health, daemon=True)
        self.samples: list[Sample] = []

    def start(self) -> None:
        """Begin to ask for the daemon's health."""
        self._pulse.start()

    def stats(self) -> pb.StatsResponse:
        """Return the daemon's picture of itself."""
        return self._client.stats()

    def run(self, seconds: float, each_second: Callable[[float], None]) -> None:
        """Sample for so long; `each_second` gets the seconds since the start."""
        begun = last = time.monotonic()
        before = self._moved()
        while last - begun < seconds:
            time.sleep(max(0.0, begun + len(self.samples) + 1 - time.monotonic()))
            now, moved = time.monotonic(), self._moved()
            put, got = ((m - b) / _MIB / (now - last) for m, b in zip(moved, before, strict=True))
            self.samples.append(self._sample(now - begun, put, got))
            last, before = now, moved
            each_second(now - begun)

    def _sample(self, seconds: float, put: float, got: float) -> Sample:
        stats = self.stats()
        used = {tier.tier: tier.used_bytes / _MIB for tier in stats.tiers}
        anonymous, shared, pss = memory_of(self._pid)
        proc = Path(f"/proc/{self._pid}")
        slowest, self._slowest = self._slowest, 0.0
        return Sample(
            seconds=seconds,
            rss_mib=anonymous,
            shared_mib=shared,
            pss_mib=pss,
            descriptors=len(list((proc / "fd").iterdir())),
            threads=len(list((proc / "task").iterdir())),
            leases=stats.leases,
            grants=stats.grants,
            stuck_slots=stats.stuck_slots,
            host_mib=used.get(pb.TIER_HOST, 0.0),
            disk_mib=used.get(pb.TIER_DISK, 0.0),
            put_mib_s=put,
            got_mib_s=got,
            health_ms=slowest * 1e3,
        )

    def _check_health(self) -> None:
        stub = health_pb2_grpc.HealthStub(self._channel)
        while not self._over.wait(_PULSE_SECONDS):
            begun = time.perf_counter()
            stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            self._slowest = max(self._slowest, time.perf_counter() - begun)

    def close(self) -> None:
        """Ask no more."""
        self._over.set()
        self._pulse.join()
        self._channel.close()
        self._client.close()
