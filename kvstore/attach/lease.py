"""What the daemon grants to an attachment: leases to read, grants to write."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.miss import Miss, MissReason
from kvstore.wire import SLOT_DTYPE, Shortage, SlotArray

__all__ = ["Grant", "Lease"]

_NO_SLOTS: Final = np.empty(0, SLOT_DTYPE)


class Lease:
    """The right to read the leading run of some keys; may grow while blocks are promoted.

    All of it may be used from any thread. Growth and the answer to Acquire travel on different
    streams: whichever comes first, the run is extended in order.

    Attributes:
        id: chosen by the client.
        boot_id: daemon run that gave it.
        attachment_id: attachment that holds it.
        present: leading keys whose blocks were in any tier when asked: they need no storing. Of
            daemons that do not say, those that it began with.
    """

    def __init__(
        self, lease_id: int, boot_id: bytes, attachment_id: int, release: Callable[[Lease], None]
    ) -> None:
        """Start empty and growing.

        Args:
            lease_id: random, non-zero, 63 bits.
            boot_id: daemon run.
            attachment_id: holder.
            release: gives it back; must not block.
        """
        self.id = lease_id
        self.boot_id = boot_id
        self.attachment_id = attachment_id
        self.present = 0
        self._release = release
        self._changed = threading.Condition()
        self._slots: SlotArray = _NO_SLOTS
        self._tiers = b""
        self._early: dict[int, tuple[SlotArray, bytes]] = {}
        self._growing = True
        self._final: int | None = None
        self._miss = Miss()
        self._lost = False
        self._released = False
        self._callbacks: list[Callable[[Lease], None]] = []

    @property
    def blocks(self) -> int:
        """Blocks leased so far."""
        return len(self._slots)

    @property
    def slots(self) -> SlotArray:
        """Slots leased so far, dtype SLOT_DTYPE, shape (blocks,). Grows by replacement."""
        return self._slots

    @property
    def tiers(self) -> bytes:
        """One byte a block: the wire's Tier that held it when it was asked for."""
        return self._tiers

    @property
    def growing(self) -> bool:
        """Whether more blocks may come."""
        return self._growing

    @property
    def miss(self) -> Miss:
        """Why the run ended; says nothing while it grows."""
        return self._miss

    @property
    def lost(self) -> bool:
        """Whether it was revoked or its attachment ended: what is read from now on is void."""
        return self._lost

    @property
    def released(self) -> bool:
        """Whether it was given back."""
        return self._released

    def wait(self, timeout_s: float | None = None, beyond: int | None = None) -> int:
        """Wait until it has ended growing, or is lost or released.

        Args:
            timeout_s: at most so long; None for ever.
            beyond: return also once it has more blocks than this.

        Returns:
            Blocks leased by then.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._growing or (beyond is not None and self.blocks > beyond),
                timeout_s,
            )
            return self.blocks

    def on_change(self, callback: Callable[[Lease], None]) -> None:
        """Call `callback(lease)` after every change, on a background thread; it must not block.

        When it does not grow any more (it may still be lost) there is one call at once, by the
        caller.
        """
        with self._changed:
            self._callbacks.append(callback)
            growing = self._growing
        if not growing:
            callback(self)

    def forget(self, callback: Callable[[Lease], None]) -> None:
        """Call it no more; nothing happens when it is not known."""
        with self._changed:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def release(self) -> None:
        """Give it back. Never blocks; calling it again does nothing."""
        with self._changed:
            if self._released:
                return
            self._released = True
            self._growing = False
            self._changed.notify_all()
        self._release(self)

    def extend(self, first: int, slots: SlotArray, tiers: bytes) -> None:
        """Add blocks from index `first` on; blocks that are there already are left alone."""
        with self._changed:
            self._early[first] = (slots, tiers)
            # Parts are few: an answer and its growth events.
            while True:
                ready = next((at for at in self._early if at <= self.blocks), None)
                if ready is None:
                    break
                more, more_tiers = self._early.pop(ready)
                skip = self.blocks - ready
                if skip < len(more):
                    self._slots = np.concatenate((self._slots, more[skip:]))
                    self._tiers += more_tiers[skip:]
            self._settle()
        self._notify()

    def finish(self, blocks: int, miss: Miss) -> None:
        """Take note that it ends after `blocks` blocks, of which some may still be on their way."""
        with self._changed:
            self._final = blocks
            self._miss = miss
            self._settle()
        self._notify()

    def _settle(self) -> None:
        if self._final is not None and self.blocks >= self._final:
            self._growing = False
        self._changed.notify_all()

    def lose(self) -> None:
        """Take note that it is void. Idempotent."""
        with self._changed:
            if self._lost:
                return
            self._lost = True
            self._growing = False
            self._miss = Miss(MissReason.LEASE_LOST)
            self._changed.notify_all()
        self._notify()

    def _notify(self) -> None:
        for callback in list(self._callbacks):
            callback(self)


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """The right of its writers to fill some slots.

    Attributes:
        id: chosen by the client.
        owner_id: attachment that reserved.
        boot_id: daemon run that gave it.
        writers: attachment id per shard; empty when the owner writes all shards.
        slots: dtype SLOT_DTYPE, shape (n,).
        shortage: why they are fewer than asked.
        present: leading run of the keys named in the call that is present already.
    """

    id: int
    owner_id: int
    boot_id: bytes
    writers: tuple[int, ...]
    slots: SlotArray
    shortage: Shortage
    present: int = 0
