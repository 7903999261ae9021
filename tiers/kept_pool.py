"""Slab groups that an earlier daemon left, mapped again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore.tiers.pool_directory import slab_path
from kvstore.tiers.slab import KeptGroup, Slab, SlabGroup
from kvstore.tiers.slots import GroupSlots

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["kept_group", "map_group", "taken_bytes"]

_log = logging.getLogger(__name__)

_STAT_BLOCK_BYTES = 512


def taken_bytes(directory: Path) -> int:
    """Return the memory that the files of a pool take."""
    return sum(path.lstat().st_blocks * _STAT_BLOCK_BYTES for path in directory.iterdir())


def kept_group(group: GroupSlots[SlabGroup, Slab]) -> KeptGroup:
    """Return what the next daemon needs to know of a group."""
    info = group.info
    lengths = tuple(slab.length for slab in info.slabs)
    return KeptGroup(info.group, info.shape, info.slots, lengths, group.generations())


def map_group(directory: Path, kept: KeptGroup) -> GroupSlots[SlabGroup, Slab] | None:
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
