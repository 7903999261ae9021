"""Slab groups that an earlier daemon left, mapped again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore.tiers.pool_directory import slab_path
from kvstore.tiers.slab import Slab, SlabGroup
from kvstore.tiers.slots import GroupSlots

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.tiers.slab import KeptGroup

__all__ = ["map_group", "taken_bytes"]

_log = logging.getLogger(__name__)

_STAT_BLOCK_BYTES = 512


def taken_bytes(directory: Path) -> int:
    """Return the memory that the files of a pool take."""
    return sum(path.lstat().st_blocks * _STAT_BLOCK_BYTES for path in directory.iterdir())


def map_group(directory: Path, kept: KeptGroup) -> GroupSlots | None:
    """Map a group's slabs; None, with a line in the log, when they are not as they were.

    All slots are free then, at the generations that they had. Any thread.
    """
    slabs: list[Slab] = []
    try:
        for shard, length in enumerate(kept.lengths):
            slabs.append(
                Slab.adopt(
                    slab_path(directory, kept.group, shard),
                    slots=kept.slots,
                    slot_bytes=kept.shape.slot_bytes,
                    shard=shard,
                    length=length,
                )
            )
    except OSError as error:
        _log.warning("slab group %d is left out: %s", kept.group, error)
        for slab in slabs:
            slab.close()
        return None
    info = SlabGroup(kept.group, kept.shape, kept.slots, tuple(slab.info for slab in slabs))
    return GroupSlots(info, slabs, kept.generations)
