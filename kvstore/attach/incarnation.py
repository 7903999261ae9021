"""One attachment id of one daemon run: from the lock to the end of the last copy under it.

The process outlives its incarnations: when a stream breaks, the next attachment is another one,
with other slabs, and nothing granted to the old one is good for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from kvstore.attach.lease import Lease
from kvstore.attach.prefault import Rest
from kvstore.attach.slabs import SlabTable
from kvstore.attach.upstream import UpStream
from kvstore.errors import AttachmentLost
from kvstore.locks import lock_byte
from kvstore.miss import Miss
from kvstore.process import fork_guard
from kvstore.proto import kvstore_pb2 as pb
from kvstore.wire import SlotArray, miss_from_message, unpack_slots

__all__ = ["Incarnation"]


class Incarnation:
    """What one attachment owns. Every method may be called from any thread.

    Attributes:
        boot_id: daemon run.
        id: attachment id.
        lease_cap_bytes: of all its leases together; 0 when the daemon names none.
        slabs: memory that it may touch.
        active: the daemon has seen the lock.
        mappable: memory may be mapped.
    """

    def __init__(self, boot_id: bytes, attached: pb.Attached, up: UpStream, rest: Rest) -> None:
        """Start without a lock; `rest` says when page tables are filled ahead."""
        self.boot_id = boot_id
        self.id: int = attached.attachment_id
        self.lease_cap_bytes: int = attached.lease_cap_bytes
        self.active = False
        self.mappable = False
        self.slabs = SlabTable(self._acknowledge, rest=rest)
        self._up = up
        self._lock_fd = -1
        self._guard = threading.Lock()
        self._ended = False
        self._leases: dict[int, Lease] = {}
        self._released: list[int] = []
        self._releasing = False

    @property
    def ended(self) -> bool:
        """Whether nothing granted to it is good any more."""
        return self._ended

    def take_lock(self, path: str, offset: int) -> None:
        """Open the control file for this attachment alone and lock its byte.

        Raises:
            OSError: the file cannot be opened, or somebody holds the lock.
        """
        with fork_guard:
            self._lock_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if not lock_byte(self._lock_fd, offset):
            self.drop_lock()
            raise OSError(f"{path}: byte {offset} is locked by somebody else")
        self.mappable = True

    def drop_lock(self) -> None:
        """Close the control file. Idempotent; also what a forked child does."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def add(self, lease: Lease) -> None:
        """Let events reach a lease.

        Raises:
            AttachmentLost: it is too late.
        """
        with self._guard:
            if self._ended:
                raise AttachmentLost("the attachment ended")
            self._leases[lease.id] = lease

    def release(self, lease: Lease, send: Callable[[list[int]], None]) -> None:
        """Forget a lease and tell the daemon, together with others when a call is under way."""
        with self._guard:
            if self._leases.pop(lease.id, None) is None or self._ended:
                return
            self._released.append(lease.id)
        self.flush_releases(send)

    def flush_releases(self, send: Callable[[list[int]], None]) -> None:
        """Send what was released, unless a call is under way: its end sends the rest."""
        with self._guard:
            if self._releasing or self._ended or not self._released:
                return
            self._releasing = True
            batch, self._released = self._released, []
        send(batch)

    def released(self, batch: list[int], error: BaseException | None) -> None:
        """Take note of a finished call; what could not be sent goes with a later one."""
        with self._guard:
            self._releasing = False
            if error is not None:
                self._released += batch

    def dispatch(self, event: pb.AttachDown) -> None:
        """Act on one event of the stream."""
        kind = event.WhichOneof("event")
        if kind == "slab":
            self.slabs.announce(event.slab)
        elif kind == "retire":
            self.slabs.retire(event.retire.groups)
        elif kind == "active":
            self.active = self.mappable
        elif kind == "lease_grown":
            grown = event.lease_grown
            lease = self._leases.get(grown.lease_id)
            if lease is not None:
                lease.extend(grown.first, unpack_slots(grown.slots), grown.tiers)
        elif kind == "lease_done":
            done = event.lease_done
            lease = self._leases.get(done.lease_id)
            if lease is not None:
                lease.finish(done.blocks, miss_from_message(done.miss))
        elif kind == "revoked":
            self._lose(list(event.revoked.lease_ids) or list(self._leases))

    def answer(self, lease: Lease, blocks: pb.AcquireResponse) -> Lease:
        """Put the answer to Acquire into its lease."""
        slots: SlotArray = unpack_slots(blocks.slots)
        lease.present = max(blocks.present, len(slots))
        lease.extend(0, slots, blocks.tiers)
        if not blocks.growing:
            miss = miss_from_message(blocks.miss) if blocks.HasField("miss") else Miss()
            lease.finish(len(slots), miss)
        if self._ended:
            lease.lose()
        return lease

    def _lose(self, lease_ids: list[int]) -> None:
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None:
                lease.lose()

    def _acknowledge(self, groups: list[int]) -> None:
        self._up.send(pb.AttachUp(unmapped=pb.SlabsUnmapped(groups=groups)))

    def tell_devices(self, uuids: Sequence[str]) -> None:
        """Say which devices' memory the users of this attachment's leases can open."""
        self._up.send(pb.AttachUp(devices=pb.Devices(uuids=uuids)))

    def farewell(self, heartbeat: pb.Heartbeat) -> None:
        """Send a last heartbeat."""
        self._up.send(pb.AttachUp(heartbeat=heartbeat))

    def end(self, reason: str, *, detach: bool = False) -> None:
        """Void everything; unmap and drop the lock as soon as no copy is under way.

        Args:
            reason: what later users are told.
            detach: then also tell the daemon that this process copies no more.
        """
        with self._guard:
            self._ended = True
            self.active = False
            doomed = list(self._leases.values())
        for lease in doomed:
            lease.lose()

        def idle() -> None:
            if detach:
                self._up.send(pb.AttachUp(detach=pb.Detach()))
                self._up.end()
            self.drop_lock()

        self.slabs.end(reason, idle, leaving=detach)
