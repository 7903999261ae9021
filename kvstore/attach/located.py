"""Where slots lie in this process: slots of many slabs, looked up together.

A copy of a gigabyte names slots of dozens of slabs, and whoever asks waits for a GPU that waits for
the answer: so everything here is a few operations on arrays over all slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.attach.mapped import DEVICE, MappedSlab
from kvstore.errors import AttachmentLost
from kvstore.memory import words_at
from kvstore.wire import SlotArray

__all__ = ["Located", "SlabArrays"]

I64 = NDArray[np.int64]

# Behind the last group, which is a 32-bit number.
_NO_GROUP: Final = 1 << 32

# Columns of a slab's row.
_DATA, _SLOT_BYTES, _SLOTS, _GENERATIONS, _PIN_SLOTS, _PINNED, _REACH = range(7)


def _row(slab: MappedSlab) -> tuple[int, ...]:
    return (
        slab.data_address,
        slab.slot_bytes,
        slab.slots,
        slab.mapping.address,
        slab.pin_slots,
        slab.pinned_slots,
        DEVICE if slab.device_uuid else 0,
    )


class SlabArrays:
    """Mapped slabs of one shard as they are now."""

    def __init__(self, slabs: Iterable[MappedSlab]) -> None:
        """Take down what lookups need."""
        ordered = sorted(slabs, key=lambda slab: slab.group)
        self._groups = np.array([*(slab.group for slab in ordered), _NO_GROUP], np.int64)
        self._rows = np.array([*map(_row, ordered), (0,) * 7], np.int64)

    def find(self, slots: SlotArray) -> Located | None:
        """Look slots up; None when a slab is not among these.

        Raises:
            AttachmentLost: a slab has no such slot.
        """
        groups = slots["group"].astype(np.int64)
        which = self._groups.searchsorted(groups)
        if not (self._groups[which] == groups).all():
            return None
        # A tenth of what indexing takes.
        return Located(slots, self._rows.take(which, axis=0))


class Located:
    """Slots of one shard in slabs that must stay mapped until nobody asks any more.

    Attributes:
        addresses: of each slot, shape (n,).
    """

    def __init__(self, slots: SlotArray, rows: I64) -> None:
        """Look slots up.

        Args:
            slots: shape (n,).
            rows: of the slab of each, shape (n, 7).

        Raises:
            AttachmentLost: a slab has no such slot.
        """
        self._slots = slots
        self._rows = rows
        self._index = index = slots["index"].astype(np.int64)
        beyond = index >= rows[:, _SLOTS]
        if beyond.any():
            slot = slots[int(beyond.argmax())]
            raise AttachmentLost(f"slab group {slot['group']} has no slot {slot['index']}")
        self.addresses = (rows[:, _DATA] + index * rows[:, _SLOT_BYTES]).view(np.uint64)

    def reach(self) -> NDArray[np.uint8]:
        """Return how a GPU gets at each slot: `PAGEABLE`, `PINNED` or `DEVICE`; shape (n,)."""
        # On a device nothing is pinned.
        reach = (self._index < self._rows[:, _PINNED]) + self._rows[:, _REACH]
        return reach.astype(np.uint8)

    def stretches(self) -> I64:
        """Return a number for each slot, shape (n,).

        Pinned slots of one number were pinned together: only among these a copy by a GPU may cross
        from one slot to the next.
        """
        stretch = self._index // self._rows[:, _PIN_SLOTS]
        return (self._slots["group"].astype(np.int64) << 32) + stretch

    def current(self) -> NDArray[np.bool_]:
        """Return whether each slot still has the generation it was granted with, shape (n,)."""
        found = words_at(self._rows[:, _GENERATIONS] + 8 * self._index)
        same: NDArray[np.bool_] = found == self._slots["generation"]
        return same
