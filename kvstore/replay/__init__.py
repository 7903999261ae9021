"""Replaying a trace of requests through the real index, on a virtual clock.

What a tier of some size would have kept is decided by `index.BlockIndex`: its LRU order, its prefix
rule, its queues of what may leave. Bytes are not moved and nothing waits; the trace's timestamps are
the clock, and a cost model says how long each request's prefill and loads would have taken.

1. `trace` reads requests from a stream, one at a time, whatever their format. Memory does not grow
   with the trace; it grows with the blocks that the sizes under test hold.
2. `simulation` takes each request through one pair of tier sizes: look up, load or compute, store.
3. `tiered_pool` does to the index what the daemon's room, promoter and flusher do to it.
4. `recommendation` and `plot` look at the results of all sizes.

A simulation owns its index; nothing is shared between sizes, and nothing outlives the command.
"""

from kvstore.replay.cost import CostModel
from kvstore.replay.recommendation import Prices, Recommendation, recommend
from kvstore.replay.request import Request, TraceSpace
from kvstore.replay.result import SizeResult
from kvstore.replay.simulation import Simulation, replay
from kvstore.replay.sizes import Size, parse_blocks, parse_grid
from kvstore.replay.synthetic import synthetic_lines
from kvstore.replay.trace import Trace, TraceFormat, open_trace

__all__ = [
    "CostModel",
    "Prices",
    "Recommendation",
    "Request",
    "Simulation",
    "Size",
    "SizeResult",
    "Trace",
    "TraceFormat",
    "TraceSpace",
    "open_trace",
    "parse_blocks",
    "parse_grid",
    "recommend",
    "replay",
    "synthetic_lines",
]
