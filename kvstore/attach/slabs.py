"""The slabs that one attachment may touch: announced, mapped on demand, counted while in use.

A group is unmapped only when no copy is under way on it: `use` and `unuse` count copies. Retiring
a group, and ending the whole table, stop new copies at once and leave the unmapping to whoever
finishes the last one, so that nobody waits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.attach.prefault import Prefaulter
from kvstore.errors import AttachmentLost
from kvstore.memory import Mapping
from kvstore.proto import kvstore_pb2 as pb
from kvstore.wire import SlotArray, tier_name

__all__ = ["MappedSlab", "SlabTable"]

_log: Final = logging.getLogger(__name__)

# Announcements travel on another stream than grants and leases and may come a little later.
_ANNOUNCEMENT_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class MappedSlab:
    """One slab of shared memory in this process.

    Attributes:
        group: slab group.
        shard: whose bytes it holds.
        tier: ``host`` or ``gpu``.
        slot_bytes: bytes of a slot.
        slots: number of slots.
        data_address: address of slot 0.
        mapping: the whole slab.
        generations: the slots' current generations, shape (slots,), written by the daemon.
    """

    group: int
    shard: int
    tier: str
    slot_bytes: int
    slots: int
    data_address: int
    mapping: Mapping
    generations: NDArray[np.uint64]


class SlabTable:
    """All slabs of one attachment. Every method may be called from any thread."""

    def __init__(self, acknowledge: Callable[[list[int]], None]) -> None:
        """Start empty.

        Args:
            acknowledge: tells the daemon that groups are unmapped; must not block.
        """
        self._acknowledge = acknowledge
        self._changed = threading.Condition()
        self._announced: dict[tuple[int, int], pb.Slab] = {}
        self._mapped: dict[tuple[int, int], MappedSlab] = {}
        self._users: Counter[int] = Counter()
        self._retired: set[int] = set()
        self._ended: str = ""
        self._when_idle: Callable[[], None] | None = None
        self._prefaulter = Prefaulter(self._fill)

    def announce(self, slab: pb.Slab) -> None:
        """Take note of a slab; it is mapped when it is first needed, or a little before."""
        with self._changed:
            self._announced[slab.group, slab.shard] = slab
            self._prefaulter.announced(slab.group, slab.shard, slab.length)
            self._changed.notify_all()

    def retire(self, groups: Iterable[int]) -> None:
        """Let no new copy begin on these groups; unmap and acknowledge each when it is idle."""
        with self._changed:
            idle = [group for group in groups if not self._users[group]]
            self._retired.update(groups)
            self._unmap(idle)
            self._changed.notify_all()
        if idle:
            self._acknowledge(idle)

    def end(self, reason: str, when_idle: Callable[[], None]) -> None:
        """Let no new copy begin at all; unmap everything, then call `when_idle`, once idle.

        Args:
            reason: what later callers are told.
            when_idle: called once, by this call or by the thread that finishes the last copy.
        """
        with self._changed:
            if self._ended:
                return
            self._ended = reason
            self._prefaulter.end()
            self._changed.notify_all()
            if +self._users:
                self._when_idle = when_idle
                return
            self._unmap([group for group, _ in self._mapped])
        when_idle()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no copy is under way; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not +self._users, timeout_s)

    def use(self, groups: Iterable[int]) -> None:
        """Count one copy on each group. `unuse` must follow, whatever happens.

        Raises:
            AttachmentLost: the attachment ended, or a group is being given back; none is counted.
        """
        with self._changed:
            if self._ended:
                raise AttachmentLost(self._ended)
            gone = self._retired.intersection(groups)
            if gone:
                raise AttachmentLost(f"slab group {min(gone)} was given back")
            self._users.update(groups)

    def unuse(self, groups: Iterable[int]) -> None:
        """Count a copy as finished on each group."""
        when_idle = None
        with self._changed:
            self._users.subtract(groups)
            idle = [g for g in groups if not self._users[g] and g in self._retired]
            self._unmap(idle)
            if self._ended and not +self._users:
                self._unmap([group for group, _ in self._mapped])
                when_idle, self._when_idle = self._when_idle, None
            self._changed.notify_all()
        if idle:
            self._acknowledge(idle)
        if when_idle:
            when_idle()

    def _unmap(self, groups: Iterable[int]) -> None:
        """Unmap groups; the caller holds the lock."""
        doomed = set(groups)
        for place in [place for place in self._mapped if place[0] in doomed]:
            mapping = self._mapped.pop(place).mapping
            if not mapping.close():
                _log.warning("slab %d of shard %d is still viewed by somebody", *place)
        for place in [place for place in self._announced if place[0] in doomed]:
            del self._announced[place]

    def slab(self, group: int, shard: int) -> MappedSlab:
        """Return a slab, mapped. Waits up to a second for its announcement.

        Raises:
            AttachmentLost: it was not announced, or cannot be mapped.
        """
        place = (group, shard)
        slab = self._mapped.get(place)
        if slab is not None:
            return slab
        with self._changed:
            self._changed.wait_for(
                lambda: place in self._announced or self._ended or group in self._retired,
                _ANNOUNCEMENT_SECONDS,
            )
            if place in self._mapped:
                return self._mapped[place]
            if place not in self._announced:
                raise AttachmentLost(self._ended or f"slab group {group} was never announced")
            try:
                slab = _map(self._announced[place])
            except (OSError, ValueError) as error:
                raise AttachmentLost(f"slab group {group} cannot be mapped: {error}") from error
            self._mapped[place] = slab
            self._prefaulter.used(group, shard, slab.mapping.length)
            return slab

    def _fill(self, group: int, shard: int) -> None:
        """Fill a slab's page tables; counts as a copy, so that it is not unmapped meanwhile."""
        try:
            self.use([group])
        except AttachmentLost:
            return
        try:
            self.slab(group, shard).mapping.populate()
        except (AttachmentLost, OSError) as error:
            _log.debug("slab %d of shard %d: %s", group, shard, error)
        finally:
            self.unuse([group])

    def addresses(self, slots: SlotArray, shard: int) -> NDArray[np.uint64]:
        """Return the address of each slot of a shard, shape (n,). Call between use and unuse.

        Raises:
            AttachmentLost: a slot's group is not there; see `slab`.
        """
        result = np.empty(len(slots), np.uint64)
        for slab, where, index in self._by_group(slots, shard):
            if int(index.max()) >= slab.slots:
                raise AttachmentLost(f"slab group {slab.group} has no slot {int(index.max())}")
            offsets = index.astype(np.uint64) * np.uint64(slab.slot_bytes)
            result[where] = offsets + np.uint64(slab.data_address)
        return result

    def current(self, slots: SlotArray, shard: int) -> NDArray[np.bool_]:
        """Return whether each slot still has the generation it was granted with, shape (n,).

        Only what was copied *before* this call is vouched for.

        Raises:
            AttachmentLost: a slot's group is not there; see `slab`.
        """
        result = np.zeros(len(slots), np.bool_)
        for slab, where, index in self._by_group(slots, shard):
            result[where] = slab.generations[index] == slots["generation"][where]
        return result

    def _by_group(
        self, slots: SlotArray, shard: int
    ) -> Iterable[tuple[MappedSlab, slice | NDArray[np.bool_], NDArray[np.uint32]]]:
        groups = slots["group"]
        distinct = np.unique(groups).tolist()
        for group in distinct:
            where = slice(None) if len(distinct) == 1 else groups == group
            yield self.slab(group, shard), where, slots["index"][where]


def _map(slab: pb.Slab) -> MappedSlab:
    """Map one announced slab.

    Raises:
        OSError, ValueError: it cannot be.
    """
    if slab.WhichOneof("memory") != "path":
        raise ValueError(f"{tier_name(slab.tier)} memory needs a mapper of its own")
    if slab.data_offset < 8 * slab.slots or (
        slab.length < slab.data_offset + slab.slots * slab.slot_bytes
    ):
        raise ValueError("its geometry contradicts itself")
    fd = os.open(slab.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Beyond a file's end a mapping raises SIGBUS.
        if os.fstat(fd).st_size < slab.length:
            raise ValueError(f"{slab.path} is shorter than {slab.length} bytes")
        mapping = Mapping(fd, slab.length)
    finally:
        os.close(fd)
    mapping.dontfork()
    return MappedSlab(
        group=slab.group,
        shard=slab.shard,
        tier=tier_name(slab.tier),
        slot_bytes=slab.slot_bytes,
        slots=slab.slots,
        data_address=mapping.address + slab.data_offset,
        mapping=mapping,
        generations=mapping.array[: 8 * slab.slots].view(np.uint64),
    )
