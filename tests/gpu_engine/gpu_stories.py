"""What stories of the GPU pool are told with: a device that waits, and who lies where."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence

import numpy as np
from engine_world import World
from numpy.typing import NDArray

from kvstore.miss import MissReason
from kvstore.tiers.base import TierName
from kvstore.tiers.gpu_device import DeviceError
from kvstore.tiers.simulated_device import SimulatedDevice

MakeWorld = Callable[..., World]
GPU, HOST, DISK = TierName.GPU, TierName.HOST, TierName.DISK


class Obstinate(SimulatedDevice):
    """A device whose copies wait for the test, or fail."""

    def __init__(self, ordinal: int = 0) -> None:
        super().__init__(ordinal)
        self.gate = threading.Event()
        self.gate.set()
        self.copying = threading.Event()
        self.broken = False

    def copy(
        self,
        destinations: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
    ) -> None:
        self.copying.set()
        assert self.gate.wait(60)
        if self.broken:
            raise DeviceError(errno.EIO, "an uncorrectable error")
        super().copy(destinations, sources, lengths)


def on_gpu(world: World, keys: Sequence[bytes]) -> str:
    """Draw which blocks have a GPU copy."""
    blocks = [world.space.blocks.get(key) for key in keys]
    return "".join("-" if b is None or b.gpu is None else "g" for b in blocks)


async def bring_up(world: World, keys: Sequence[bytes]) -> tuple[int, MissReason]:
    """Prefetch to the GPU and wait for it."""
    blocks, done, miss = await world.engine.tickets.prefetch(
        world.space, keys, 77, 0, 0, 60, TierName.GPU
    )
    assert done
    return blocks, miss.reason
