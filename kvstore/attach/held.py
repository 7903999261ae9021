"""Slots in use: memory that stays mapped while a copy is under way."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.attach.located import Located
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
        self._located: dict[int, Located] = {}
        self._use: int | None = slabs.use(slots["group"])

    def _locate(self, shard: int) -> Located:
        found = self._located.get(shard)
        if found is None:
            found = self._slabs.locate(self._slots, shard)
            if self._use is not None:
                self._located[shard] = found
        return found

    def addresses(self, shard: int) -> NDArray[np.uint64]:
        """Return the address of each slot of a shard, shape (n,).

        Raises:
            AttachmentLost: a group was not announced within a second, or cannot be mapped.
        """
        return self._locate(shard).addresses

    def places(self, shard: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Return the slots' addresses, and how a GPU gets at each (`mapped`); both (n,).

        Raises:
            AttachmentLost: see `addresses`.
        """
        located = self._locate(shard)
        return located.addresses, located.reach()

    def stretches(self, shard: int) -> NDArray[np.int64]:
        """Return which slots a copy by a GPU may cross between; see `Located.stretches`.

        Raises:
            AttachmentLost: see `addresses`.
        """
        return self._locate(shard).stretches()

    def current(self, shard: int) -> NDArray[np.bool_]:
        """Return which slots still have the generation they were granted with, shape (n,).

        Ask after copying: it vouches for bytes copied before.

        Raises:
            AttachmentLost: see `addresses`.
        """
        return self._locate(shard).current()

    def done(self) -> None:
        """Say that nothing is copied any more. Idempotent, from any thread."""
        use, self._use = self._use, None
        # Whoever asks later asks the table, which knows what is mapped still.
        self._located.clear()
        if use is not None:
            self._slabs.unuse(use)

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
