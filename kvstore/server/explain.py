"""An explanation as the contract's message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.proto import kvstore_pb2 as pb
from kvstore.wire import miss_to_message

if TYPE_CHECKING:
    from kvstore.engine.explanation import Explanation
    from kvstore.index import SpaceIndex

__all__ = ["explanation_message"]


def _ref(space: SpaceIndex) -> pb.SpaceRef:
    return pb.SpaceRef(id=space.id, epoch=space.epoch)


def explanation_message(explanation: Explanation) -> pb.ExplainResponse:
    """Return the answer to Explain."""
    return pb.ExplainResponse(
        blocks=explanation.blocks,
        miss=miss_to_message(explanation.miss),
        lines=explanation.lines,
        others=[
            pb.OtherSpace(
                space=_ref(other.space),
                blocks=other.blocks,
                differences=[
                    pb.FieldDifference(field=d.field, here=d.here, there=d.there)
                    for d in other.differences
                ],
            )
            for other in explanation.others
        ],
        asked=explanation.asked,
        space=_ref(explanation.space),
        key=explanation.key,
    )
