"""Attachments: the processes that use the daemon, and whether they are still alive.

A process is alive until it says goodbye (`detach`) or its lock is gone; a broken stream alone
proves nothing, since a stopped process breaks it too. Until then its granted slots stay out of
circulation; its leases, which only read, expire with its heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvstore.engine.events import (
    ActiveEvent,
    BootEndEvent,
    Event,
    SlabEvent,
    SlabRetireEvent,
)
from kvstore.engine.wake import Signal
from kvstore.errors import AttachmentLost, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.engine.grants import Grant
    from kvstore.engine.leases import Lease
    from kvstore.tiers.control import ControlFile
    from kvstore.tiers.gpu_slab import GpuSlabGroup
    from kvstore.tiers.slab import SlabGroup

__all__ = ["Attachment", "Attachments", "State"]

log = logging.getLogger(__name__)

# How often it is asked whether a process is dead whose stream has ended: that costs 1.5 µs, and
# slots wait for the answer.
_DEATH_POLL_SECONDS = 0.01
# How often it is looked who has fallen silent.
_SILENCE_POLL_SECONDS = 0.1
# Events that a client has not fetched: a stopped process must not grow the daemon's memory.
_MAX_OUTBOX = 100_000
_EARLY_RELEASES = 256


def _say(level: int, attachment: Attachment, text: str, *args: object) -> None:
    """Log a line about an attachment, whose client structured logs name as a field."""
    told = {"attachment": attachment.id, "client": attachment.client}
    log.log(level, f"attachment %d (%s): {text}", *told.values(), *args, extra=told)


class State(StrEnum):
    """Life of an attachment."""

    ATTACHING = "attaching"  # the stream is open, the lock not seen yet
    ACTIVE = "active"
    SILENT = "silent"  # no heartbeat for the lease time-to-live; leases are gone
    PRESUMED_DEAD = "presumed dead"  # the stream ended, the lock is still held
    GONE = "gone"


@dataclass(eq=False, slots=True)
class Attachment:
    """One attached process.

    Attributes:
        id: also the offset of its lock in the control file.
        mapped: it maps memory, hence holds a lock.
        shards: shards whose slabs it maps; empty means all.
        devices: GPUs whose memory it can open, as UUIDs.
        groups: slab groups announced to it and not yet unmapped.
        leases: by the id that the client chose.
        owned: grants that it reserved, by the id that the client chose.
        writing: grants in which it is a writer.
        last_heard: loop time of its last message.
        released_early: lease ids that were released before they were known: late acquires.
    """

    id: int
    client: str
    pid: int
    mapped: bool
    shards: frozenset[int]
    last_heard: float
    state: State = State.ATTACHING
    devices: frozenset[str] = frozenset()
    outbox: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)
    groups: set[int] = field(default_factory=set)
    leases: dict[int, Lease] = field(default_factory=dict)
    owned: dict[int, Grant] = field(default_factory=dict)
    writing: set[Grant] = field(default_factory=set)
    leased_bytes: int = 0
    released_early: deque[int] = field(default_factory=lambda: deque(maxlen=_EARLY_RELEASES))

    def send(self, event: Event) -> None:
        """Queue an event for the client; dropped when nobody fetches events any more."""
        if self.state in (State.PRESUMED_DEAD, State.GONE) or self.outbox.qsize() > _MAX_OUTBOX:
            return
        if isinstance(event, SlabEvent):
            self.groups.add(event.group.group)
        self.outbox.put_nowait(event)

    @property
    def granted_slots(self) -> int:
        """Slots of its own grants that are not settled yet."""
        return sum(len(grant.slots) for grant in self.owned.values())

    @property
    def granted_bytes(self) -> int:
        """Bytes of its own grants that are not settled yet."""
        return sum(len(g.slots) * g.space.shape.block_bytes for g in self.owned.values())


class Attachments:
    """All attachments of this boot."""

    def __init__(
        self,
        control: ControlFile,
        *,
        lease_ttl_seconds: float,
        on_silent: Callable[[Attachment], None],
        on_gone: Callable[[Attachment], None],
    ) -> None:
        """Compose.

        Args:
            control: the pool's control file.
            lease_ttl_seconds: silence after which leases expire.
            on_silent: ends the attachment's leases.
            on_gone: ends everything the attachment holds.
        """
        self._control = control
        self._ttl = lease_ttl_seconds
        self._on_silent = on_silent
        self._on_gone = on_gone
        self._all: dict[int, Attachment] = {}
        self._groups: dict[int, SlabGroup] = {}
        self._gpu_groups: dict[int, GpuSlabGroup] = {}
        self._reaper: asyncio.Task[None] | None = None
        # Somebody's stream has ended.
        self._dying = Signal()

    def start(self) -> None:
        """Begin to watch for silent and dead attachments."""
        self._reaper = asyncio.create_task(self._watch(), name="attachment-reaper")

    async def stop(self, reason: str) -> None:
        """Tell every client that this boot ends, and stop watching."""
        for attachment in list(self._all.values()):
            attachment.send(BootEndEvent(reason))
            attachment.outbox.put_nowait(None)
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)

    def snapshot(self) -> list[Attachment]:
        """Return all attachments that are not gone."""
        return list(self._all.values())

    def name_of(self, attachment_id: int) -> str:
        """Return the name of an attachment's client; "" when there is none."""
        attachment = self._all.get(attachment_id)
        return "" if attachment is None else attachment.client

    def find(self, attachment_id: int) -> Attachment:
        """Return a live attachment.

        Raises:
            AttachmentLost: it ended, or was never there.
        """
        attachment = self._all.get(attachment_id)
        if attachment is None or attachment.state in (State.PRESUMED_DEAD, State.GONE):
            raise AttachmentLost(f"attachment {attachment_id} is unknown or ended: attach again")
        return attachment

    def writer(self, attachment_id: int) -> Attachment:
        """Return an attachment that may be granted slots to write.

        Raises:
            AttachmentLost: it ended, was never there, or has no lock.
        """
        attachment = self.find(attachment_id)
        if not attachment.mapped:
            raise InvalidRequest("writers", f"attachment {attachment_id} does not map memory")
        if attachment.state is State.ATTACHING:
            raise AttachmentLost(f"attachment {attachment_id} has not shown its lock yet")
        return attachment

    def open(self, client: str, pid: int, *, mapped: bool, shards: frozenset[int]) -> Attachment:
        """Add an attachment and announce the slabs that are there."""
        attachment = Attachment(
            id=self._control.next_id(),
            client=client,
            pid=pid,
            mapped=mapped,
            shards=shards,
            last_heard=asyncio.get_running_loop().time(),
        )
        self._all[attachment.id] = attachment
        if mapped:
            for group in self._groups.values():
                attachment.send(SlabEvent(group))
        else:
            attachment.state = State.ACTIVE
            attachment.send(ActiveEvent())
        _say(logging.INFO, attachment, "pid %d, mapped %s", pid, mapped)
        return attachment

    def locked(self, attachment: Attachment) -> None:
        """Note that the client says it holds its lock.

        Raises:
            InvalidRequest: it does not.
        """
        if not attachment.mapped or not self._control.is_alive(attachment.id):
            raise InvalidRequest("locked", f"no lock is held at offset {attachment.id}")
        if attachment.state is State.ATTACHING:
            attachment.state = State.ACTIVE
            attachment.send(ActiveEvent())

    def heard(self, attachment: Attachment) -> None:
        """Note a sign of life."""
        attachment.last_heard = asyncio.get_running_loop().time()
        if attachment.state is State.SILENT:
            attachment.state = State.ACTIVE
            for group in self._groups.values():
                if attachment.mapped and group.group not in attachment.groups:
                    attachment.send(SlabEvent(group))

    def detach(self, attachment: Attachment) -> None:
        """The process copies no more: end everything it holds."""
        self._finish(attachment, "detached")

    def stream_ended(self, attachment: Attachment) -> None:
        """The stream is gone without a goodbye."""
        if attachment.state is State.GONE:
            return
        if not attachment.mapped or not self._control.is_alive(attachment.id):
            self._finish(attachment, "its stream and its lock are gone")
            return
        attachment.state = State.PRESUMED_DEAD
        text = "pid %d, stream ended, lock still held; %d granted slots wait"
        # A command that ends as it begins to attach is no news.
        level = logging.WARNING if attachment.granted_slots else logging.INFO
        _say(level, attachment, text, attachment.pid, attachment.granted_slots)
        self._dying.notify()

    def announce(self, group: SlabGroup) -> None:
        """Tell every mapping client about a new slab group.

        Who is silent is told when it is heard of again: what a stopped process was not told about
        can be given back without it.
        """
        self._groups[group.group] = group
        for attachment in self._all.values():
            if attachment.mapped and attachment.state is not State.SILENT:
                attachment.send(SlabEvent(group))

    def set_devices(self, attachment: Attachment, devices: frozenset[str]) -> None:
        """Note which GPUs' memory a client can open, and tell it what lies there."""
        attachment.devices = devices
        for group in self._gpu_groups.values():
            self._tell_gpu(attachment, group)

    def announce_gpu(self, group: GpuSlabGroup) -> None:
        """Tell every client that can open some of its devices about a new GPU slab group."""
        self._gpu_groups[group.group] = group
        for attachment in self._all.values():
            self._tell_gpu(attachment, group)

    @staticmethod
    def _tell_gpu(attachment: Attachment, group: GpuSlabGroup) -> None:
        here = any(slab.device_uuid in attachment.devices for slab in group.slabs)
        if here and group.group not in attachment.groups:
            attachment.send(SlabEvent(group))

    def gpu_group_gone(self, group: int) -> None:
        """Tell who knows a GPU slab group that it is no more."""
        self._gpu_groups.pop(group, None)
        for attachment in self._all.values():
            if group in attachment.groups:
                attachment.groups.discard(group)
                attachment.send(SlabRetireEvent((group,)))

    def mapping(self, group: int) -> list[Attachment]:
        """Return who may still map a slab group; later ones are not told about it any more."""
        self._groups.pop(group, None)
        return [a for a in self._all.values() if group in a.groups]

    def _finish(self, attachment: Attachment, why: str) -> None:
        if attachment.state is State.GONE:
            return
        attachment.state = State.GONE
        del self._all[attachment.id]
        _say(logging.INFO, attachment, "ended: %s", why)
        try:
            self._on_gone(attachment)
        finally:
            attachment.outbox.put_nowait(None)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # A hundred looks a second are a hundredth of a processor, which engines may need.
            if any(a.state is State.PRESUMED_DEAD for a in self._all.values()):
                await asyncio.sleep(_DEATH_POLL_SECONDS)
            else:
                await self._dying.wait(_SILENCE_POLL_SECONDS)
            now = loop.time()
            for attachment in list(self._all.values()):
                try:
                    self._check(attachment, now)
                except Exception:
                    # A thread boundary of its own: one bad attachment must not end the watch.
                    log.exception("attachment %d: check failed", attachment.id)

    def _check(self, attachment: Attachment, now: float) -> None:
        if attachment.state is State.PRESUMED_DEAD and not self._control.is_alive(attachment.id):
            self._finish(attachment, "its lock is gone")
            return
        if now - attachment.last_heard > self._ttl and attachment.state is not State.SILENT:
            if attachment.state is State.ACTIVE:
                attachment.state = State.SILENT
                _say(logging.WARNING, attachment, "is silent")
            self._on_silent(attachment)
