"""Limits and pins of spaces as messages."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from kvstore.errors import InvalidRequest, UnknownSpace
from kvstore.index import NEVER
from kvstore.index.limits import LIMIT_NAMES, NO_LIMIT, SpaceLimits
from kvstore.proto import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore.engine import Engine
    from kvstore.engine.pins import PinGroup
    from kvstore.index import SpaceIndex

__all__ = ["limits_in_force", "limits_message", "list_pins", "set_limits", "unix_ms"]

# So that any answer fits one message.
_MOST_GROUPS: Final = 10_000
# A client may pin for 2**64 ms from now on.
_LAST_UNIX_MS: Final = (1 << 64) - 1


def unix_ms(engine: Engine, end: float) -> int:
    """Return a pin's end as Unix milliseconds, or the last that a message can say; 0 for `NEVER`."""
    return 0 if end == NEVER else min(max(1, round(engine.pins.unix(end) * 1e3)), _LAST_UNIX_MS)


def limits_message(limits: SpaceLimits) -> pb.Limits:
    """Return what was set for a space."""
    return pb.Limits(**dict(zip(LIMIT_NAMES, limits.values(), strict=True)))


def limits_in_force(limits: SpaceLimits) -> pb.Limits:
    """Return what is in force: what has no limit is not set."""
    values = zip(LIMIT_NAMES, limits.values(), strict=True)
    return pb.Limits(**{name: value for name, value in values if value != NO_LIMIT})


def _space(engine: Engine, space_id: bytes) -> SpaceIndex:
    if len(space_id) != 32:
        raise InvalidRequest("space_id", f"has {len(space_id)} bytes, not 32")
    space = engine.index.spaces.get(space_id)
    if space is None:
        raise UnknownSpace(f"space {space_id.hex()[:12]} is unknown: open it")
    return space


async def set_limits(engine: Engine, request: pb.SetLimitsRequest) -> pb.SetLimitsResponse:
    """Set some limits of a space and clear others.

    Raises:
        InvalidRequest: nothing is asked for, or it makes no sense; nothing was changed.
        UnknownSpace: nobody has opened the space, ever.
    """
    space = _space(engine, request.space_id)
    changes = {
        name: int(getattr(request.limits, name))
        for name in LIMIT_NAMES
        if request.limits.HasField(name)
    }
    if not changes and not request.clear:
        raise InvalidRequest("limits", "none is set and none is cleared")
    if changes.get("ttl_ms") == 0:
        raise InvalidRequest("limits", "ttl_ms must be above 0")
    for name in request.clear:
        if name not in LIMIT_NAMES:
            raise InvalidRequest("clear", f"{name!r} is not one of {', '.join(LIMIT_NAMES)}")
        if name in changes:
            raise InvalidRequest("clear", f"{name} is set in the same call")
    await engine.limits.change(space, changes, request.clear)
    return pb.SetLimitsResponse(
        limits=limits_in_force(space.in_force), own_limits=limits_message(space.limits)
    )


async def list_pins(engine: Engine, request: pb.ListPinsRequest) -> pb.ListPinsResponse:
    """List pins per space and owner.

    Raises:
        UnknownSpace: nobody has opened the space, ever.
    """
    space = _space(engine, request.space_id) if request.space_id else None
    groups = await engine.pins.groups(space, request.owner or None)
    if len(groups) > _MOST_GROUPS:
        groups = heapq.nlargest(_MOST_GROUPS, groups, key=lambda group: group.blocks)
    return pb.ListPinsResponse(groups=[_group(engine, group) for group in groups])


def _group(engine: Engine, group: PinGroup) -> pb.PinGroup:
    return pb.PinGroup(
        space_id=group.space.id,
        owner=group.owner,
        blocks=group.blocks,
        bytes=group.blocks * group.space.shape.block_bytes,
        first_end_unix_ms=unix_ms(engine, group.first_end),
        last_end_unix_ms=unix_ms(engine, group.last_end),
    )
