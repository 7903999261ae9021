"""What is saved of the host tier, and how it is taken in again; `host_index` has the protocol."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvstore.engine.host_index import BusySlot, HostIndex, SavedBlock, SavedSpace

if TYPE_CHECKING:
    from kvstore.engine.grants import Grants
    from kvstore.engine.quarantine import Quarantine
    from kvstore.index import Block, BlockIndex, SpaceIndex
    from kvstore.tiers.control import ControlFile
    from kvstore.tiers.host import HostTier

__all__ = ["Adopted", "adopt", "fitting", "snapshot"]

log = logging.getLogger(__name__)

# Ids that may still be handed out between saving and the daemon's end.
_IDS_AHEAD: Final = 1 << 16


@dataclass(slots=True)
class Adopted:
    """What came back.

    Attributes:
        blocks: their host copies, unchecked, parents before children.
        dropped: how many did not: outdated, without a parent, or without their slab.
        busy: slots that somebody may be writing to, with their blocks' bytes.
    """

    blocks: list[Block] = field(default_factory=list)
    dropped: int = 0
    busy: list[tuple[BusySlot, int]] = field(default_factory=list)


def snapshot(
    index: BlockIndex,
    host: HostTier,
    grants: Grants,
    quarantine: Quarantine,
    control: ControlFile,
    machine: str,
) -> HostIndex:
    """Return what the next daemon needs to know. Nothing takes a slot any more."""
    groups = host.kept_groups()
    numbers = {group.group for group in groups}
    spaces = []
    for space in index.spaces.values():
        blocks = [
            SavedBlock(
                b.key, None if b.parent is None else b.parent.key, b.host, b.sequence, b.digests
            )
            # Parents enter the index before their children, and leave it after them.
            for b in space.blocks.values()
            if b.host is not None and b.digests is not None and b.host.group in numbers
        ]
        if blocks:
            spaces.append(
                SavedSpace(space.id, space.epoch, space.spec.key_bytes, space.shape.shards, blocks)
            )
    busy = [*grants.busy(), *quarantine.busy()]
    return HostIndex(
        machine=machine,
        pool=host.directory,
        control_inode=control.inode,
        last_attachment=control.last_id + _IDS_AHEAD,
        last_group=host.last_group,
        groups=groups,
        spaces=spaces,
        busy=[b for b in busy if b.slot.group in numbers],
    )


def fitting(saved: HostIndex, capacity_bytes: int) -> HostIndex:
    """Leave out the coldest slab groups until the others fit a pool that became smaller."""
    size = sum(group.capacity_bytes for group in saved.groups)
    if size <= capacity_bytes:
        return saved
    hottest = {group.group: -1 for group in saved.groups}
    for space in saved.spaces:
        for block in space.blocks:
            number = block.slot.group
            hottest[number] = max(block.sequence, hottest.get(number, -1))
    left = sorted(saved.groups, key=lambda g: hottest[g.group], reverse=True)
    while left and size > capacity_bytes:
        size -= left.pop().capacity_bytes
    log.warning(
        "the host pool became smaller: %d of %d slab groups are left out",
        len(saved.groups) - len(left),
        len(saved.groups),
    )
    return replace(saved, groups=left)


def adopt(index: BlockIndex, host: HostTier, saved: HostIndex) -> Adopted:
    """Take in the blocks whose slabs the tier has mapped. The disk's blocks are in the index."""
    adopted = Adopted()
    shapes = {group.group: group.shape for group in host.groups()}
    # First of all: whatever else is said of these slots, somebody may be writing to them.
    for slot in saved.busy:
        shape = shapes.get(slot.slot.group)
        if shape is not None and host.claim(slot.slot, shape):
            adopted.busy.append((slot, shape.block_bytes))
    for kept in saved.spaces:
        space = index.spaces.get(kept.space_id)
        if (
            space is None
            or (space.epoch, space.spec.key_bytes) != (kept.epoch, kept.key_bytes)
            or space.shape.shards != kept.shards
        ):
            adopted.dropped += len(kept.blocks)
            continue
        for block in kept.blocks:
            taken = _adopt_one(index, host, space, block)
            if taken is None:
                adopted.dropped += 1
            else:
                adopted.blocks.append(taken)
    host.claimed()
    index.adopted()
    return adopted


def _adopt_one(
    index: BlockIndex, host: HostTier, space: SpaceIndex, saved: SavedBlock
) -> Block | None:
    parent = None if saved.parent is None else space.blocks.get(saved.parent)
    if saved.parent is not None and parent is None:
        return None
    there = space.blocks.get(saved.key)
    if there is not None and (
        there.host is not None or there.parent is not parent or there.digests != saved.digests
    ):
        return None
    if not host.claim(saved.slot, space.shape):
        return None
    return index.adopt_host(space, saved.key, parent, saved.slot, saved.digests, saved.sequence)
