"""The host tier keeps the contract of `Tier`, alone and behind its wrappers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kvstore.tiers.base import Slot, Tier
from kvstore.tiers.faulty import Faulty
from kvstore.tiers.host import HostTier
from kvstore.tiers.testing import TierConformance
from kvstore.tiers.throttled import Throttled


class TestHostTier(TierConformance):
    def make(self, directory: Path, capacity_bytes: int) -> Tier:
        self.pool = directory / "pool"
        return HostTier(self.pool, capacity_bytes, min_slab_bytes=4096)

    def corrupt(self, tier: Any, slot: Slot, shard: int, offset: int) -> None:
        # Around the tier, through the file: a page of generations, then the slots.
        with (self.pool / f"slab-{slot.group}-{shard}").open("r+b") as file:
            file.seek(4096 + slot.index * self.shape.slot_bytes + offset)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 0x01]))


class TestFaultyHostTierWithoutPlan(TestHostTier):
    def make(self, directory: Path, capacity_bytes: int) -> Tier:
        return Faulty(super().make(directory, capacity_bytes))


class TestThrottledHostTierWithoutLimit(TestHostTier):
    def make(self, directory: Path, capacity_bytes: int) -> Tier:
        return Throttled(super().make(directory, capacity_bytes), math.inf)
