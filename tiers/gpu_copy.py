"""Batches of copies between one device and host buffers, on the GPU tier's threads."""

from __future__ import annotations

from ctypes import addressof, c_char
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.base import Outcome, Transfer
from kvstore.tiers.digests import digest_shards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.tiers.gpu_device import GpuDevice

__all__ = ["DevicePieces", "move", "verify"]


class DevicePieces:
    """What of a batch is on one device.

    Attributes:
        device, host: addresses.
        lengths: bytes.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.device: list[int] = []
        self.host: list[int] = []
        self.lengths: list[int] = []

    def add(self, base: int, slot_bytes: int, shard: int, transfers: Sequence[Transfer]) -> None:
        """Add the counted bytes of one shard of some blocks; nothing is added for none.

        Args:
            base: device address of slot 0.
            slot_bytes: bytes of a slot.
            shard: which one.
            transfers: of blocks in slots of one slab.
        """
        counted = [t for t in transfers if t.lengths[shard]]
        self.device += [base + t.slot.index * slot_bytes for t in counted]
        self.host += [_address(t.buffers[shard]) for t in counted]
        self.lengths += [t.lengths[shard] for t in counted]


def _address(buffer: memoryview) -> int:
    try:
        return addressof(c_char.from_buffer(buffer))
    except TypeError:  # read-only: rare, and three times as slow
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
        return address


def move(device: GpuDevice, pieces: DevicePieces, to_pool: bool) -> None:
    """Copy; blocks until no byte is under way any more.

    Raises:
        DeviceError: some of the bytes are not there.
    """
    inside = np.array(pieces.device, np.uint64)
    outside = np.array(pieces.host, np.uint64)
    lengths = np.array(pieces.lengths, np.uint64)
    if to_pool:
        device.copy(inside, outside, lengths)
    else:
        device.copy(outside, inside, lengths)


def verify(transfers: Sequence[Transfer]) -> list[Outcome]:
    """Compare what was read with its digests."""
    return [
        Outcome.OK
        if t.digests is None or digest_shards(t.buffers, t.lengths) == tuple(t.digests)
        else Outcome.CORRUPT
        for t in transfers
    ]
