"""GPUs, their driver, and the libraries that a GPU tier would use."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from kvstore.doctor.finding import Finding, ok, warning

__all__ = ["Gpus", "check_gpus", "look_at_gpus"]

_DRIVER: Final = Path("/proc/driver/nvidia")
_STORAGE_DRIVER: Final = Path("/proc/driver/nvidia-fs")
_DEVICES: Final = Path("/dev")
_LIBRARIES: Final = {
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "kvikio": ("kvikio-cu13", "kvikio-cu12", "kvikio"),
}


@dataclass(frozen=True, slots=True)
class Gpus:
    """What was seen of NVIDIA's hardware and software.

    Attributes:
        count: GPUs that the driver names.
        devices: device files that this machine or container has.
        driver: version of the kernel's driver; empty: none is loaded.
        cuda: version that the driver's library supports; empty: no library.
        cupy: version; empty: not installed.
        kvikio: version; empty: not installed.
        storage: version of the GPUDirect Storage driver; empty: not loaded.
    """

    count: int = 0
    devices: int = 0
    driver: str = ""
    cuda: str = ""
    cupy: str = ""
    kvikio: str = ""
    storage: str = ""


def _version(path: Path, pattern: str) -> str:
    """Return the version that a file of the kernel names; empty without the file."""
    try:
        match = re.search(pattern, path.read_text("utf-8", "replace"))
    except OSError:
        return ""
    return match[1] if match else "of unknown version"


def _installed(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _cuda_version() -> str:
    """Ask the driver's library, which needs no context for it; empty without the library."""
    number = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return "" if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def look_at_gpus(
    driver: Path = _DRIVER, storage: Path = _STORAGE_DRIVER, devices: Path = _DEVICES
) -> Gpus:
    """Look for GPUs, without starting CUDA.

    Raises:
        OSError: a directory of the kernel cannot be listed.
    """
    version = _version(driver / "version", r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s")
    listed = driver / "gpus"
    return Gpus(
        count=len(list(listed.iterdir())) if listed.is_dir() else 0,
        devices=sum(
            re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.iterdir()
        ),
        driver=version,
        cuda=_cuda_version() if version else "",
        cupy=_installed(_LIBRARIES["cupy"]),
        kvikio=_installed(_LIBRARIES["kvikio"]),
        storage=_version(storage / "version", r"version: *(\S+)"),
    )


def check_gpus(seen: Gpus) -> Iterator[Finding]:
    """Judge them. Only the GPU tier needs one."""
    subject = "gpu"
    if not seen.driver and not seen.devices:
        yield ok(subject, "no NVIDIA driver, no GPU", "nothing to do: only --gpu-pool needs one")
    elif not seen.driver:
        yield warning(
            subject,
            f"{seen.devices} device files, but no NVIDIA driver is loaded",
            "load the driver (modprobe nvidia); see the kernel's log",
        )
    elif not seen.devices:
        yield warning(
            subject,
            f"driver {seen.driver}, {seen.count} GPUs, but no device file here: engines cannot "
            "reach them",
            "give the container its GPUs (--gpus all)",
        )
    else:
        plural = "s" * (seen.devices > 1)
        parts = [
            f"{seen.devices} GPU{plural}, driver {seen.driver}",
            f"CUDA {seen.cuda}" if seen.cuda else "no CUDA library",
            f"cupy {seen.cupy}" if seen.cupy else "no cupy",
            f"kvikio {seen.kvikio}" if seen.kvikio else "no kvikio",
            f"nvidia-fs {seen.storage}" if seen.storage else "no GPUDirect Storage driver",
        ]
        advice = "" if seen.cupy else "a GPU pool (--gpu-pool) needs CuPy: pip install cupy-cuda13x"
        yield ok(subject, ", ".join(parts), advice)
