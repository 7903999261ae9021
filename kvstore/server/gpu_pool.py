"""The GPU tier as it is configured. CUDA is loaded only when there is to be one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from kvstore.errors import ConfigError
from kvstore.tiers.gpu import GpuTier
from kvstore.tiers.gpu_reader import GpuReader
from kvstore.tiers.kvikio_engine import KvikioEngine
from kvstore.tiers.simulated_device import SimulatedDevice

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.config import ServeConfig
    from kvstore.tiers.disk import DiskTier
    from kvstore.tiers.gpu_device import GpuDevice

__all__ = ["gpu_reader", "gpu_tier"]

_SIMULATED: Final = "simulated:"


def gpu_tier(config: ServeConfig, pool: Path) -> GpuTier | None:
    """Return the GPU tier, not open yet; None without one.

    Args:
        config: the settings.
        pool: directory of the host pool.

    Raises:
        ConfigError: CUDA does not work, or there is no such device; one line says why.
    """
    if not config.gpu_pool:
        return None
    return GpuTier(pool, _devices(config.gpu_devices), config.gpu_pool)


def gpu_reader(config: ServeConfig, disk: DiskTier | None, gpu: GpuTier | None) -> GpuReader | None:
    """Return what reads from disk to the GPU past host memory; None when nothing is to."""
    if gpu is None or disk is None or config.gpu_io == "host" or _simulated(config.gpu_devices):
        return None
    if config.gpu_io == "auto" and find_spec("kvikio") is None:
        return None
    return GpuReader(disk, gpu, KvikioEngine())


def _simulated(chosen: Sequence[str]) -> bool:
    return len(chosen) == 1 and chosen[0].startswith(_SIMULATED)


def _devices(chosen: Sequence[str]) -> Sequence[GpuDevice]:
    if _simulated(chosen):
        count = chosen[0].removeprefix(_SIMULATED)
        if not count.isdecimal() or not 1 <= int(count) <= 64:
            raise ConfigError(f"gpu_devices: {chosen[0]}: give a number within 1 … 64")
        return [SimulatedDevice(n) for n in range(int(count))]
    from kvstore.tiers.cuda_device import cuda_devices

    return cuda_devices(chosen)
