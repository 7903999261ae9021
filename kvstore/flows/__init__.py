"""What put, get and the other calls do, written once for the sync and the async client.

Reading: lease a window, copy its bytes out, compare generations, release; the next window's lease
is asked for while this one is copied. Writing: reserve a window, copy in, commit; the next window
is reserved meanwhile. Where the pool is not mapped, bytes travel in Put and Get streams instead.
Nothing that a flow holds outlives it: leases are released and grants aborted however it ends, by
calls that do not wait.
"""

from kvstore.flows.base import Hit, milliseconds
from kvstore.flows.control import Asked, Evicted, SpaceFlows

__all__ = ["Asked", "Evicted", "Hit", "SpaceFlows", "milliseconds"]
