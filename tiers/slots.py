"""The slots of one slab group: which are free, and their generations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["GroupSlots"]


class GroupInfo(Protocol):
    """What a group of any tier has."""

    @property
    def group(self) -> int:
        """Its number."""

    @property
    def slots(self) -> int:
        """Blocks that fit."""


class Header(Protocol):
    """Where other processes read generations."""

    def set_generations(self, indices: NDArray[np.intp], values: NDArray[np.uint64]) -> None:
        """Store generations where every process sees them."""


H = TypeVar("H", bound=Header)
G = TypeVar("G", bound=GroupInfo)


class GroupSlots(Generic[G, H]):
    """Free list and generations of a group. Event loop's thread only.

    Attributes:
        info: the group, as announced.
        headers: the slabs, or what else carries their generations.
        retired: its free slots are withdrawn.
        used_count: slots that are allocated.
    """

    __slots__ = ("_free", "_generations", "_taken", "headers", "info", "retired", "used_count")

    def __init__(
        self,
        info: G,
        headers: Sequence[H],
        generations: NDArray[np.uint64] | None = None,
    ) -> None:
        """All slots are free, at generation 0 or at those that an earlier daemon left.

        The latter are written to the headers: readers compare with those.
        """
        self.info = info
        self.headers = headers
        self.retired = False
        self.used_count = 0
        # Taken from the end: low indices first, and what was freed last is warm in the caches.
        self._free = list(range(info.slots - 1, -1, -1))
        self._taken = bytearray(info.slots)
        # The headers are writable by every client: this copy is the one that counts.
        self._generations = [0] * info.slots
        if generations is not None:
            self._generations = generations.tolist()
            for header in headers:
                header.set_generations(np.arange(info.slots), generations)

    @property
    def free_count(self) -> int:
        """Slots that `take` could give."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take up to `count` slots and raise their generations in every shard's header."""
        count = min(count, len(self._free))
        if count <= 0:
            return []
        indices = self._free[-count:][::-1]
        del self._free[-count:]
        generations = self._generations
        for index in indices:
            self._taken[index] = 1
            generations[index] += 1
        self.used_count += count
        at = np.array(indices, np.intp)
        raised = np.array([generations[index] for index in indices], np.uint64)
        for header in self.headers:
            header.set_generations(at, raised)
        return indices

    def claim(self, index: int) -> bool:
        """Take one certain slot as it is; False when it is taken, or not there.

        For adoption only: `claimed` must follow before anything else.
        """
        if not 0 <= index < self.info.slots or self._taken[index]:
            return False
        self._taken[index] = 1
        self.used_count += 1
        return True

    def claimed(self) -> None:
        """Leave what was claimed out of the free slots."""
        taken = self._taken
        self._free = [index for index in self._free if not taken[index]]

    def generations(self) -> NDArray[np.uint64]:
        """Return the generations of all slots, shape (slots,)."""
        return np.array(self._generations, np.uint64)

    def generation(self, index: int) -> int:
        """Return a slot's generation; 0 when it was never taken."""
        return self._generations[index]

    def check_index(self, index: int) -> None:
        """Raise ValueError if the group has no such slot."""
        if not 0 <= index < self.info.slots:
            raise ValueError(f"slab group {self.info.group} has no slot {index}")

    def check_taken(self, indices: Sequence[int]) -> None:
        """Raise ValueError if a slot is not allocated, or named twice."""
        for index in indices:
            self.check_index(index)
            if not self._taken[index]:
                raise ValueError(f"slot {index} of slab group {self.info.group} is not allocated")
        if len(set(indices)) != len(indices):
            raise ValueError(f"a slot of slab group {self.info.group} is named twice")

    def give_back(self, indices: Sequence[int]) -> None:
        """Free slots that `check_taken` has accepted."""
        for index in indices:
            self._taken[index] = 0
        self._free += reversed(indices)
        self.used_count -= len(indices)
