"""A check of the disk as messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engine.scrubber import Fault, Scrub

__all__ = ["verify_message"]


def verify_message(scrub: Scrub, faults: Sequence[Fault], *, done: bool) -> pb.VerifyResponse:
    """Return where a check is, with the faults that were not reported before."""
    return pb.VerifyResponse(
        checked=scrub.checked,
        damaged=scrub.damaged,
        done=done,
        total=scrub.total,
        bytes=scrub.read_bytes,
        unreadable=scrub.unreadable,
        gone=scrub.gone,
        dropped=scrub.dropped,
        lost=scrub.lost,
        faults=[
            pb.BlockFault(
                space_id=fault.space_id,
                key=fault.key,
                segment=fault.slot.group,
                slot=fault.slot.index,
                problem=fault.problem,
                kept=fault.kept,
            )
            for fault in faults
        ],
    )
