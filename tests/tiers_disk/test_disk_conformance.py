"""The disk tier and its wrappers keep the contract of `Tier`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kvstore.tiers.base import Slot, Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.faulty import Faulty
from kvstore.tiers.posix_engine import PosixEngine
from kvstore.tiers.testing import PersistentTierConformance
from kvstore.tiers.throttled import Throttled


class TestDiskTier(PersistentTierConformance):
    def make(self, directory: Path, capacity_bytes: int) -> Tier:
        self.directory = directory
        return DiskTier(directory, capacity_bytes)

    def corrupt(self, tier: Any, slot: Slot, shard: int, offset: int) -> None:
        # The layout is written out here: the format must not drift with the code.
        block = self.shape.slot_bytes * self.shape.shards
        position = 4096 + slot.index * block + shard * self.shape.slot_bytes + offset
        with (self.directory / f"seg-{slot.group:06d}.kvs").open("r+b") as file:
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 0x01]))


class TestFaultyWithoutPlan(TestDiskTier):
    def make(self, directory: Path, capacity_bytes: int) -> Tier:
        return Faulty(super().make(directory, capacity_bytes))


class TestThrottledWithoutLimit(TestDiskTier):
    def make(self, directory: Path, capacity_bytes: int) -> Tier:
        return Throttled(super().make(directory, capacity_bytes), math.inf)


class TestOneThreadAndTinyRuns(TestDiskTier):
    def make(self, directory: Path, capacity_bytes: int) -> Tier:
        self.directory = directory
        engine = PosixEngine(1, max_run_bytes=4096)
        return DiskTier(directory, capacity_bytes, engine=engine)
