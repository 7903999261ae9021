"""The slabs that one attachment may touch: announced, mapped on demand, counted while in use.

A group is unmapped only when no copy is under way on it: `use` and `unuse` count copies. Retiring
a group, and ending the whole table, stop new copies at once and leave the unmapping to whoever
finishes the last one, so that nobody waits. Unmapping (and unpinning, which takes milliseconds)
happens outside the lock: nobody can map a group again whose announcement is gone.

With `pin_with`, background threads pin every host slab from its announcement on, and open GPU slabs
before somebody needs them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.attach.mapped import DeviceMemory, MappedSlab, Pins, map_slab
from kvstore.attach.prefault import Prefaulter
from kvstore.cudart import CudaError
from kvstore.errors import AttachmentLost
from kvstore.proto import kvstore_pb2 as pb
from kvstore.wire import SlotArray

__all__ = ["SlabTable"]

_log: Final = logging.getLogger(__name__)

# Announcements travel on another stream than grants and leases and may come a little later.
_ANNOUNCEMENT_SECONDS: Final = 1.0
# An engine that starts beside a daemon with a full pool is asked for it seconds later.
_PINNING_THREADS: Final = 4


class SlabTable:
    """All slabs of one attachment. Every method may be called from any thread."""

    def __init__(
        self, acknowledge: Callable[[list[int]], None], device: DeviceMemory | None = None
    ) -> None:
        """Start empty.

        Args:
            acknowledge: tells the daemon that groups are unmapped; must not block.
            device: opens the daemon's device memory.
        """
        self._device = device or DeviceMemory()
        self._pins: Pins | None = None
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
            if self._pins is not None:
                self._prefaulter.used(slab.group, slab.shard, slab.length)
            elif slab.WhichOneof("memory") == "path":
                self._prefaulter.announced(slab.group, slab.shard, slab.length)
            self._changed.notify_all()

    def pin_with(self, pins: Pins) -> None:
        """Pin all slabs, those announced already too, in the background."""
        with self._changed:
            self._pins = pins
            self._prefaulter.threads = _PINNING_THREADS
            for (group, shard), slab in self._announced.items():
                self._prefaulter.again(group, shard, slab.length)

    def wait_filled(self, timeout_s: float) -> bool:
        """Wait until what is announced is filled, or pinned; return whether that is so."""
        return self._prefaulter.wait(timeout_s)

    def retire(self, groups: Iterable[int]) -> None:
        """Let no new copy begin on these groups; unmap and acknowledge each when it is idle."""
        with self._changed:
            idle = [group for group in groups if not self._users[group]]
            self._retired.update(groups)
            gone = self._take(idle)
            self._changed.notify_all()
        _close(gone)
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
            gone = self._take([group for group, _ in self._mapped])
        self._close_all(gone)
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
            gone = self._take(idle)
            if self._ended and not +self._users:
                gone += self._take([group for group, _ in self._mapped])
                when_idle, self._when_idle = self._when_idle, None
            self._changed.notify_all()
        if when_idle is None:
            _close(gone)
        else:
            self._close_all(gone)
        if idle:
            self._acknowledge(idle)
        if when_idle:
            when_idle()

    def _take(self, groups: Iterable[int]) -> list[MappedSlab]:
        """Forget groups and return their slabs, to be closed; the caller holds the lock."""
        doomed = set(groups)
        taken = [self._mapped.pop(place) for place in list(self._mapped) if place[0] in doomed]
        for place in [place for place in self._announced if place[0] in doomed]:
            del self._announced[place]
        return taken

    def _close_all(self, slabs: list[MappedSlab]) -> None:
        """Close the last slabs, and then the device memory that they may lie in."""
        _close(slabs)
        try:
            self._device.close()
        except CudaError as error:
            _log.warning("device memory of the daemon was not closed: %s", error)

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
                slab = map_slab(self._announced[place], self._device)
            except (CudaError, OSError, ValueError) as error:
                raise AttachmentLost(f"slab group {group} cannot be mapped: {error}") from error
            self._mapped[place] = slab
            self._prefaulter.used(group, shard, slab.mapping.length)
            return slab

    def _fill(self, group: int, shard: int) -> bool:
        """Pin a slab or fill its page tables; counts as a copy, so it is not unmapped meanwhile.

        Returns:
            Whether it took its time without resting.
        """
        pins = self._pins
        try:
            self.use([group])
        except AttachmentLost:
            return False
        try:
            slab = self.slab(group, shard)
            if not slab.device_uuid:
                # Before pinning too: who pins holds up the GPU, who fills page tables does not.
                slab.mapping.populate()
            if pins is not None:
                slab.pin(pins)
        except (AttachmentLost, OSError) as error:
            _log.debug("slab %d of shard %d: %s", group, shard, error)
        finally:
            self.unuse([group])
        return pins is None

    def addresses(self, slots: SlotArray, shard: int) -> NDArray[np.uint64]:
        """Return the address of each slot of a shard, shape (n,). Call between use and unuse.

        Raises:
            AttachmentLost: a slot's group is not there; see `slab`.
        """
        return self.places(slots, shard)[0]

    def places(self, slots: SlotArray, shard: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return the address of each slot of a shard, and how a GPU gets at it; both (n,).

        Raises:
            AttachmentLost: as for `addresses`.
        """
        result, reach = np.empty(len(slots), np.uint64), np.empty(len(slots), np.uint8)
        for slab, where, index in self._by_group(slots, shard):
            if int(index.max()) >= slab.slots:
                raise AttachmentLost(f"slab group {slab.group} has no slot {int(index.max())}")
            offsets = index.astype(np.uint64) * np.uint64(slab.slot_bytes)
            result[where] = offsets + np.uint64(slab.data_address)
            reach[where] = slab.reach(index)
        return result, reach

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


def _close(slabs: list[MappedSlab]) -> None:
    for slab in slabs:
        if not slab.close():
            _log.warning("slab %d of shard %d is still viewed by somebody", slab.group, slab.shard)
