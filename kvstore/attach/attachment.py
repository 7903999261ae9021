"""The bond between this process and the daemon: one Attach stream, kept up for ever.

A thread attaches, dispatches events, and attaches again (as a new incarnation) when the stream
breaks. Whoever wants to copy asks for the slots with `using`, which names the daemon run and, for
writing, the attachment that the slots were granted to: a slot's name says nothing by itself, and
after a restart the same name means other bytes.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.address import machine_id
from kvstore.attach import incarnation as incarnations
from kvstore.attach.incarnation import Incarnation
from kvstore.attach.lease import Grant, Lease
from kvstore.attach.slabs import SlabTable
from kvstore.attach.upstream import UpStream
from kvstore.attach.usage import UsageLog
from kvstore.errors import AttachmentLost, InvalidRequest, KVStoreError, ServerUnavailable
from kvstore.handle import SpaceHandle
from kvstore.keys import Keys
from kvstore.link import Link, failed
from kvstore.proto import kvstore_pb2 as pb
from kvstore.wire import (
    ALL_SHARDS,
    MAX_KEYS,
    PROTOCOL_VERSION,
    Shortage,
    SlotArray,
    pack_parents,
    pack_slot_names,
    unpack_slots,
)

__all__ = ["Attachment", "Held", "new_id"]

_log: Final = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 1.0
# After Detach the daemon ends the stream at once; a stalled one must not hold up an exit.
_GOODBYE_SECONDS: Final = 1.0

_living: weakref.WeakSet[Attachment] = weakref.WeakSet()


def new_id() -> int:
    """Return a random non-zero 63-bit number."""
    return 1 + secrets.randbelow((1 << 63) - 1)


def _milliseconds(seconds: float) -> int:
    return max(0, min(round(seconds * 1e3), 0xFFFFFFFF))


class Held:
    """Slots whose memory stays mapped until `done`, whatever happens to the attachment.

    A context manager; a copy that ends on another thread calls `done` there instead.
    """

    def __init__(self, slabs: SlabTable, slots: SlotArray) -> None:
        """Count a copy on the slots' groups.

        Raises:
            AttachmentLost: no copy may begin.
        """
        self._slabs = slabs
        self._slots = slots
        self._groups: list[int] | None = np.unique(slots["group"]).tolist()
        slabs.use(self._groups or ())

    def addresses(self, shard: int) -> NDArray[np.uint64]:
        """Return the address of each slot of a shard, shape (n,).

        Raises:
            AttachmentLost: a group was not announced within a second, or cannot be mapped.
        """
        return self._slabs.addresses(self._slots, shard)

    def current(self, shard: int) -> NDArray[np.bool_]:
        """Return which slots still have the generation they were granted with, shape (n,).

        Ask after copying: it vouches for bytes copied before.

        Raises:
            AttachmentLost: see `addresses`.
        """
        return self._slabs.current(self._slots, shard)

    def done(self) -> None:
        """Say that nothing is copied any more. Idempotent, from any thread."""
        groups, self._groups = self._groups, None
        if groups is not None:
            self._slabs.unuse(groups)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Call `done`."""
        self.done()


