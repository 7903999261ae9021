"""Load or compute: how many blocks of a run are worth waiting for.

A run of n blocks is used up to some block k: the first k are loaded, the rest is computed. Time to
first token is then

    arrival of the k-th block + (n - k) x time to compute a block

where blocks in memory arrive at once, and those on a slower tier one after the other at the path's
rate, behind what goes first. The k with the least sum is chosen; of equal ones the larger, which
leaves the engine free for others. It is asked again while waiting, with what is left: time that has
passed is spent either way. Who has to wait for something else first (an engine that is busy with
other requests) waits for nothing until then: only what comes later counts.

What is not known is not gambled on: without a prefill rate the client's deadline decides alone;
without a measurement of the path, waiting is worth a fraction of the time that computing takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.prefetch.estimate import PathEstimate

__all__ = ["Plan", "Want", "plan"]

# Loading must be predicted to win by this part of the computing that it saves: predictions err,
# and a wait that was not worth it costs more than a load that was not made.
_MARGIN: Final = 0.1
# Of the time to compute, what may be spent on a path that nobody has measured yet.
_EXPLORE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Want:
    """A run that somebody asks for.

    Attributes:
        ready: per block, whether it can be read now.
        block_bytes: bytes of a block.
        block_seconds: what computing one takes; 0: not known.
        ahead_bytes: what goes first on the path, in flight not counted; negative when some of the
            run's own blocks are in flight.
        deadline_seconds: how long the client waits at most.
        queued_seconds: for how long waiting costs nothing.
    """

    ready: Sequence[bool]
    block_bytes: int
    block_seconds: float
    ahead_bytes: int
    deadline_seconds: float
    queued_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with a run.

    Attributes:
        blocks: leading blocks to wait for; what follows is computed.
        wait_seconds: until the last of them is predicted to have arrived.
        saved_seconds: of computing, less what the wait costs; at least 0.
    """

    blocks: int
    wait_seconds: float
    saved_seconds: float


def plan(want: Want, path: PathEstimate, now: float, *, margin: float = _MARGIN) -> Plan:
    """Choose how many leading blocks to wait for. Linear in the run, no allocation per block.

    Args:
        want: the run.
        path: what the blocks that are not ready come by.
        now: loop time.
        margin: part of the computing saved by which loading must win. None for who waits already:
            a prediction that wavers about even must not throw away a wait that has almost ended.
    """
    total = len(want.ready)
    at_once = next((i for i, ready in enumerate(want.ready) if not ready), total)
    if at_once == total:
        return Plan(total, 0.0, total * want.block_seconds)
    per_block = want.block_bytes / path.pace(now)
    first = path.seconds(0, want.ahead_bytes, now)
    known = want.block_seconds > 0
    limit = want.deadline_seconds
    if known and not path.measured:
        explore = _EXPLORE * (total - at_once) * want.block_seconds
        limit = min(limit, want.queued_seconds + explore)
    worth = want.block_seconds * (1 - margin)
    best, best_gain, best_wait = at_once, 0.0, 0.0
    coming = 0
    for k in range(at_once, total):
        if not want.ready[k]:
            coming += 1
        wait = first + coming * per_block
        if wait > limit:
            if not known:
                # Nothing says that the rest would be late: the deadline itself will.
                return Plan(total, wait, 0.0)
            break
        cost = max(0.0, wait - want.queued_seconds)
        gain = (k + 1 - at_once) * worth - cost if known else math.inf
        if gain >= best_gain:
            best, best_gain, best_wait = k + 1, gain, wait
    cost = max(0.0, best_wait - want.queued_seconds)
    saved = max(0.0, best * want.block_seconds - cost)
    return Plan(best, best_wait, saved)
