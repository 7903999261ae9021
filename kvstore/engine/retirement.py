"""Slab groups on their way out: who may still map them, and whether that is about to end.

1. A group is taken out of service: no slot of it is given out, no client is told about it any more.
2. Each client that may map it is told to unmap it. It does so when its copies there are over.
3. When all have said so, or are gone, and no slot is in use, the files are removed and the capacity
   is there for any shape.

A stopped process says nothing, and nothing can be done about the memory that it maps. So a client
that owes its answer for longer than it should is *slow*: what waits for it is not counted as coming,
and no other group that it maps is given up as long as it is slow. Its lock, or its answer, ends that.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore.engine.attachments import State
from kvstore.engine.events import SlabRetireEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvstore.engine.attachments import Attachment, Attachments
    from kvstore.engine.counters import Counters
    from kvstore.tiers.host import HostTier

__all__ = ["Retirement"]

log = logging.getLogger(__name__)

# A client answers within a millisecond, or when the copies are over that it has begun.
_PATIENCE_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Leaving:
    """One group.

    Attributes:
        mapped_by: attachments that have not said yet that they unmapped it.
        since: loop time at which they were told.
        taken_bytes: what its end gives back.
    """

    mapped_by: dict[int, Attachment]
    since: float
    taken_bytes: int


class Retirement:
    """Takes slab groups out of service."""

    def __init__(
        self,
        host: HostTier,
        attachments: Attachments,
        counters: Counters,
        notify: Callable[[], None],
    ) -> None:
        """Compose.

        Args:
            host: whose groups leave.
            attachments: who maps them.
            counters: of the engine.
            notify: called when a group is gone, and when it is plain that one will not be soon.
        """
        self._host = host
        self._attachments = attachments
        self._counters = counters
        self._notify = notify
        self._leaving: dict[int, _Leaving] = {}

    @property
    def groups(self) -> Collection[int]:
        """Groups that are not removed yet."""
        return self._leaving.keys()

    def begin(self, group: int) -> None:
        """Take a group out of service."""
        [taken] = [g.capacity_bytes for g in self._host.groups() if g.group == group] or [0]
        self._host.retire(group)
        mapped_by = self._attachments.mapping(group)
        loop = asyncio.get_running_loop()
        told = {attachment.id: attachment for attachment in mapped_by}
        self._leaving[group] = _Leaving(told, loop.time(), taken)
        self._counters.counts["slab_groups_retired"] += 1
        log.info("slab group %d retires, mapped by %d attachments", group, len(mapped_by))
        for attachment in mapped_by:
            attachment.send(SlabRetireEvent((group,)))
        if mapped_by:
            loop.call_later(_PATIENCE_SECONDS, self._lost_patience, group)
        self.try_remove(group)

    def _lost_patience(self, group: int) -> None:
        leaving = self._leaving.get(group)
        if leaving is None:
            return
        names = ", ".join(f"{a.client} (pid {a.pid})" for a in leaving.mapped_by.values())
        log.warning("slab group %d cannot be given back yet: %s", group, names or "it is in use")
        self._notify()

    def unmapped(self, attachment_id: int, groups: Sequence[int] | None = None) -> None:
        """Note that an attachment does not map some groups (all: it is gone) any more."""
        for group in list(self._leaving) if groups is None else groups:
            leaving = self._leaving.get(group)
            if leaving is not None:
                leaving.mapped_by.pop(attachment_id, None)
                self.try_remove(group)

    def try_remove(self, group: int) -> None:
        """Remove a group of these once it is empty and unmapped everywhere."""
        leaving = self._leaving.get(group)
        if leaving is None or leaving.mapped_by or self._host.slots_in_use(group):
            return
        del self._leaving[group]
        self._host.remove(group)
        self._notify()

    def slow(self) -> set[int]:
        """Return the attachments that are not expected to unmap anything soon."""
        late = asyncio.get_running_loop().time() - _PATIENCE_SECONDS
        return {
            attachment.id
            for leaving in self._leaving.values()
            for attachment in leaving.mapped_by.values()
            if leaving.since <= late or _is_quiet(attachment)
        }

    def coming(self) -> list[int]:
        """Return the bytes of each group that is expected to be gone in a moment."""
        slow = self.slow()
        return [
            leaving.taken_bytes
            for group, leaving in self._leaving.items()
            if slow.isdisjoint(leaving.mapped_by) and not self._host.slots_in_use(group)
        ]

    def maps(self, group: int, attachments: set[int]) -> bool:
        """Return whether one of these attachments, or one that is not heard of, may map a group."""
        return any(
            attachment.id in attachments or _is_quiet(attachment)
            for attachment in self._attachments.snapshot()
            if group in attachment.groups
        )


def _is_quiet(attachment: Attachment) -> bool:
    return attachment.state in (State.SILENT, State.PRESUMED_DEAD)
