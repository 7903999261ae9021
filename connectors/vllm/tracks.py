"""What the scheduler's half knows about one request, from its arrival to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.vllm.store import Lease
from kvstore.connectors.vllm.views import View
from kvstore.keys import Keys

__all__ = ["MOST_ID_CHARS", "ActiveLoad", "Track", "queue_seconds"]

# Of a request's id, what the daemon takes.
MOST_ID_CHARS: Final = 256
# No longer than that a request is thought to wait in the engine's queue.
_LONGEST_QUEUE_SECONDS: Final = 30.0


def _release_late(asked: Future[Any]) -> None:
    """Give back a lease that arrives when nobody wants it any more."""
    if not asked.cancelled() and asked.exception() is None:
        asked.result().release()


@dataclass(slots=True)
class ActiveLoad:
    """A load that workers have been told about, until all ranks have finished it.

    Attributes:
        track: of the request; the request itself may have been aborted meanwhile.
        lease: held until the end.
        blocks: engine blocks being filled.
        keys: of the stored blocks, in order.
        first: index in the request's chain of the first of them.
        skip: engine blocks at the head of the first that are not loaded.
        tier_tokens: tokens by the tier that held them (2 host, 3 disk).
        load_id: under which workers report it.
        failed_at: index in `blocks` of the first that failed; -1 while none has.
    """

    track: Track
    lease: Lease | None
    blocks: NDArray[np.int32]
    keys: list[bytes]
    first: int
    skip: int
    tier_tokens: dict[int, int]
    load_id: int = 0
    failed_at: int = -1


@dataclass(slots=True)
class Track:
    """One request.

    Attributes:
        request: vLLM's.
        adapter: identity of its LoRA adapter; "" for none.
        view: that `stored`, `asked` and `lease` refer to.
        run: of the view.
        stored: leading stored blocks that need no storing.
        extent: tokens whose KV is computed after the last step that was scheduled.
        stores: whether its blocks may be stored.
        loads: whether it may be answered a hit; not again after a load of it failed.
        healed: whether storing has begun anew once already.
        asked: an Acquire under way.
        asked_blocks: how many keys it names.
        asked_at: when it was sent.
        arrivals: of the view's `stored` then.
        turn_at: when the requests before this one were thought to be computed, at the earliest.
        lease: its answer.
        local_tokens: tokens that the engine had by itself, as last told.
        answered_at: when a hit was first answered.
        given_back_at: when a lease was given back because there was no memory for the blocks.
        missed_at: when a miss was answered.
        table: engine blocks, kept here only for vLLM without block tables in its output.
        counted: whether it went into the usage report.
        traceparent: of the request, or of its first lookup; "" when nobody traces it.
    """

    request: Any
    adapter: str
    view: View | None = None
    run: int = -1
    stored: int = 0
    extent: int = 0
    stores: bool = True
    loads: bool = True
    healed: bool = False
    asked: Future[Any] | None = None
    asked_blocks: int = 0
    asked_at: float = 0.0
    arrivals: int = 0
    turn_at: float = 0.0
    lease: Lease | None = None
    local_tokens: int = 0
    answered_at: float | None = None
    given_back_at: float | None = None
    missed_at: float | None = None
    table: list[int] = field(default_factory=list)
    counted: bool = False
    traceparent: str = ""
    _packed: bytearray = field(default_factory=bytearray)

    def follow(self, view: View) -> None:
        """Forget what belongs to another view, or to an earlier daemon run."""
        if self.view is view and self.run == view.run:
            return
        self.let_go()
        self.view, self.run, self.stored = view, view.run, 0

    def left(self, block_tokens: int) -> int:
        """Return how many of its tokens are still to be computed, as far as is known."""
        have = max(int(self.request.num_computed_tokens), self.local_tokens)
        if self.lease is not None:
            have = max(have, self.lease.blocks * block_tokens)
        return max(0, int(self.request.num_tokens) - have)

    def keys(self, group_blocks: int) -> Keys:
        """Return the keys of the request's full stored blocks."""
        hashes = self.request.block_hashes
        count = len(hashes) // group_blocks
        size = len(hashes[0]) if count else 32
        have = len(self._packed) // size
        # A session's request may have lost its last tokens.
        if have and (have > count or self._packed[-size:] != hashes[have * group_blocks - 1]):
            self._packed.clear()
            self.stored = have = 0
        for i in range(have, count):
            self._packed += hashes[(i + 1) * group_blocks - 1]
        return Keys(bytes(self._packed), size)

    def let_go(self) -> None:
        """Give the lease back, also one that is still to come."""
        asked, self.asked = self.asked, None
        lease, self.lease = self.lease, None
        if asked is not None:
            asked.add_done_callback(_release_late)
        if lease is not None:
            lease.release()
        self.answered_at = None


def queue_seconds(
    track: Track,
    tracks: Iterable[Track],
    block_tokens: int,
    rate_of: Callable[[int], float],
) -> float:
    """Predict when the engine will have computed the other requests; 0 when that is not known.

    vLLM does not look at a request while those before it fill its steps. What comes from disk until
    then costs the request nothing.
    """
    ahead = sum(other.left(block_tokens) for other in tracks if other is not track)
    rate = rate_of(ahead)
    return min(ahead / rate, _LONGEST_QUEUE_SECONDS) if rate else 0.0
