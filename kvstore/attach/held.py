"""Slots in use: memory that stays mapped while a copy is under way."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.attach.slabs import SlabTable
from kvstore.wire import SlotArray

__all__ = ["Held"]


class Held:
    """Slots whose memory stays mapped until `done`, whatever happens to the attachment.

    A context manager; a copy that ends on another thread calls `done` there instead.
    """

    def __init__(self, slabs: SlabTable, slots: SlotArray) -> None:
        """Count a copy on the slots' groups.

        Raises:
            AttachmentLost: no copy may begin.
        """
        self._slabs = slabs
        self._slots = slots
        self._groups: list[int] | None = np.unique(slots["group"]).tolist()
        slabs.use(self._groups or ())

    def addresses(self, shard: int) -> NDArray[np.uint64]:
        """Return the address of each slot of a shard, shape (n,).

        Raises:
            AttachmentLost: a group was not announced within a second, or cannot be mapped.
        """
        return self._slabs.addresses(self._slots, shard)

    def places(self, shard: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return the slots' addresses and how a GPU gets at each; see `SlabTable.places`.

        Raises:
            AttachmentLost: see `addresses`.
        """
        return self._slabs.places(self._slots, shard)

    def current(self, shard: int) -> NDArray[np.bool_]:
        """Return which slots still have the generation they were granted with, shape (n,).

        Ask after copying: it vouches for bytes copied before.

        Raises:
            AttachmentLost: see `addresses`.
        """
        return self._slabs.current(self._slots, shard)

    def done(self) -> None:
        """Say that nothing is copied any more. Idempotent, from any thread."""
        groups, self._groups = self._groups, None
        if groups is not None:
            self._slabs.unuse(groups)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Call `done`."""
        self.done()
