"""The slabs that one attachment may touch: announced, mapped on demand, counted while in use.

A group is unmapped only when no copy is under way on it: `use` and `unuse` count copies. Retiring
a group, and ending the whole table, stop new copies at once and leave the unmapping to whoever
finishes the last one, so that nobody waits. Unmapping happens outside the lock: nobody can map a
group again whose announcement is gone. Pinned slabs are unpinned first, which takes milliseconds each
and rests in between: that is left to a thread (`closing`), and so is saying that they are unmapped.

Mapping happens outside the lock too: opening device memory takes up to hundreds of milliseconds, and
those who copy elsewhere must not notice. One thread maps a slab; whoever needs the same one meanwhile
waits for what it comes to, a failure included, and tries anew only when asked again. Whoever
maps is a user of the group: retired meanwhile, it is unmapped by the last user as ever, and so
is everything once the table has ended. Who cannot wait asks `locate` for what is mapped already.

With `pin_with`, background threads pin every host slab from its announcement on, and open GPU slabs
before somebody needs them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.attach.closing import Closing
from kvstore.attach.located import Located, SlabArrays
from kvstore.attach.mapped import DeviceMemory, MappedSlab, Pins, map_slab
from kvstore.attach.prefault import Prefaulter, Rest
from kvstore.cudart import CudaError
from kvstore.errors import AttachmentLost
from kvstore.proto import kvstore_pb2 as pb
from kvstore.units import MIB
from kvstore.wire import SlotArray

__all__ = ["ANNOUNCEMENT_SECONDS", "SlabTable"]

_log: Final = logging.getLogger(__name__)

# Announcements travel on another stream than grants and leases and may come a little later.
ANNOUNCEMENT_SECONDS: Final = 1.0
# Of page tables filled at once: half a millisecond, in which nobody can map or unmap anything.
_FILL_BYTES: Final = 2 * MIB


class _Attempt:
    """A slab that some thread is mapping. `error` is read once it is `over`."""

    __slots__ = ("error", "over")

    def __init__(self) -> None:
        self.over = False
        self.error = ""


class SlabTable:
    """All slabs of one attachment. Every method may be called from any thread.

    Attributes:
        unfilled: so many times page tables could not be filled ahead: copies take the faults.
        opens_devices: device memory of the daemon could be opened the last time, or was not yet.
    """

    def __init__(
        self,
        acknowledge: Callable[[list[int]], None],
        device: DeviceMemory | None = None,
        rest: Rest | None = None,
    ) -> None:
        """Start empty.

        Args:
            acknowledge: tells the daemon that groups are unmapped; must not block.
            device: opens the daemon's device memory.
            rest: says when page tables are filled ahead; None: always.
        """
        self._device = device or DeviceMemory()
        self._pins: Pins | None = None
        self._acknowledge = acknowledge
        self._changed = threading.Condition()
        self._announced: dict[tuple[int, int], pb.Slab] = {}
        self._mapped: dict[tuple[int, int], MappedSlab] = {}
        self._mapping: dict[tuple[int, int], _Attempt] = {}
        # Copies under way, by number: the groups of each one's slots.
        self._using: dict[int, NDArray[np.uint32]] = {}
        self._uses = itertools.count()
        # What lookups work with, by shard; dropped with every change to a mapped slab.
        self._arrays: dict[int, SlabArrays] = {}
        self._retired: set[int] = set()
        self._leaving: set[int] = set()  # retired, but still in use
        self._ended: str = ""
        self._when_idle: Callable[[], None] | None = None
        self._closing = Closing()
        # Slabs that were taken out, and are not unmapped yet: so many times.
        self._going = 0
        self._leaves_now = False
        self._prefaulter = Prefaulter(self._fill, rest)
        self.unfilled = 0
        self.opens_devices = True

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
            self._prefaulter.pace(pins.threads)
            for (group, shard), slab in self._announced.items():
                self._prefaulter.again(group, shard, slab.length)

    def wait_filled(self, timeout_s: float, groups: Collection[int] = ()) -> bool:
        """Wait until these groups are announced, and all that are filled, or pinned; return whether."""
        return self._prefaulter.wait(timeout_s, groups)

    def retire(self, groups: Iterable[int]) -> None:
        """Let no new copy begin on these groups; unmap and acknowledge each when it is idle."""
        with self._changed:
            groups = set(groups)
            idle = [group for group in sorted(groups) if not self._in_use(group)]
            self._retired |= groups
            self._leaving |= groups.difference(idle)
            gone = self._take(idle)
            self._changed.notify_all()
        self._give_up(gone, idle)

    def end(self, reason: str, when_idle: Callable[[], None], *, leaving: bool = False) -> None:
        """Let no new copy begin at all; unmap everything, then call `when_idle`, once idle.

        Args:
            reason: what later callers are told.
            when_idle: called once, by this call, by the thread that finishes the last copy, or by one
                that unpins.
            leaving: the process may be about to end, where no thread can be started any more:
                whoever unmaps unpins, too.
        """
        with self._changed:
            if self._ended:
                return
            self._ended = reason
            self._leaves_now = leaving
            self._prefaulter.end()
            self._changed.notify_all()
            if self._using:
                self._when_idle = when_idle
                return
            gone = self._take([group for group, _ in self._mapped])
        self._give_up(gone, [], when_idle)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no copy is under way, and what is to go is unmapped; return whether so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._using and not self._going, timeout_s)

    def use(self, groups: NDArray[np.uint32]) -> int:
        """Count one copy on each group; return the number that `unuse` must be given.

        Args:
            groups: of each slot: that of one may come as often as it likes.

        Raises:
            AttachmentLost: the attachment ended, or a group is being given back; none is counted.
        """
        with self._changed:
            if self._ended:
                raise AttachmentLost(self._ended)
            gone = self._retired.intersection(groups.tolist()) if self._retired else ()
            if gone:
                raise AttachmentLost(f"slab group {min(gone)} was given back")
            number = next(self._uses)
            self._using[number] = groups
            return number

    def _in_use(self, group: int) -> bool:
        return any(bool((groups == group).any()) for groups in self._using.values())

    def unuse(self, number: int) -> None:
        """Count a copy as finished."""
        when_idle = None
        idle: list[int] = []
        gone: list[MappedSlab] = []
        with self._changed:
            groups = self._using.pop(number)
            if self._leaving:
                mine = self._leaving.intersection(groups.tolist())
                idle = [group for group in sorted(mine) if not self._in_use(group)]
                self._leaving.difference_update(idle)
                gone = self._take(idle)
            if self._ended and not self._using:
                gone += self._take([group for group, _ in self._mapped])
                when_idle, self._when_idle = self._when_idle, None
            self._changed.notify_all()
        self._give_up(gone, idle, when_idle)

    def _take(self, groups: Iterable[int]) -> list[MappedSlab]:
        """Forget groups and return their slabs, to be closed; the caller holds the lock."""
        doomed = set(groups)
        self._arrays.clear()
        taken = [self._mapped.pop(place) for place in list(self._mapped) if place[0] in doomed]
        for place in [place for place in self._announced if place[0] in doomed]:
            del self._announced[place]
        return taken

    def _give_up(
        self,
        slabs: list[MappedSlab],
        groups: list[int],
        when_idle: Callable[[], None] | None = None,
    ) -> None:
        """Close slabs, then say so: here, or on a thread that may rest where any is pinned.

        Args:
            slabs: nobody uses them.
            groups: acknowledged then.
            when_idle: called then; these are the last slabs.
        """

        def close() -> None:
            try:
                _close(slabs)
                if when_idle is not None:
                    self._close_device()
            finally:
                if groups:
                    self._acknowledge(groups)
                if when_idle is not None:
                    when_idle()
                with self._changed:
                    self._going -= 1
                    self._changed.notify_all()

        with self._changed:
            self._going += 1
        if any(slab.pinned_slots for slab in slabs) and not self._leaves_now:
            self._closing.submit(close)
        else:
            close()

    def _close_device(self) -> None:
        """Close the device memory that the last slabs lay in."""
        if self._pins is not None:
            self._pins.use_device()
        try:
            self._device.close()
        except CudaError as error:
            _log.warning("device memory of the daemon was not closed: %s", error)

    def slab(self, group: int, shard: int, timeout_s: float = ANNOUNCEMENT_SECONDS) -> MappedSlab:
        """Return a slab, mapped. Call between use and unuse.

        Waits for its announcement, and for as long as it takes to map it.

        Args:
            group: of the slab.
            shard: of the slab.
            timeout_s: to wait for its announcement.

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
                timeout_s,
            )
            others = self._mapping.get(place)
            if others is not None:
                self._changed.wait_for(lambda: others.over)
            slab = self._mapped.get(place)
            if slab is not None:
                return slab
            if others is not None:
                raise AttachmentLost(others.error)
            announced = self._announced.get(place)
            if announced is None:
                raise AttachmentLost(self._ended or f"slab group {group} was never announced")
            attempt = self._mapping[place] = _Attempt()
        return self._map(announced, attempt)

    def _map(self, announced: pb.Slab, attempt: _Attempt) -> MappedSlab:
        """Map a slab that nobody else is mapping, and tell those who wait for it."""
        place = announced.group, announced.shard
        on_device = announced.WhichOneof("memory") == "cuda"
        slab: MappedSlab | None = None
        refused = False
        attempt.error = f"slab group {announced.group} cannot be mapped"
        try:
            slab = map_slab(announced, self._device)
        except (CudaError, OSError, ValueError) as error:
            attempt.error += f": {error}"
            # Any other error is that of a slab that went meanwhile.
            refused = isinstance(error, CudaError)
            raise AttachmentLost(attempt.error) from error
        finally:
            with self._changed:
                if on_device and (refused or slab is not None):
                    self.opens_devices = not refused
                if slab is not None:
                    self._mapped[place] = slab
                    self._arrays.clear()
                del self._mapping[place]
                attempt.over = True
                self._changed.notify_all()
                if slab is not None:
                    self._prefaulter.used(*place, slab.mapping.length)
        return slab

    def _fill(self, group: int, shard: int, start: int) -> int:
        """Pin a slab, or fill a piece of its page tables.

        Counts as a copy, so that it is not unmapped meanwhile.

        Args:
            group: of the slab.
            shard: of the slab.
            start: offset of the piece.

        Returns:
            Where the next piece begins, or that there is one; 0 when this was the last, or the slab
            is gone.
        """
        pins, after = self._pins, 0
        try:
            use = self.use(np.array([group], np.uint32))
        except AttachmentLost:
            return 0
        try:
            if pins is not None:
                pins.use_device()
            slab = self.slab(group, shard)
            if pins is not None:
                # The offset itself does not matter: a slab knows what of it is pinned.
                after = int(slab.pin(pins, self._note_unfilled))
                self._pinned_some()
            elif not slab.device_uuid:
                length = min(_FILL_BYTES, slab.mapping.length - start)
                if self._note_unfilled(lambda: slab.mapping.fault_in(start, length)):
                    after = (start + length) % slab.mapping.length
        except AttachmentLost as error:
            _log.debug("slab %d of shard %d: %s", group, shard, error)
        finally:
            self.unuse(use)
        return after

    def _note_unfilled(self, fill: Callable[[], object]) -> bool:
        """Fill page tables; return whether the kernel did. Copies work without, more slowly."""
        try:
            fill()
        except OSError as error:
            with self._changed:
                self.unfilled += 1
                first = self.unfilled == 1
            if first:
                _log.warning("memory is not faulted in ahead, first copies are slower: %s", error)
            return False
        return True

    def _pinned_some(self) -> None:
        with self._changed:
            self._arrays.clear()

    def locate(
        self, slots: SlotArray, shard: int, timeout_s: float = ANNOUNCEMENT_SECONDS
    ) -> Located:
        """Look up where slots of a shard lie, mapping what is not. Call between use and unuse.

        Args:
            slots: shape (n,).
            shard: of the slots.
            timeout_s: to wait for announcements, all together.

        Raises:
            AttachmentLost: a slot's group is not there; see `slab`.
        """
        found = self.locate_mapped(slots, shard)
        if found is None:
            until = time.monotonic() + timeout_s
            for group in np.unique(slots["group"]).tolist():
                self.slab(group, shard, max(0.0, until - time.monotonic()))
            found = self.locate_mapped(slots, shard)
        if found is None:
            raise AttachmentLost(self._ended or "slabs went while they were in use")
        return found

    def locate_mapped(self, slots: SlotArray, shard: int) -> Located | None:
        """Look up where slots lie; None, at once, when a slab of theirs is not mapped yet.

        Call between use and unuse.

        Raises:
            AttachmentLost: a slab has no such slot.
        """
        arrays = self._arrays.get(shard)
        if arrays is None:
            with self._changed:
                mine = [slab for place, slab in self._mapped.items() if place[1] == shard]
                arrays = self._arrays[shard] = SlabArrays(mine)
        return arrays.find(slots)


def _close(slabs: list[MappedSlab]) -> None:
    for slab in slabs:
        if not slab.close():
            _log.warning("slab %d of shard %d is still viewed by somebody", slab.group, slab.shard)
