"""One pair of tier sizes, request after request, on the trace's clock.

A request arrives, waits for an engine if their number is limited, loads its leading run (from host;
from disk only if that is predicted to be faster than computing), computes the rest, and stores
what was computed. Its time to first token is the sum of the first three.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvstore.config import WritePolicy
from kvstore.replay.result import SizeResult
from kvstore.replay.tiered_pool import TieredPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.index import Block
    from kvstore.replay.cost import CostModel
    from kvstore.replay.request import Request, TraceSpace
    from kvstore.replay.sizes import Size
    from kvstore.replay.trace import Trace

__all__ = ["Simulation", "replay"]


class Simulation:
    """Tiers of one size, the engines before them, and what came of it.

    Attributes:
        result: counts so far.
    """

    def __init__(
        self,
        size: Size,
        spaces: Sequence[TraceSpace],
        cost: CostModel,
        policy: WritePolicy = WritePolicy.THROUGH,
    ) -> None:
        """Start with empty tiers and idle engines."""
        self._spaces = spaces
        self._cost = cost
        host_bytes = size.host_bytes(spaces[0].block_bytes)
        self._pool = TieredPool(host_bytes, size.disk, policy, cost.disk_write)
        self.result = SizeResult(size, host_bytes, pool=self._pool.counts)
        # When each engine is free; when the disk has served the loads so far.
        self._engines = [0.0] * cost.engines
        self._disk_free = 0.0
        self._began: float | None = None

    def step(self, request: Request) -> None:
        """Take one request through the tiers."""
        pool, result, keys = self._pool, self.result, request.keys
        at = request.at
        if self._began is None:
            self._began = at
        result.span_seconds = at - self._began
        kind = self._spaces[request.space]
        space = pool.space(request.space, kind)
        pool.advance(at)
        tail: Block | None = None
        if request.parent is not None:
            tail = space.blocks.get(request.parent)
        # What hangs on a block that is not there is not there either, and cannot be stored.
        reachable = tail is not None or request.parent is None
        run = pool.find(space, keys) if reachable else []
        if request.loads:
            self._serve(request, run, kind)
        if reachable and len(run) < len(keys):
            pool.store(space, keys[len(run) :], run[-1] if run else tail)

    def _serve(self, request: Request, run: Sequence[Block], kind: TraceSpace) -> None:
        """Load what there is of a request, compute the rest, and count."""
        pool, result, at = self._pool, self.result, request.at
        in_host = pool.use(run)
        hits = len(run)
        start = max(at, heapq.heappop(self._engines)) if self._engines else at
        ready = start + in_host * kind.block_bytes / self._cost.host_read
        if in_host < hits:
            hits, ready = self._load(run, in_host, kind, ready)
        known = min(hits * kind.block_tokens, request.tokens)
        # The last token is computed in any case: it is what the first new one comes from.
        done = ready + max(1, request.tokens - known) / self._cost.prefill
        if self._cost.engines:
            heapq.heappush(self._engines, done)
        host_tokens = min(in_host * kind.block_tokens, known)
        result.requests += 1
        result.blocks += len(request.keys)
        result.tokens += request.tokens
        result.host_blocks += in_host
        result.disk_blocks += hits - in_host
        result.host_tokens += host_tokens
        result.disk_tokens += known - host_tokens
        result.ttft.add(done - at)

    def _load(
        self, run: Sequence[Block], in_host: int, kind: TraceSpace, ready: float
    ) -> tuple[int, float]:
        """Load the part of a run that is on disk, if that is faster than computing it.

        Returns:
            How long a run is loaded, and when.
        """
        count = len(run) - in_host
        begin = max(ready, self._disk_free)
        end = begin + count * kind.block_bytes / self._cost.disk_read
        end_host = end + count * kind.block_bytes / self._cost.host_read
        if end_host - ready > count * kind.block_tokens / self._cost.prefill:
            self.result.not_worth_blocks += count
            return in_host, ready
        hits = self._pool.promote(run)
        self._disk_free = end
        return hits, end_host

    def finish(self) -> SizeResult:
        """Let the disk write what still waits for it; return the result."""
        self._pool.settle()
        return self.result


def replay(
    trace: Trace | Iterable[Request],
    simulations: Sequence[Simulation],
    on_request: Callable[[Request], None] | None = None,
) -> list[SizeResult]:
    """Take a trace through several sizes at once, reading it once.

    Args:
        trace: requests in order.
        simulations: one per size.
        on_request: called after each request.

    Raises:
        InvalidRequest: a line of the trace is wrong.
    """
    for request in trace:
        for simulation in simulations:
            simulation.step(request)
        if on_request is not None:
            on_request(request)
    return [simulation.finish() for simulation in simulations]
