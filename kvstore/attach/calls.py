"""Asking for leases and grants, committing and giving back: calls that never wait."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

from kvstore.attach.held import Held
from kvstore.attach.incarnation import Incarnation
from kvstore.attach.lease import Grant, Lease
from kvstore.errors import AttachmentLost, InvalidRequest, KVStoreError
from kvstore.handle import SpaceHandle
from kvstore.keys import Keys
from kvstore.link import Link, failed
from kvstore.outcomes import Shortage
from kvstore.proto import kvstore_pb2 as pb
from kvstore.wire import (
    ALL_SHARDS,
    MAX_KEYS,
    SlotArray,
    pack_parents,
    pack_run_parent,
    pack_slot_names,
    unpack_slots,
)

__all__ = ["Calls", "new_id"]


def new_id() -> int:
    """Return a random non-zero 63-bit number."""
    return 1 + secrets.randbelow((1 << 63) - 1)


def _milliseconds(seconds: float) -> int:
    return max(0, min(round(seconds * 1e3), 0xFFFFFFFF))


class Calls(ABC):
    """What a process asks for under its attachment. Any thread; nothing blocks."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        """Bind to a channel.

        Args:
            link: to the daemon.
            timeout_s: for calls that do not wait on purpose.
        """
        self._link = link
        self._timeout_s = timeout_s

    @abstractmethod
    def _active(self) -> Incarnation:
        """Return the incarnation that may be granted something now.

        Raises:
            AttachmentLost: there is none.
            ClientClosed: there will be none.
        """

    def using(self, slots: SlotArray, *, boot_id: bytes, writer_id: int = 0) -> Held:
        """Keep the slots' memory mapped for a copy.

        Args:
            slots: dtype SLOT_DTYPE, shape (n,).
            boot_id: daemon run that granted them.
            writer_id: for writing: the attachment that the grant names as this shard's writer.
                Without it, a process that was re-attached meanwhile could write to slots that
                belong to somebody else by now.

        Raises:
            AttachmentLost: they were granted in another daemon run or to another attachment, or
                their group is being given back. Nothing may be copied.
        """
        current = self._active()
        if current.boot_id != boot_id:
            raise AttachmentLost("the slots were granted by another run of the daemon")
        if writer_id and current.id != writer_id:
            raise AttachmentLost("the slots were granted to an attachment that ended")
        return Held(current.slabs, slots)

    def make_room(self, shard_bytes: Sequence[int]) -> Future[pb.MakeRoomResponse]:
        """Have the daemon make its host pool's memory for such blocks; see `Client.make_room`.

        Needs no attachment: the daemon may begin while this process attaches.
        """
        request = pb.MakeRoomRequest(shard_bytes=shard_bytes)
        return self._link.submit("MakeRoom", request, self._timeout_s, lambda answer: answer)

    def acquire(
        self,
        space: SpaceHandle,
        keys: Keys,
        *,
        deadline_s: float = 0.0,
        prefill_tokens_per_second: float | None = 0.0,
        priority: int = 0,
        request_id: str = "",
        queued_s: float = 0.0,
    ) -> Future[Lease]:
        """Ask for a lease on the leading run of `keys`; at most the first 32,768 are looked at.

        What is on disk is waited for only while that is predicted to be faster than computing it at
        `prefill_tokens_per_second`; 0: in any case; None: the caller has not measured it yet, what
        clients of the space reported before is used.
        `request_id` is what `kvstore explain --request` finds it by, at most 256 characters. For
        `queued_s` seconds waiting costs nothing, because others are served first.

        Returns:
            A future that cannot be cancelled: its lease must be released.
        """
        try:
            current = self._active()
            lease = Lease(
                new_id(), current.boot_id, current.id, lambda it: self._release(current, it)
            )
            current.add(lease)
        except KVStoreError as error:
            return failed(error)
        request = pb.AcquireRequest(
            attachment_id=current.id,
            space=space.ref,
            lease_id=lease.id,
            keys=keys.packed[: MAX_KEYS * keys.key_bytes],
            deadline_ms=_milliseconds(deadline_s),
            prefill_tokens_per_second=prefill_tokens_per_second or 0.0,
            remembered_rate=prefill_tokens_per_second is None,
            priority=priority,
            parent=pack_run_parent(keys),
            request_id=request_id,
            queued_ms=_milliseconds(queued_s),
        )

        def accept(answer: pb.AcquireResponse) -> Lease:
            return current.answer(lease, answer)

        def outcome(answer: Future[Lease]) -> None:
            # The daemon may have given a lease whose answer did not arrive.
            if answer.exception() is not None:
                lease.release()

        future = space.submit(self._link, "Acquire", request, self._timeout_s, accept)
        future.add_done_callback(outcome)
        return future

    def _release(self, current: Incarnation, lease: Lease) -> None:
        current.release(lease, lambda batch: self._send_releases(current, batch))

    def _send_releases(self, current: Incarnation, batch: list[int]) -> None:
        request = pb.ReleaseRequest(attachment_id=current.id, lease_ids=batch)

        def sent(answer: Future[None]) -> None:
            error = answer.exception()
            current.released(batch, error)
            if error is None:  # else with the next heartbeat
                current.flush_releases(lambda more: self._send_releases(current, more))

        self._link.submit(
            "Release", request, self._timeout_s, lambda _answer: None
        ).add_done_callback(sent)

    def reserve(
        self,
        space: SpaceHandle,
        count: int,
        *,
        writers: Sequence[int] = (),
        deadline_s: float = 0.0,
        protect: Keys | Sequence[bytes] | None = None,
        keys: Keys | None = None,
    ) -> Future[Grant]:
        """Ask for up to `count` empty slots.

        Args:
            space: whose blocks will fill them.
            count: at least 1.
            writers: attachment id per shard; empty: this process writes all shards.
            deadline_s: how long to wait for the first slot.
            protect: keys whose chains must not be evicted to make room.
            keys: what the slots are for, if known: slots are granted only for those that are not
                present, see `Grant.present`; at most the first 32,768 are looked at.

        Returns:
            A future that cannot be cancelled: its grant must be committed or aborted.
        """
        if count < 1:
            return failed(InvalidRequest("count", f"must be at least 1, not {count}"))
        try:
            current = self._active()
            guarded = space.keys(protect or ())
        except KVStoreError as error:
            return failed(error)
        grant_id = new_id()
        request = pb.ReserveRequest(
            attachment_id=current.id,
            space=space.ref,
            grant_id=grant_id,
            count=count,
            writers=writers,
            deadline_ms=_milliseconds(deadline_s),
            protect=guarded.packed,
            keys=b"" if keys is None else keys.packed[: MAX_KEYS * keys.key_bytes],
            parent=b"" if keys is None else keys.parent or b"",
        )

        def accept(answer: pb.ReserveResponse) -> Grant:
            return Grant(
                id=grant_id,
                owner_id=current.id,
                boot_id=current.boot_id,
                writers=tuple(writers),
                slots=unpack_slots(answer.slots),
                shortage=Shortage(answer.shortage),
                present=answer.present,
            )

        def outcome(answer: Future[Grant]) -> None:
            # The daemon may have granted slots whose answer did not arrive.
            if answer.exception() is not None and not current.ended:
                self.abort(current.id, grant_id, all_shards=True)

        future = space.submit(self._link, "Reserve", request, deadline_s + self._timeout_s, accept)
        future.add_done_callback(outcome)
        return future

    def commit(
        self,
        space: SpaceHandle,
        owner_id: int,
        grant_id: int,
        shard: int | None,
        slots: SlotArray,
        keys: Keys | bytes | Sequence[bytes],
        parents: bytes | Sequence[bytes | None],
    ) -> Future[bytes]:
        """Say that slots are filled, and with which blocks.

        Args:
            space: of the blocks.
            owner_id: attachment that reserved; 0: this one.
            grant_id: the grant.
            shard: which shard was written; None: all that this process writes.
            slots: at most 32,768, of either slot dtype.
            keys: one a slot; bytes: packed.
            parents: the key before each, None (packed: zeros) where a chain starts.

        Returns:
            A future of one CommitOutcome byte a slot.
        """
        size = space.spec.key_bytes
        try:
            current = self._active()
            named = Keys(keys, size) if isinstance(keys, bytes) else space.keys(keys)
        except KVStoreError as error:
            return failed(error)
        packed = parents if isinstance(parents, bytes) else pack_parents(parents, size)
        if not len(named) == len(slots) == len(packed) // size:
            return failed(InvalidRequest("keys", "slots, keys and parents differ in number"))
        if len(named) > MAX_KEYS:
            return failed(InvalidRequest("keys", f"are more than {MAX_KEYS} in one commit"))
        request = pb.CommitRequest(
            attachment_id=current.id,
            grant_id=grant_id,
            owner_id=owner_id,
            shard=ALL_SHARDS if shard is None else shard,
            slots=pack_slot_names(slots),
            keys=named.packed,
            parents=packed,
            space=space.ref,
        )
        return space.submit(
            self._link, "Commit", request, self._timeout_s, lambda answer: bytes(answer.outcomes)
        )

    def abort(
        self,
        owner_id: int,
        grant_id: int,
        slots: SlotArray | None = None,
        all_shards: bool = False,
    ) -> Future[None]:
        """Give slots of a grant back; this process writes to them no more.

        Args:
            owner_id: attachment that reserved; 0: this one.
            grant_id: the grant.
            slots: which; None: all that are left. An empty array does nothing.
            all_shards: no other writer was ever told about them.
        """
        done: Future[None] = Future()
        done.set_result(None)
        if slots is not None and not len(slots):
            return done
        try:
            current = self._active()
        except KVStoreError:
            return done  # the daemon takes the slots back by itself when the lock is gone
        request = pb.AbortRequest(
            attachment_id=current.id,
            grant_id=grant_id,
            owner_id=owner_id,
            slots=b"" if slots is None else pack_slot_names(slots),
            all_shards=all_shards,
        )
        return self._link.submit("Abort", request, self._timeout_s, lambda _answer: None)
