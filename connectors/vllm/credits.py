"""Empty slots reserved ahead, so that no call to the daemon stands between computing and copying.

Only the scheduler's thread calls; answers are polled from futures.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.vllm.store import Attachment, Grant, Space
from kvstore.errors import KVStoreError
from kvstore.keys import Keys

__all__ = ["Credits", "Taken"]

# The daemon answers with the first slots that come free.
_RESERVE_SECONDS: Final = 0.5
_FIRST_PAUSE_SECONDS: Final = 0.02
_LONGEST_PAUSE_SECONDS: Final = 1.0


@dataclass(slots=True)
class Taken:
    """Slots to fill.

    Attributes:
        grants: grant of each slot, shape (n,).
        slots: shape (n,).
    """

    grants: NDArray[np.uint64]
    slots: NDArray[Any]


_NOTHING: Final = Taken(np.empty(0, np.uint64), np.empty(0, np.uint64))


class Credits:
    """Slots of one space, of one daemon run, for one set of writers."""

    def __init__(
        self,
        space: Space,
        attachment: Attachment,
        writers: tuple[int, ...],
        *,
        failed: Callable[[KVStoreError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nothing.

        Args:
            space: where blocks will be committed.
            attachment: of this process; it owns the grants.
            writers: attachment id per shard.
            failed: told about errors.
            clock: seconds; for tests.
        """
        self._space = space
        self._attachment = attachment
        self._failed = failed
        self._clock = clock
        self.writers = writers
        self.boot_id = attachment.boot_id
        self.owner_id = attachment.id
        self._grants: deque[tuple[int, NDArray[Any]]] = deque()
        self._asked: Future[Any] | None = None
        self._pause = 0.0
        self._not_before = 0.0
        self.available = 0

    def poll(self) -> None:
        """Take in an answer that has arrived."""
        asked = self._asked
        if asked is None or not asked.done():
            return
        self._asked = None
        try:
            grant: Grant = asked.result()
        except KVStoreError as error:
            self._failed(error)
            self._wait_longer()
            return
        if grant.boot_id != self.boot_id or grant.owner_id != self.owner_id:
            # Attached anew since: what it names is not what the workers know.
            self._return(asked)
            return
        if len(grant.slots):
            self._grants.append((grant.id, grant.slots))
            self.available += len(grant.slots)
            self._pause = 0.0
        if grant.shortage:
            self._wait_longer()

    def _wait_longer(self) -> None:
        """Ask less often while there is nothing to have."""
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
        self._not_before = self._clock() + self._pause

    def top_up(self, wanted: int, protect: Callable[[], Keys | Sequence[bytes]]) -> None:
        """Ask for what is missing to `wanted`, unless a question is open or the pool is short.

        Args:
            wanted: slots to have.
            protect: called when asking: keys whose chains must not make room.
        """
        self.poll()
        missing = wanted - self.available
        if missing <= 0 or self._asked is not None or self._clock() < self._not_before:
            return
        self._asked = self._space.reserve(
            missing, writers=self.writers, deadline_s=_RESERVE_SECONDS, protect=protect()
        )

    def wait(self, seconds: float) -> None:
        """Wait for the open question, if there is one."""
        if self._asked is not None and seconds > 0:
            try:
                self._asked.exception(timeout=seconds)
            except TimeoutError:
                return
            self.poll()

    def take(self, count: int) -> Taken:
        """Take at most `count` slots; oldest grants first, so that they are used up."""
        grants: list[NDArray[np.uint64]] = []
        slots: list[NDArray[Any]] = []
        while count > 0 and self._grants:
            grant, left = self._grants.popleft()
            part = left[:count]
            if len(part) < len(left):
                self._grants.appendleft((grant, left[count:]))
            grants.append(np.full(len(part), grant, np.uint64))
            slots.append(part)
            count -= len(part)
            self.available -= len(part)
        if not slots:
            return _NOTHING
        return Taken(np.concatenate(grants), np.concatenate(slots))

    def give_back(self, keep: int) -> None:
        """Give back all but `keep` slots. No worker has been told about them."""
        self.poll()
        while self.available > keep:
            grant, left = self._grants.pop()
            surplus = min(len(left), self.available - keep)
            if surplus < len(left):
                self._grants.append((grant, left[:-surplus]))
            self.available -= surplus
            self._attachment.abort(
                self.owner_id, grant, slots=left[len(left) - surplus :], all_shards=True
            )

    def close(self) -> None:
        """Give everything back, also what is still to come."""
        asked, self._asked = self._asked, None
        self.give_back(0)
        if asked is not None:
            asked.add_done_callback(self._return)

    def _return(self, asked: Future[Any]) -> None:
        if asked.cancelled() or asked.exception() is not None:
            return
        grant: Grant = asked.result()
        if len(grant.slots):
            self._attachment.abort(grant.owner_id, grant.id, all_shards=True)
