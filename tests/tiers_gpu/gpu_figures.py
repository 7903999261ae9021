"""Saying and keeping figures, and memory to copy from, for the measuring scripts beside this."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.memory import Mapping
from kvstore.tiers.gpu import GpuTier

__all__ = ["FAILED", "FIGURES", "Memory", "best", "check", "gpu_used", "say", "settles"]

FIGURES: dict[str, Any] = {}
FAILED: list[str] = []


def say(name: str, value: Any, unit: str = "") -> None:
    FIGURES[name] = value
    text = f"{value:10.2f}" if isinstance(value, float) else str(value)
    print(f"{name:58s} {text} {unit}", flush=True)


def check(name: str, *, right: bool) -> None:
    FIGURES[name] = right
    print(f"{'ok  ' if right else 'FAIL'} {name}", flush=True)
    if not right:
        FAILED.append(name)


def gpu_used() -> int:
    """MiB of device memory in use, by everybody."""
    text = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return int(text.splitlines()[0])


def settles(what: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


class Memory:
    """Pinned host memory in shared memory, as slabs are."""

    def __init__(self, length: int, gpu: GpuTier) -> None:
        fd = os.memfd_create("measure")
        os.ftruncate(fd, length)
        self.mapping = Mapping(fd, length)
        self.mapping.populate(8)
        os.close(fd)
        begun = time.perf_counter()
        assert gpu.pin(self.mapping.address, length)
        self.pin_seconds = time.perf_counter() - begun
        self.gpu = gpu

    def close(self) -> None:
        self.gpu.unpin(self.mapping.address)
        self.mapping.close()


async def best(rounds: int, what: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(rounds):
        Path("/proc/sys/vm/drop_caches").write_text("1")
        begun = time.perf_counter()
        await what()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
