"""The GPU tier keeps the contract of `Tier`: on simulated devices, and on a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.base import Slot, Tier
from kvstore.tiers.gpu import GpuTier
from kvstore.tiers.gpu_device import GpuDevice
from kvstore.tiers.simulated_device import SimulatedDevice
from kvstore.tiers.testing import TierConformance


class TestGpuTierOnASimulatedDevice(TierConformance):
    count = 1

    def devices(self) -> list[GpuDevice]:
        return [SimulatedDevice(n) for n in range(self.count)]

    def make(self, directory: Path, capacity_bytes: int) -> Tier:
        each = capacity_bytes // self.count
        return GpuTier(directory, self.devices(), each, min_slab_bytes=4096)

    def corrupt(self, tier: Any, slot: Slot, shard: int, offset: int) -> None:
        device = tier.devices[shard % len(tier.devices)]
        place = np.array([tier.addresses(slot)[shard] + offset], np.uint64)
        byte = np.zeros(1, np.uint8)
        here = np.array([byte.ctypes.data], np.uint64)
        one = np.ones(1, np.uint64)
        device.copy(here, place, one)
        byte[0] ^= 1
        device.copy(place, here, one)


class TestGpuTierOnTwoSimulatedDevices(TestGpuTierOnASimulatedDevice):
    count = 2


@pytest.mark.gpu
class TestGpuTierOnARealDevice(TestGpuTierOnASimulatedDevice):
    def devices(self) -> list[GpuDevice]:
        from kvstore.tiers.cuda_device import cuda_devices

        try:
            return [*cuda_devices(["0"])]
        except ConfigError as error:
            pytest.skip(str(error))
