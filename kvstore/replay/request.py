"""What traces of every format come down to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Request", "TraceSpace"]


@dataclass(frozen=True, slots=True)
class TraceSpace:
    """Blocks of one kind.

    Attributes:
        block_tokens: tokens per block.
        block_bytes: bytes that a block takes in a tier.
    """

    block_tokens: int
    block_bytes: int


@dataclass(slots=True)
class Request:
    """One request of a trace.

    Attributes:
        at: seconds since the trace's beginning; never less than the request's before.
        keys: blocks in chain order.
        tokens: prompt tokens; fewer than the blocks hold when the last block is partial.
        space: index into `Trace.spaces`.
        parent: key before the first one; None: they begin a chain.
        loads: the blocks are asked for; False: they are only stored.
    """

    at: float
    keys: list[bytes]
    tokens: int
    space: int = 0
    parent: bytes | None = None
    loads: bool = True
