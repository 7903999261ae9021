"""Whether waiting pays: decides for leases how far they wait, and changes its mind while they do.

When a lease is asked for: `choose` compares the predicted arrival of what is not in memory with the
time that computing it takes, and the run ends where waiting stops to pay (`NOT_WORTH_WAITING`).
While the lease grows it is asked again every few milliseconds with what is left, because a device
may have become slow, or a queue long; a lease never waits longer than computing all that it waited
for would have taken, from its turn on (`queued_seconds`). The client's deadline holds in any case.

A path on which a transfer has been under way for far too long is *stalled*: nobody begins to wait
for it until that transfer has come back. What is declined is brought to memory afterwards
(`afterwards`); where that reads nothing soon, a path that everybody declines is measured all the
same, by a short read every few seconds at the lowest priority, or nobody would ever find out that it
has become faster.

Owns nothing that must survive; what was learned about speeds is kept in `speeds`, as a good guess
for the next daemon.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.engine.recent import Forecast
from kvstore.engine.speeds import Speeds
from kvstore.miss import Miss, MissReason
from kvstore.prefetch.planner import Plan, Want, plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.afterwards import Afterwards
    from kvstore.engine.counters import Counters
    from kvstore.index import Block
    from kvstore.prefetch.move import Waiter
    from kvstore.prefetch.promoter import Promoter

__all__ = ["REVIEW_SECONDS", "Pending", "Worth"]

log = logging.getLogger(__name__)

# How often a waiting lease is looked at again.
REVIEW_SECONDS: Final = 0.01
# A transfer this old, and this many times older than predicted, has stalled.
_STALL_SECONDS: Final = 2.0
_STALL_FACTOR: Final = 20.0
# A wait is planned anew when it is this much later, or its path this much slower, than predicted.
_LATE_FACTOR: Final = 1.25
# Of the time that a wait is predicted to win, what shorter ones that come later may take.
_SPARED: Final = 0.5
# A path that nobody uses because it is slow is measured again this often.
_PROBE_SECONDS: Final = 2.0
_PROBE_PRIORITY: Final = -(1 << 30)
# For so long, so that what counts is the time of bytes; of small blocks this takes several.
_PROBE_BUSY_SECONDS: Final = 0.05
_PROBE_BLOCKS: Final = 32


@dataclass(slots=True)
class Pending:
    """What a lease waits for, as it was decided.

    Attributes:
        block_seconds: what computing one block takes; 0: not known.
        priority: of its promotions.
        begun: loop time.
        predicted_seconds: until the last block.
        due_at: loop time after which it is so late that the choice is made anew.
        give_up_at: loop time after which the lease waits no more.
        turn_at: loop time until which waiting costs nothing.
        slack_bytes: of shorter jobs, that may be read first although they come later; infinite
            where nobody compares.
        pace: the rate that was counted on, bytes a second.
        cut: whether it was shortened.
    """

    block_seconds: float
    priority: int
    begun: float
    predicted_seconds: float
    due_at: float
    give_up_at: float
    slack_bytes: float = math.inf
    pace: float = 0.0
    turn_at: float = 0.0
    cut: bool = False


class _Probe:
    """Waits for blocks on nobody's behalf."""

    holding = False

    def landed(self, block: Block) -> None:
        """It counts as measured already."""

    def failed(self, block: Block, reason: MissReason) -> None:
        """Likewise."""


