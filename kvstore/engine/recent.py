"""What the last acquires asked for and got, to be explained afterwards.

Written by `Leases`: one entry when a lease is asked for, changed in place when the lease ends
shorter than was hoped. It holds no block and no list of keys, so what it takes is bounded whatever
is asked for; it costs the acquire well under a microsecond. Lost with the process.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kvstore.engine.attachments import Attachment
    from kvstore.index import SpaceIndex
    from kvstore.miss import Miss

__all__ = ["MOST_RECENT", "Forecast", "RecentAcquire", "RecentAcquires"]

MOST_RECENT: Final = 1024


class Forecast(NamedTuple):
    """What was predicted for blocks on disk.

    Attributes:
        blocks: how many.
        load_seconds: until all of them would be in memory.
        compute_seconds: what computing them takes; 0: the client has not said how fast it is.
    """

    blocks: int
    load_seconds: float
    compute_seconds: float


class RecentAcquire:
    """One acquire.

    Attributes:
        request_id: as the client sent it; may be empty.
        lease_id: the client's.
        client: name of its process.
        space: that was asked.
        epoch: of the space, then.
        asked: keys.
        blocks: leading run that the lease covers.
        key: of the first block that it does not cover; empty: it covers all.
        miss: why.
        forecast: for what was not worth waiting for; None: that was not why.
        deadline_seconds: how long the client would have waited.
        unix_seconds: when.
    """

    __slots__ = (
        "asked",
        "blocks",
        "client",
        "deadline_seconds",
        "epoch",
        "forecast",
        "key",
        "lease_id",
        "miss",
        "request_id",
        "space",
        "unix_seconds",
    )

    def __init__(
        self,
        request_id: str,
        lease_id: int,
        attachment: Attachment,
        space: SpaceIndex,
        asked: int,
        deadline_seconds: float,
        unix_seconds: float,
    ) -> None:
        """Note what was asked; `ends` must follow."""
        self.request_id = request_id
        self.lease_id = lease_id
        self.client = attachment.client
        self.space = space
        self.epoch = space.epoch
        self.asked = asked
        self.deadline_seconds = deadline_seconds
        self.unix_seconds = unix_seconds
        self.blocks = 0
        self.key = b""
        self.miss: Miss
        self.forecast: Forecast | None = None

    def ends(self, blocks: int, key: bytes, miss: Miss, forecast: Forecast | None = None) -> None:
        """Note how far it goes, and what is missing after that."""
        self.blocks, self.key, self.miss, self.forecast = blocks, key, miss, forecast


class RecentAcquires:
    """The last `MOST_RECENT` acquires, oldest forgotten first."""

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self._entries: deque[RecentAcquire] = deque(maxlen=MOST_RECENT)
        self.add = self._entries.append

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._entries)

    def find(self, name: str) -> list[RecentAcquire]:
        """Return those of a request, oldest first.

        Args:
            name: a request's id, or a lease's in decimal; else what stands before a hyphen in ids
                of requests: engines put something of their own behind the id that users see.
        """
        found = [entry for entry in self._entries if entry.request_id == name]
        if not found and name.isascii() and name.isdecimal():
            # Compared as text: a number of any length is no reason to make an integer of it.
            found = [entry for entry in self._entries if str(entry.lease_id) == name]
        if not found and name:
            found = [entry for entry in self._entries if entry.request_id.startswith(f"{name}-")]
        return found
