"""Slots in use: memory that stays mapped while a copy is under way."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.attach.located import Located
from kvstore.attach.slabs import ANNOUNCEMENT_SECONDS, SlabTable
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

    def _locate(self, shard: int, timeout_s: float = ANNOUNCEMENT_SECONDS) -> Located:
        found = self._located.get(shard)
        if found is None:
            found = self._keep(shard, self._slabs.locate(self._slots, shard, timeout_s))
        return found

    def _keep(self, shard: int, found: Located) -> Located:
        if self._use is not None:
            self._located[shard] = found
        return found

    def mapped(self, shard: int) -> bool:
        """Return, at once, whether all slots of a shard are mapped: then nothing here waits.

        Raises:
            AttachmentLost: a group has no such slot.
        """
        if shard in self._located:
            return True
        found = self._slabs.locate_mapped(self._slots, shard)
        if found is None:
            return False
        self._keep(shard, found)
        return True

    def map(self, shard: int, timeout_s: float) -> None:
        """Map the slots of a shard.

        Args:
            shard: which.
            timeout_s: to wait for groups to be announced; mapping itself takes what it takes.

        Raises:
            AttachmentLost: a group was not announced in that time, or cannot be mapped.
        """
        self._locate(shard, timeout_s)

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
