"""Copies between the pool and buffers of this process, on the tier's threads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvstore.memory import copy_batch
from kvstore.tiers.base import Outcome, Transfer
from kvstore.tiers.digests import digest_shards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.space import BlockShape

__all__ = ["check_fits", "copy_transfers", "undisturbed"]

_T = TypeVar("_T")


def check_fits(transfer: Transfer, shape: BlockShape) -> None:
    """Raise ValueError if a transfer does not fit slots of this shape."""
    if not len(transfer.buffers) == len(transfer.lengths) == shape.shards:
        raise ValueError(f"{len(transfer.buffers)} buffers for {shape.shards} shards")
    for buffer, length in zip(transfer.buffers, transfer.lengths, strict=True):
        if not 0 <= length <= min(shape.slot_bytes, buffer.nbytes):
            raise ValueError(
                f"{length} bytes do not fit: the slot has {shape.slot_bytes}, "
                f"the buffer {buffer.nbytes}"
            )


def _address(buffer: memoryview) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _verify(transfer: Transfer) -> Outcome:
    if transfer.digests is None:
        return Outcome.OK
    found = digest_shards(transfer.buffers, transfer.lengths)
    return Outcome.OK if found == tuple(transfer.digests) else Outcome.CORRUPT


def copy_transfers(
    inside: Sequence[int], transfers: Sequence[Transfer], to_pool: bool
) -> list[Outcome]:
    """Copy the counted bytes of each shard; check what was read. Blocks; any thread.

    Args:
        inside: addresses in the pool, one per transfer and shard.
        transfers: what `check_fits` has accepted; digests are of the buffers after a read, so
            that a fault of the copy itself is found, too.
        to_pool: write, instead of read.
    """
    pool = np.array(inside, np.uint64)
    buffers = np.array([_address(b) for t in transfers for b in t.buffers], np.uint64)
    lengths = np.array([n for t in transfers for n in t.lengths], np.uint64)
    destinations, sources = (pool, buffers) if to_pool else (buffers, pool)
    copy_batch(destinations, sources, lengths)
    if to_pool:
        return [Outcome.OK] * len(transfers)
    return [_verify(transfer) for transfer in transfers]


async def undisturbed(future: asyncio.Future[_T]) -> _T:
    """Wait for the future to the end, then raise CancelledError if the caller was cancelled."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        future.exception()  # retrieved: the caller does not want to know
        raise asyncio.CancelledError
    return future.result()
