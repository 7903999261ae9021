"""Making and discarding the slabs of a group. All of it blocks; on the host tier's builder thread."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from kvstore.tiers.pool_directory import slab_path
from kvstore.tiers.pool_limits import memory_room
from kvstore.tiers.slab import Slab

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.memory import Hurry
    from kvstore.space import BlockShape
    from kvstore.tiers.slab import Pinner

__all__ = ["discard_slabs", "make_slabs", "pin_slabs"]

_log = logging.getLogger(__name__)


def make_slabs(
    directory: Path,
    number: int,
    shape: BlockShape,
    slots: int,
    populate_threads: int,
    pinner: Pinner | None,
    hurry: Hurry,
) -> list[Slab]:
    """Create a group's slabs, all or none. Blocks for about 0.5 s per GiB; see `Slab.create`.

    Raises:
        OSError: there is no memory for them.
    """
    room = memory_room(directory)
    if slots * shape.block_bytes > room.bytes:
        # Asking for it all the same may call for the out-of-memory killer.
        raise OSError(errno.ENOSPC, room.describe())
    slabs: list[Slab] = []
    try:
        for shard in range(shape.shards):
            slabs.append(
                Slab.create(
                    slab_path(directory, number, shard),
                    slots=slots,
                    slot_bytes=shape.slot_bytes,
                    shard=shard,
                    populate_threads=populate_threads,
                    hurry=hurry,
                )
            )
    except BaseException:
        discard_slabs(slabs)
        raise
    if pinner is not None:
        pin_slabs(slabs, pinner)
    return slabs


def pin_slabs(slabs: Sequence[Slab], pinner: Pinner) -> None:
    """Lock slabs' memory for DMA, as far as that works: without it copies are slower, not wrong."""
    for slab in slabs:
        slab.pin(pinner)


def discard_slabs(slabs: Sequence[Slab]) -> None:
    """Unlink and unmap. Blocks for about 0.25 s per GiB."""
    for slab in slabs:
        slab.unlink()
        if not slab.close():
            _log.warning("%s is removed while its memory is still in use", slab.info.path.name)