class Attachment:
    """Keeps this process attached.

    Every method may be called from any thread; none blocks unless it takes a timeout.

    Attributes:
        name: of the client, for the daemon's logs.
        usage: what the client did, sent with heartbeats.
    """

    def __init__(
        self,
        link: Link,
        *,
        name: str,
        timeout_s: float,
        shards: Sequence[int] = (),
        map_memory: bool = True,
    ) -> None:
        """Prepare; `start` attaches.

        Args:
            link: channel to the daemon.
            name: of the client.
            timeout_s: for calls that do not wait on purpose.
            shards: shards that this process copies; empty: all.
            map_memory: map the pool where that is possible.
        """
        self.name = name
        self.usage = UsageLog()
        self._link = link
        self._timeout_s = timeout_s
        self._shards = tuple(shards)
        self._map_memory = map_memory
        self._state = threading.Condition()
        self._current: Incarnation | None = None
        self._call: Any = None
        self._problem = "not attached yet"
        self._settled = False
        self._unmappable_boot: bytes = b""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_grant_revoked: list[Callable[[int, int], None]] = []

    def start(self) -> None:
        """Begin to attach, in the background. Idempotent."""
        with self._state:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="kvstore-attach", daemon=True)
        _keep_track(self)
        self._thread.start()

    @property
    def id(self) -> int:
        """Attachment id now; 0 when there is none."""
        current = self._current
        return current.id if current else 0

    @property
    def boot_id(self) -> bytes:
        """Daemon run that this is attached to; empty when there is none."""
        current = self._current
        return current.boot_id if current else b""

    @property
    def alive(self) -> bool:
        """Whether leases and grants can be asked for now."""
        current = self._current
        return current is not None and current.active

    @property
    def mappable(self) -> bool:
        """Whether memory is mapped; False also while nothing is known."""
        current = self._current
        return current is not None and current.mappable

    @property
    def lease_cap_bytes(self) -> int:
        """Most bytes that leases of this attachment may hold together; 0: no cap is known."""
        current = self._current
        return current.lease_cap_bytes if current else 0

    def wait_active(self, timeout_s: float) -> bool:
        """Wait until leases and grants can be asked for.

        Returns:
            True then; False when the time is up, or as soon as it is known that the pool cannot
            be mapped from here (streams work then).
        """
        with self._state:
            self._state.wait_for(
                lambda: self.alive or self._settled or self._closing.is_set(), timeout_s
            )
        return self.alive

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

    def _active(self) -> Incarnation:
        self._link.check()
        current = self._current
        if current is None or not current.active:
            raise AttachmentLost(self._problem)
        return current

    def acquire(
        self,
        space: SpaceHandle,
        keys: Keys,
        *,
        deadline_s: float = 0.0,
        prefill_tokens_per_second: float = 0.0,
        priority: int = 0,
    ) -> Future[Lease]:
        """Ask for a lease on the leading run of `keys`; at most the first 32,768 are looked at.

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
            prefill_tokens_per_second=prefill_tokens_per_second,
            priority=priority,
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
    ) -> Future[Grant]:
        """Ask for up to `count` empty slots.

        Args:
            space: whose blocks will fill them.
            count: at least 1.
            writers: attachment id per shard; empty: this process writes all shards.
            deadline_s: how long to wait for the first slot.
            protect: keys whose chains must not be evicted to make room.

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
        )

        def accept(answer: pb.ReserveResponse) -> Grant:
            return Grant(
                id=grant_id,
                owner_id=current.id,
                boot_id=current.boot_id,
                writers=tuple(writers),
                slots=unpack_slots(answer.slots),
                shortage=Shortage(answer.shortage),
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

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                again = self._serve()
                problem = "the daemon ended the attachment"
            except ServerUnavailable as error:
                again, problem = False, str(error)
            except KVStoreError as error:
                again, problem = False, str(error)
                if not self._closing.is_set():
                    _log.warning("cannot attach: %s", error)
            except Exception:  # noqa: BLE001 - thread boundary: attach again
                again, problem = False, "attaching failed, see the log"
                _log.exception("attaching failed")
            self._finish(problem)
            if again:
                continue
            if time.monotonic() - began > _LONGEST_PAUSE_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            # Jitter: a hundred clients of a daemon that is back do not come all at once.
            self._closing.wait(pause * (0.5 + secrets.randbelow(1000) / 1000))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _serve(self) -> bool:
        """Attach and dispatch events until the stream ends.

        Returns:
            Whether to attach again at once.
        """
        hello = self._hello()
        mapping = (
            self._map_memory
            and hello.machine_id == machine_id()
            and hello.boot_id != self._unmappable_boot
        )
        up = UpStream(self._beat)
        up.send(
            pb.AttachUp(
                open=pb.AttachOpen(
                    client=self.name, pid=os.getpid(), map_memory=mapping, shards=self._shards
                )
            )
        )
        events = self._link.stream("Attach", up, None)
        try:
            for event in events:
                kind = event.WhichOneof("event")
                if kind == "attached":
                    # Two runs of the daemon could have answered: the stream belongs to this one
                    # only if the same one answers before and after it was opened.
                    if self._hello().boot_id != hello.boot_id:
                        return True
                    if not self._attached(hello.boot_id, event.attached, up, mapping):
                        return True
                elif kind == "boot_end" or self._closing.is_set():
                    return False
                elif self._current is not None:
                    self._current.dispatch(event)
                    if self._current.active and not self._settled:
                        self._announce("")
                    if kind == "grant_revoked":
                        self._revoked(event)
        finally:
            up.end()
            events.close()  # type: ignore[attr-defined]
        return False

    def on_grant_revoked(self, callback: Callable[[int, int], None]) -> None:
        """Call `callback(owner_id, grant_id)` when a grant's owner is gone.

        Whoever writes to its slots stops, and aborts what it was to write: nobody will say any
        more what goes there. Called on a background thread; must not block.
        """
        self._on_grant_revoked.append(callback)

    def _revoked(self, event: Any) -> None:
        for callback in list(self._on_grant_revoked):
            callback(event.grant_revoked.owner_id, event.grant_revoked.grant_id)

    def _hello(self) -> pb.HelloResponse:
        request = pb.HelloRequest(protocol_version=PROTOCOL_VERSION, client=self.name)
        hello: pb.HelloResponse = self._link.call("Hello", request, self._timeout_s)
        if hello.protocol_version != PROTOCOL_VERSION:
            raise KVStoreError(
                f"the daemon speaks protocol {hello.protocol_version}, this is {PROTOCOL_VERSION}"
            )
        return hello

    def _attached(self, boot_id: bytes, attached: pb.Attached, up: UpStream, mapping: bool) -> bool:
        """Become an incarnation; return False to attach again without mapping."""
        current = Incarnation(boot_id, attached, up)
        if mapping:
            try:
                current.take_lock(attached.control_path, attached.lock_offset)
            except OSError as error:
                _log.info("the pool cannot be mapped (%s): streaming instead", error)
                self._unmappable_boot = boot_id
                return False
            up.send(pb.AttachUp(locked=pb.AttachLocked()))
        up.start_beating(attached.heartbeat_interval_ms / 1e3 or 1.0)
        with self._state:
            self._current = current
        if not mapping:
            self._announce("the pool cannot be mapped from this process")
        return True

    def _announce(self, problem: str) -> None:
        """Tell waiters that it is decided what this attachment can do."""
        with self._state:
            self._problem = problem
            self._settled = True
            self._state.notify_all()

    def _finish(self, problem: str) -> None:
        with self._state:
            current, self._current = self._current, None
            self._problem = problem
            self._settled = False
            self._state.notify_all()
        if current is not None:
            _log.info("attachment %d ended: %s", current.id, problem)
            current.end(f"the attachment ended: {problem}")

    def _beat(self) -> pb.Heartbeat:
        current = self._current
        if current is not None:
            current.flush_releases(lambda batch: self._send_releases(current, batch))
        return pb.Heartbeat(usage=self.usage.take())

    def close(self, timeout_s: float) -> None:
        """Let no new copy begin, wait for those under way, then leave. Idempotent.

        When copies take longer than `timeout_s` the stream breaks without a Detach: the daemon
        keeps the slots until the lock is gone, which is when the last copy has ended.
        """
        self._closing.set()
        current = self._current
        if current is not None:
            # The last usage would otherwise wait for a heartbeat that never comes.
            current.farewell(self._beat())
            current.end("the client is closed", detach=True)
            current.slabs.wait_idle(timeout_s)
        with self._state:
            self._state.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_GOODBYE_SECONDS)

    def abandon(self) -> None:
        """Drop the lock without a word: what a forked child does."""
        current = self._current
        if current is not None:
            current.drop_lock()


def _keep_track(attachment: Attachment) -> None:
    """Have forks and the interpreter's exit find an attachment."""
    if not _hooks:
        _hooks.append(True)
        os.register_at_fork(
            before=incarnations.fork_guard.acquire,
            after_in_parent=incarnations.fork_guard.release,
            after_in_child=_after_fork_in_child,
        )
        atexit.register(_leave_all)
    _living.add(attachment)


_hooks: Final[list[bool]] = []


def _after_fork_in_child() -> None:
    for attachment in list(_living):
        attachment.abandon()
    _living.clear()
    incarnations.fork_guard.release()


def _leave_all() -> None:
    for attachment in list(_living):
        attachment.close(_GOODBYE_SECONDS)
