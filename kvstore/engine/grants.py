"""Grants: empty slots that some processes may fill.

A granted slot is settled when every shard's writer has committed it, aborted it, or is gone. Only
then does it become a block (all shards committed, parent present) or free again. Until then it
belongs to nobody else, however long that takes: a stopped process may have a copy in flight.

State per slot: which shards are still open, which are committed, and the key that the first
commit bound to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstore.engine.events import GrantRevokedEvent
from kvstore.engine.host_index import BusySlot
from kvstore.outcomes import CommitOutcome

if TYPE_CHECKING:
    from kvstore.engine.attachments import Attachment
    from kvstore.index import Block, BlockIndex, SpaceIndex
    from kvstore.tiers.base import Slot

__all__ = ["Grant", "GrantedSlot", "Grants", "OpenSlots"]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class GrantedSlot:
    """One slot of a grant.

    Attributes:
        open_shards: bit r is set while shard r's writer has neither committed nor aborted.
        failed: set when it will not become a block: what every later commit of it answers.
        key: bound by the first commit.
        parent: likewise; None starts a chain.
    """

    open_shards: int
    failed: CommitOutcome | None = None
    key: bytes | None = None
    parent: bytes | None = None


class OpenSlots(NamedTuple):
    """Slots that wait for a writer, and their bytes."""

    slots: int
    bytes: int


@dataclass(eq=False, slots=True)
class Grant:
    """Slots reserved in one call.

    Attributes:
        owner: attachment that reserved; 0 is the daemon itself.
        writers: attachment per shard.
        epoch: of the space, as the caller knew it; a bump voids the grant.
        slots: those that are not settled yet.
    """

    id: int
    owner: int
    space: SpaceIndex
    epoch: int
    writers: tuple[int, ...]
    slots: dict[Slot, GrantedSlot]


class Grants:
    """All grants that are not settled."""

    def __init__(
        self,
        index: BlockIndex,
        free: Callable[[Slot], None],
        on_block: Callable[[Block], None],
    ) -> None:
        """Compose.

        Args:
            index: gets the blocks.
            free: gets the slots that did not become blocks.
            on_block: told about every new host copy.
        """
        self._index = index
        self._free = free
        self._on_block = on_block
        # Told about the blocks of each commit together, in chain order.
        self.on_run: Callable[[Sequence[Block]], None] | None = None
        # Owners and writers of unsettled grants; entries leave with `gone`.
        self._attachments: dict[int, Attachment] = {}
        self._grants: dict[tuple[int, int], Grant] = {}
        self.slot_count = 0

    def __len__(self) -> int:
        """Return the number of grants."""
        return len(self._grants)

    def find(self, owner: int, grant_id: int) -> Grant | None:
        """Return a grant that is not settled."""
        return self._grants.get((owner, grant_id))

    def add(
        self,
        grant_id: int,
        owner: int,
        space: SpaceIndex,
        epoch: int,
        writers: Sequence[Attachment],
        slots: Sequence[Slot],
    ) -> Grant:
        """Record a grant.

        Args:
            grant_id: chosen by the owner.
            owner: attachment that reserved; 0 is the daemon itself.
            space: of the blocks to come.
            epoch: under which the owner opened the space. When it was bumped since, nothing that
                is written becomes a block: it was computed with other weights.
            writers: one attachment per shard; empty: the daemon writes.
            slots: what is granted.
        """
        shards = space.shape.shards
        grant = Grant(
            id=grant_id,
            owner=owner,
            space=space,
            epoch=epoch,
            writers=tuple(w.id for w in writers) or (0,) * shards,
            slots={slot: GrantedSlot((1 << shards) - 1) for slot in slots},
        )
        self._grants[(owner, grant_id)] = grant
        self.slot_count += len(slots)
        space.granted += len(slots)
        for writer in writers:
            writer.writing.add(grant)
            self._attachments[writer.id] = writer
        return grant

    def own(self, grant: Grant, owner: Attachment) -> None:
        """Charge a grant to its owner."""
        owner.owned[grant.id] = grant
        self._attachments[owner.id] = owner

    def commit(
        self,
        grant: Grant,
        shards: int,
        items: Sequence[tuple[Slot, bytes, bytes | None]],
    ) -> list[CommitOutcome]:
        """Commit one writer's shards of some slots, in chain order.

        Args:
            grant: the grant.
            shards: bit mask of the shards that the caller wrote.
            items: (slot, key, parent key or None).
        """
        space = grant.space
        outcomes = [self._commit_one(grant, shards, *item) for item in items]
        done = [
            space.blocks[key]
            for (_, key, _), outcome in zip(items, outcomes, strict=True)
            if outcome is CommitOutcome.COMMITTED
        ]
        if done:
            # Tail first, head last, then what they hang on: a longer chain is a used chain.
            self._index.touch(done)
            self._index.touch_ancestors(done[0])
            for block in done:
                self._on_block(block)
            if self.on_run is not None:
                self.on_run(done)
        self._close_if_settled(grant)
        return outcomes

    def _commit_one(
        self, grant: Grant, shards: int, slot: Slot, key: bytes, parent: bytes | None
    ) -> CommitOutcome:
        granted = grant.slots.get(slot)
        if granted is None or not shards or shards & ~granted.open_shards:
            return CommitOutcome.UNKNOWN_SLOT
        space = grant.space
        outcome = CommitOutcome.WAITING
        if granted.failed is not None:
            outcome = granted.failed
        elif grant.epoch != space.epoch:
            outcome = granted.failed = CommitOutcome.ABORTED
        elif granted.key is None:
            if key in space.blocks:
                outcome = granted.failed = _present(space.blocks[key], parent)
            elif not space.has_parent(parent):
                outcome = granted.failed = CommitOutcome.PARENT_MISSING
            else:
                granted.key, granted.parent = key, parent
                self._bind(space, key, parent)
        elif (granted.key, granted.parent) != (key, parent):
            outcome = CommitOutcome.KEY_MISMATCH
            self._fail(space, granted, outcome)
        granted.open_shards &= ~shards
        if granted.open_shards == 0:
            settled = self._settle(grant, slot, granted)
            if outcome is CommitOutcome.WAITING:
                outcome = settled
        return outcome

    def _settle(self, grant: Grant, slot: Slot, granted: GrantedSlot) -> CommitOutcome:
        """Turn a slot without open shards into a block, or free it."""
        del grant.slots[slot]
        self.slot_count -= 1
        grant.space.granted -= 1
        space, key, parent_key = grant.space, granted.key, granted.parent
        if key is not None:
            self._unbind(space, key, parent_key)
        if granted.failed is not None or key is None or grant.epoch != space.epoch:
            self._free(slot)
            return granted.failed or CommitOutcome.ABORTED
        existing = space.blocks.get(key)
        if existing is not None:
            self._free(slot)
            return _present(existing, parent_key)
        parent = None if parent_key is None else space.blocks.get(parent_key)
        if parent_key is not None and parent is None:
            self._free(slot)
            return CommitOutcome.PARENT_MISSING
        block = self._index.insert(space, key, parent)
        self._index.put_host(block, slot)
        return CommitOutcome.COMMITTED

    def abort(self, grant: Grant, shards: int, slots: Sequence[Slot] | None = None) -> None:
        """Settle some shards of some slots (None: all) as not written."""
        for slot in list(grant.slots) if slots is None else slots:
            granted = grant.slots.get(slot)
            if granted is None or not shards & granted.open_shards:
                continue
            self._fail(grant.space, granted, CommitOutcome.ABORTED)
            granted.open_shards &= ~shards
            if granted.open_shards == 0:
                self._settle(grant, slot, granted)
        self._close_if_settled(grant)

    def _fail(self, space: SpaceIndex, granted: GrantedSlot, why: CommitOutcome) -> None:
        """Note that a slot will not become a block; its key is nobody's business any more."""
        if granted.failed is None:
            granted.failed = why
        if granted.key is not None:
            self._unbind(space, granted.key, granted.parent)
            granted.key = None

    def shards_of(self, grant: Grant, attachment_id: int) -> int:
        """Return the bit mask of the shards that an attachment writes."""
        return sum(1 << r for r, writer in enumerate(grant.writers) if writer == attachment_id)

    def gone(self, attachment: Attachment) -> None:
        """A process is gone: what it should have written is not coming."""
        for grant in list(attachment.writing):
            self.abort(grant, self.shards_of(grant, attachment.id))
        attachment.writing.clear()
        for grant in list(attachment.owned.values()):
            # The writers that remain may not know that nobody will tell them what to write.
            for writer_id in set(grant.writers):
                writer = self._attachments.get(writer_id)
                if writer is not None and writer is not attachment:
                    writer.send(GrantRevokedEvent(grant.owner, grant.id))
        self._attachments.pop(attachment.id, None)

    def open_slots_of(self, attachment: Attachment) -> OpenSlots:
        """Return what waits for an attachment: slots that it may still be writing to."""
        slots = size = 0
        # Copies: metrics ask from another thread.
        for grant in list(attachment.writing):
            mine = self.shards_of(grant, attachment.id)
            waiting = sum(1 for g in list(grant.slots.values()) if g.open_shards & mine)
            slots += waiting
            size += waiting * grant.space.shape.block_bytes
        return OpenSlots(slots, size)

    def busy(self) -> list[BusySlot]:
        """Return the slots that processes may still be writing to, with those processes."""
        return [
            BusySlot(slot, writers)
            for grant in self._grants.values()
            for slot, granted in grant.slots.items()
            if (writers := _still_writing(grant, granted))
        ]

    def under_way(self, space: SpaceIndex, key: bytes) -> list[tuple[list[int], list[Attachment]]]:
        """Return, per slot that a partly committed key is bound to, missing shards and writers."""
        found = []
        for grant in self._grants.values():
            if grant.space is not space:
                continue
            for granted in grant.slots.values():
                if granted.key == key and granted.failed is None:
                    missing = [r for r in range(len(grant.writers)) if granted.open_shards >> r & 1]
                    ids = sorted({grant.writers[r] for r in missing})
                    writers = [self._attachments[i] for i in ids if i in self._attachments]
                    found.append((missing, writers))
        return found

    def void(self, space: SpaceIndex) -> None:
        """The space's epoch was bumped: nothing under way may become a block."""
        for grant in self._grants.values():
            if grant.space is space:
                for granted in grant.slots.values():
                    self._fail(space, granted, CommitOutcome.ABORTED)

    def _close_if_settled(self, grant: Grant) -> None:
        if grant.slots:
            return
        self._grants.pop((grant.owner, grant.id), None)
        for attachment_id in {grant.owner, *grant.writers}:
            attachment = self._attachments.get(attachment_id)
            if attachment is not None:
                attachment.writing.discard(grant)
                attachment.owned.pop(grant.id, None)

    def _bind(self, space: SpaceIndex, key: bytes, parent: bytes | None) -> None:
        space.pending_keys[key] = space.pending_keys.get(key, 0) + 1
        if parent is not None:
            space.pending_children[parent] = space.pending_children.get(parent, 0) + 1

    def _unbind(self, space: SpaceIndex, key: bytes, parent: bytes | None) -> None:
        _decrement(space.pending_keys, key)
        if parent is not None:
            _decrement(space.pending_children, parent)
            self._index.offer_key(space, parent)


def _present(block: Block, parent: bytes | None) -> CommitOutcome:
    """Say what a commit of a key that is taken means: the same block, or another chain's."""
    above = None if block.parent is None else block.parent.key
    return CommitOutcome.EXISTS if above == parent else CommitOutcome.KEY_MISMATCH


def _still_writing(grant: Grant, granted: GrantedSlot) -> tuple[int, ...]:
    """Return who has not said yet that it writes no more; not the daemon itself."""
    writing = {w for r, w in enumerate(grant.writers) if w and granted.open_shards >> r & 1}
    return tuple(sorted(writing))


def _decrement(counts: dict[bytes, int], key: bytes) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