class Worth:
    """Decides what is waited for.

    Attributes:
        speeds: what was learned, by this daemon and earlier ones.
    """

    def __init__(self, counters: Counters, speeds: Speeds | None = None) -> None:
        """Compose; `add_disk` follows when there is one. Without `speeds` nothing is known yet."""
        self._counters = counters
        self.speeds = Speeds() if speeds is None else speeds
        self.promoter: Promoter | None = None
        self.afterwards: Afterwards | None = None
        self._was_stalled = False
        self._probe = _Probe()
        self._probed = 0.0

    def add_disk(self, store_id: bytes, promoter: Promoter, afterwards: Afterwards) -> None:
        """Decide about what comes from a disk tier, too; what is known of its speed is believed."""
        self.promoter, self.afterwards = promoter, afterwards
        known = self.speeds.disk(store_id)
        if known is not None:
            promoter.path.recall(*known)

    @property
    def stalled(self) -> bool:
        """Whether the path from disk had stalled when somebody looked last. Any thread."""
        return self._was_stalled

    def stalled_seconds(self) -> float:
        """Return for how long the path from disk has been stalled; 0 when it is not."""
        if self.promoter is None:
            return 0.0
        path = self.promoter.path
        age = path.oldest_seconds(asyncio.get_running_loop().time())
        expected = path.in_flight / path.bytes_per_second + path.latency_seconds
        stalled = age > max(_STALL_SECONDS, _STALL_FACTOR * expected)
        if stalled != self._was_stalled:
            self._was_stalled = stalled
            if stalled:
                self._counters.counts["path_stalls"] += 1
                log.warning("reads from disk have stalled for %.1f s; nobody waits for them", age)
            else:
                log.info("reads from disk go on again")
        return age if stalled else 0.0

    def choose(
        self,
        run: Sequence[Block],
        here: Sequence[bool],
        block_seconds: float,
        deadline_seconds: float,
        priority: int,
        queued_seconds: float = 0.0,
    ) -> tuple[int, Pending]:
        """Choose how many leading blocks of a run are worth their wait.

        Args:
            run: blocks that are somewhere.
            here: which of them are in memory; the others are on disk.
            block_seconds: what computing one takes; 0: not known.
            deadline_seconds: how long the client waits at most.
            priority: of the promotions.
            queued_seconds: for how long waiting costs the client nothing.
        """
        now = asyncio.get_running_loop().time()
        promoter = self.promoter
        if promoter is None:
            end = now + deadline_seconds
            return len(run), Pending(block_seconds, priority, now, 0.0, end, end)
        if self.stalled_seconds():
            at_once = next((i for i, ready in enumerate(here) if not ready), len(run))
            if at_once < len(run):
                self._counters.counts["waits_declined_stalled"] += 1
            return at_once, Pending(block_seconds, priority, now, 0.0, now, now)
        chosen = self._plan(run, here, block_seconds, deadline_seconds, priority, queued_seconds)
        cold = list(here[: chosen.blocks]).count(False)
        counts = self._counters.counts
        if chosen.blocks < len(run):
            counts["waits_declined"] += 1
            left = run[chosen.blocks :]
            seconds = queued_seconds + len(left) * block_seconds
            noted = self.afterwards is not None and self.afterwards.note(left, seconds)
            if not noted or seconds > _PROBE_SECONDS:
                self._measure(left, now)
        if cold:
            counts["waits_begun"] += 1
        patience, slack, pace = deadline_seconds, math.inf, promoter.path.pace(now)
        # What is in memory is only being checked: that is not computed anew meanwhile.
        if block_seconds and cold:
            patience = min(patience, queued_seconds + cold * block_seconds)
            slack = self._slack(pace, patience, chosen)
        return chosen.blocks, Pending(
            block_seconds,
            priority,
            now,
            chosen.wait_seconds,
            now + _LATE_FACTOR * chosen.wait_seconds,
            now + patience,
            slack,
            pace,
            now + queued_seconds,
        )

    def _plan(
        self,
        run: Sequence[Block],
        ready: Sequence[bool],
        block_seconds: float,
        deadline_seconds: float,
        priority: int,
        queued_seconds: float,
        margin: float | None = None,
        waiter: Waiter | None = None,
    ) -> Plan:
        promoter = self.promoter
        assert promoter is not None
        cold = [b for b, here in zip(run, ready, strict=True) if not here]
        if not cold:
            return Plan(len(run), 0.0, 0.0)
        want = Want(
            ready,
            cold[0].space.shape.block_bytes,
            block_seconds,
            promoter.ahead_bytes(cold, priority, waiter),
            deadline_seconds,
            queued_seconds,
        )
        now = asyncio.get_running_loop().time()
        if margin is None:
            return plan(want, promoter.path, now)
        return plan(want, promoter.path, now, margin=margin)

    def as_predicted(self, pending: Pending) -> bool:
        """Return whether a wait goes as it should, without a look at every block of it."""
        if self.promoter is None:
            return True
        now = asyncio.get_running_loop().time()
        late = now > pending.due_at
        slow = self.promoter.path.pace(now) < pending.pace / _LATE_FACTOR
        return not (late or slow or now >= pending.give_up_at or self.stalled_seconds())

    def still(
        self,
        pending: Pending,
        run: Sequence[Block],
        here: Sequence[bool],
        waiter: Waiter | None = None,
    ) -> int:
        """Return how many leading blocks of a run that is waited for are still worth it.

        Args:
            pending: from `choose`; what is predicted now takes the place of what was.
            run: the whole run.
            here: per block, whether it has arrived.
            waiter: who waits.
        """
        first = next((i for i, arrived in enumerate(here) if not arrived), len(run))
        if not pending.block_seconds or self.promoter is None or first == len(run):
            return len(run)
        now = asyncio.get_running_loop().time()
        if now >= pending.give_up_at or self.stalled_seconds():
            return first
        left, queued = pending.give_up_at - now, max(0.0, pending.turn_at - now)
        chosen = self._plan(
            run,
            here,
            pending.block_seconds,
            left,
            pending.priority,
            queued,
            margin=0.0,
            waiter=waiter,
        )
        pending.pace = self.promoter.path.pace(now)
        pending.due_at = now + _LATE_FACTOR * chosen.wait_seconds
        pending.slack_bytes = self._slack(pending.pace, left, chosen)
        return chosen.blocks

    @staticmethod
    def _slack(pace: float, patience_seconds: float, chosen: Plan) -> float:
        """Return how many bytes of others a wait can spare."""
        return _SPARED * pace * max(0.0, patience_seconds - chosen.wait_seconds)

    def ended(self, pending: Pending, *, cut: bool) -> None:
        """Take note of how a wait ended, or was shortened the first time."""
        if pending.cut:
            return
        counts = self._counters.counts
        took = asyncio.get_running_loop().time() - pending.begun
        if cut:
            pending.cut = True
            counts["waits_cut"] += 1
            self._counters.record("wait_lost", took)
            return
        counts["waits_ended"] += 1
        self._counters.record("wait", took)
        self._counters.record("wait_predicted", pending.predicted_seconds)
        self._counters.record("wait_error", abs(took - pending.predicted_seconds))

    def given_up(self, blocks: Sequence[Block], block_seconds: float) -> None:
        """A wait was cut before these blocks: they are computed, and brought afterwards."""
        if self.afterwards is not None and not self.stalled_seconds():
            self.afterwards.note(blocks, len(blocks) * block_seconds)

    def forecast(
        self, run: Sequence[Block], here: Sequence[bool], block_seconds: float, priority: int
    ) -> Forecast | None:
        """Predict what waiting for some blocks takes, and computing them instead.

        Args:
            run: blocks.
            here: which of them are in memory; the others are on disk.
            block_seconds: what computing one takes; 0: not known.
            priority: of the promotions.
        """
        cold = [b for b, ready in zip(run, here, strict=True) if not ready]
        if not cold or self.promoter is None:
            return None
        now = asyncio.get_running_loop().time()
        size = len(cold) * cold[0].space.shape.block_bytes
        ahead = self.promoter.ahead_bytes(cold, priority)
        load = self.promoter.path.seconds(size, ahead, now)
        return Forecast(len(cold), load, len(run) * block_seconds)

    @staticmethod
    def declined() -> Miss:
        """Return why a run ends where waiting would begin."""
        return Miss(MissReason.NOT_WORTH_WAITING, "disk")

    def _measure(self, declined: Sequence[Block], now: float) -> None:
        """Read a little of what is not waited for, if the path was not measured for a while."""
        promoter = self.promoter
        assert promoter is not None
        path = promoter.path
        due = max(path.observed_at, self._probed) + _PROBE_SECONDS
        if now < due or path.in_flight:
            return
        cold = [b for b in declined[:_PROBE_BLOCKS] if b.host is None]
        if cold:
            self._probed = now
            size = cold[0].space.shape.block_bytes
            worth = path.quantum(_PROBE_BUSY_SECONDS, size)
            some = cold[: max(1, worth // size)]
            # It does not wait for room for ever: what is asked for stays on disk so long.
            promoter.request(some, self._probe, _PROBE_PRIORITY, now + _PROBE_SECONDS)
