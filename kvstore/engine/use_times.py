"""When blocks were used last, without a time at each of them.

Using a block raises its sequence number, which is durable with its record. So it is enough to know
which number was the highest at some times: a block was used no later than the first of those marks
whose number is not below its own. Marks are a second apart at first; as they age they are thinned
to a 64th of their age. A thinned mark's uses count as those of the next one: always later than they
were, never earlier.

Marks are saved in LMDB with the LRU order, every half a minute and at a stop, while any space has a
time to live. After a crash, uses of the last half a minute are as old as the order that was saved
says; what no mark covers counts as used at the start. Numbers go on above the last mark's, so that
later uses are never taken for earlier ones.

Time is the daemon's own (`steady_clock`): no step of the wall clock lets anything expire, or stay. It
begins as the Unix time of the first start, and pins end by it, too (`pins`).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from typing import TYPE_CHECKING, Final
from uuid import UUID

from kvstore.engine.steady_clock import Reading, SteadyClock
from kvstore.index.records import UsesRecord

__all__ = ["UseTimes"]

if TYPE_CHECKING:
    from kvstore.index import BlockIndex

# Marks are no closer than this, and no closer than this part of their age: so at most twice as far.
_APART_SECONDS: Final = 1.0
_APART_PART: Final = 1 / 128
# What is less began at 0, as the clock did before pins ended by it; their ends were Unix times.
_LEAST_SECONDS: Final = 1e9
# The wall clock and the machine's never agree to the last digit.
_STEP_SECONDS: Final = 1.0
# How many more marks there may be before they are thinned.
_THIN_EVERY: Final = 128


class UseTimes:
    """Which sequence number was the highest at some times.

    Attributes:
        needed: something is to be kept, or to end, by this time over a restart.
        stored: a restart will know this time, as something of it was saved.
    """

    def __init__(self, index: BlockIndex, clock: SteadyClock | None = None) -> None:
        """Start without marks.

        Args:
            index: whose sequence numbers.
            clock: seconds, over restarts; None: the machine's.
        """
        self._index = index
        self._clock = (
            SteadyClock(start=max(time.time(), _LEAST_SECONDS)) if clock is None else clock
        )
        self._sequences: list[int] = []
        self._seconds: list[float] = []
        self._thin_at = _THIN_EVERY
        self._saved = -1
        # How far the wall clock was ahead of the machine's then.
        self._saved_ahead = 0.0
        self.needed = self.stored = False

    def __len__(self) -> int:
        """Return the number of marks."""
        return len(self._seconds)

    def restore(self, record: UsesRecord | None) -> None:
        """Take in what an earlier daemon saved; blocks' sequence numbers are in the index already."""
        if record is not None:
            boot = str(UUID(bytes=record.boot))
            shift = record.wall - record.seconds if record.seconds < _LEAST_SECONDS else 0.0
            seconds = record.seconds + shift
            self._clock.resume(Reading(seconds, record.clock, record.wall, boot))
            self.stored = True
            self._sequences = [sequence for sequence, _ in record.marks]
            self._seconds = [seconds + shift for _, seconds in record.marks]
            if record.marks:
                self._index.sequence = max(self._index.sequence, self._sequences[-1])
        self._thin_at = len(self._seconds) + _THIN_EVERY
        self.mark(apart=0.0)

    def mark(self, apart: float | None = None) -> None:
        """Note the highest sequence number, unless that was done less than `apart` seconds ago.

        None: less than a second ago.
        """
        sequence, now = self._index.sequence, self._clock.now()
        if self._seconds and now - self._seconds[-1] < (_APART_SECONDS if apart is None else apart):
            return
        if self._sequences and self._sequences[-1] == sequence:
            return
        self._sequences.append(sequence)
        self._seconds.append(now)
        if len(self._seconds) >= self._thin_at:
            self._thin(now)

    def now(self) -> float:
        """Return the time: seconds, as Unix time that nobody sets."""
        return self._clock.now()

    def unix(self, seconds: float) -> float:
        """Return what the wall clock, as it is set now, says at a time of this one."""
        now = self._clock.read()
        return now.wall + (seconds - now.seconds)

    def unused_for(self, seconds: float) -> int:
        """Return the sequence number up to which everything was not used for that long."""
        at = bisect_right(self._seconds, self._clock.now() - seconds)
        return self._sequences[at - 1] if at else -1

    def record(self) -> UsesRecord | None:
        """Return what to save; None: nothing has changed since the last time.

        A step of the wall clock is a change: a reboot would take it for time that has passed.
        """
        now = self._clock.read()
        ahead = now.wall - now.clock
        stepped = abs(ahead - self._saved_ahead) > _STEP_SECONDS
        if self._index.sequence == self._saved and not stepped:
            return None
        self.mark(apart=0.0)
        self._saved, self._saved_ahead, self.stored = self._index.sequence, ahead, True
        marks = tuple(zip(self._sequences, self._seconds, strict=True))
        return UsesRecord(now.seconds, now.clock, now.wall, UUID(now.boot).bytes, marks)

    def unsaved(self) -> None:
        """What `record` returned was not saved."""
        self._saved, self.stored = -1, False

    def _thin(self, now: float) -> None:
        """Drop marks that are too close to the next one that stays; the latest stays."""
        seconds = self._seconds
        kept = [len(seconds) - 1]
        for at in range(len(seconds) - 2, -1, -1):
            later = seconds[kept[-1]]
            apart = max(_APART_SECONDS, (now - seconds[at]) * _APART_PART)
            # Not even when a mark is close does its neighbour get further away than twice that.
            if later - seconds[at] >= apart or not at or later - seconds[at - 1] > 2 * apart:
                kept.append(at)
        kept.reverse()
        self._sequences = [self._sequences[at] for at in kept]
        self._seconds = [self._seconds[at] for at in kept]
        self._thin_at = len(kept) + _THIN_EVERY
