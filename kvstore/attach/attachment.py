"""The bond between this process and the daemon: one Attach stream, kept up for ever.

A thread attaches, dispatches events, and attaches again (as a new incarnation) when the stream
breaks. Whoever wants to copy asks for the slots with `using`, which names the daemon run and, for
writing, the attachment that the slots were granted to: a slot's name says nothing by itself, and
after a restart the same name means other bytes.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from kvstore.address import machine_id
from kvstore.attach.calls import Calls
from kvstore.attach.incarnation import Incarnation
from kvstore.attach.mapped import Pins
from kvstore.attach.prefault import Rest
from kvstore.attach.times import TimesLog
from kvstore.attach.upstream import UpStream
from kvstore.attach.usage import UsageLog
from kvstore.errors import AttachmentLost, DeadlineExceeded, KVStoreError, ServerUnavailable
from kvstore.link import Link
from kvstore.process import leave_with_process
from kvstore.proto import kvstore_pb2 as pb
from kvstore.wire import (
    PROTOCOL_VERSION,
)

__all__ = ["Attachment"]

_log: Final = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS: Final = 0.05
# On one machine asking costs microseconds, and a daemon that was restarted is back in a second.
_LONGEST_LOCAL_PAUSE_SECONDS: Final = 0.2
_LONGEST_PAUSE_SECONDS: Final = 1.0
# Daemon runs that are remembered as over.
_MOST_ENDED_RUNS: Final = 16
# After Detach the daemon ends the stream at once; a stalled one must not hold up an exit.
_GOODBYE_SECONDS: Final = 1.0


class Attachment(Calls):
    """Keeps this process attached.

    Every method may be called from any thread; none blocks unless it takes a timeout.

    Attributes:
        name: of the client, for the daemon's logs.
        usage: what the client did, sent with heartbeats.
        times: how long it took, likewise.
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
        super().__init__(link, timeout_s)
        self.name = name
        self.usage = UsageLog()
        self.times = TimesLog()
        self._pid = os.getpid()
        self._shards = tuple(shards)
        self._map_memory = map_memory
        self._state = threading.Condition()
        self._current: Incarnation | None = None
        self._call: Any = None
        self._problem = "not attached yet"
        self._settled = False
        self._unmappable_boot: bytes = b""
        self._ended_runs: deque[bytes] = deque(maxlen=_MOST_ENDED_RUNS)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._on_grant_revoked: list[Callable[[int, int], None]] = []
        self._devices: tuple[str, ...] = ()
        self._pins: Pins | None = None
        self._rest = Rest()

    def start(self) -> None:
        """Begin to attach, in the background. Idempotent."""
        with self._state:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="kvstore-attach", daemon=True)
        leave_with_process(self)
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
    def streams_only(self) -> bool:
        """Whether it is known that the pool cannot be mapped from this process."""
        current = self._current
        return current is not None and not current.mappable

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

    def wait_run(self, boot_id: bytes, timeout_s: float) -> bool:
        """Wait until attached to one run of the daemon.

        Another process of the same engine may have found a daemon that was restarted a moment
        before this one does.

        Returns:
            True then; False when the time is up, or as soon as waiting is idle: this process was
            attached to that run and is not any more, or cannot map its memory.
        """

        def there() -> bool:
            return self.alive and self.boot_id == boot_id

        def never() -> bool:
            ended = boot_id in self._ended_runs and self.boot_id != boot_id
            return ended or self.streams_only or self._closing.is_set()

        with self._state:
            self._state.wait_for(lambda: there() or never(), timeout_s)
        return there()

    def _active(self) -> Incarnation:
        self._link.check()
        current = self._current
        if current is None or not current.active:
            raise AttachmentLost(self._problem)
        return current

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        local = self._link.address.local
        longest = _LONGEST_LOCAL_PAUSE_SECONDS if local else _LONGEST_PAUSE_SECONDS
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                again = self._serve()
                problem = "the daemon ended the attachment"
            except (ServerUnavailable, DeadlineExceeded) as error:
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
            if time.monotonic() - began > longest:
                pause = _FIRST_PAUSE_SECONDS
            # Jitter: a hundred clients of a daemon that is back do not come all at once.
            self._closing.wait(pause * (0.5 + secrets.randbelow(1000) / 1000))
            pause = min(2 * pause, longest)

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
                    client=self.name,
                    pid=os.getpid(),
                    map_memory=mapping,
                    shards=self._shards,
                    devices=(told := self._devices),
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
                    if not self._attached(hello.boot_id, event.attached, up, mapping, told):
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

    def use_devices(self, uuids: Sequence[str], pins: Pins | None = None) -> None:
        """Say whose device memory leases may name, now and after attaching again.

        Args:
            uuids: devices that everybody who uses this attachment's leases can open.
            pins: pins the slabs of this process for its device.
        """
        with self._state:
            changed, self._devices = self._devices != tuple(uuids), tuple(uuids)
            if pins is not None:
                self._pins = pins
            current = self._current
            if current is not None and changed:
                current.tell_devices(self._devices)
            if current is not None and pins is not None:
                current.slabs.pin_with(pins)

    def wait_filled(self, timeout_s: float, groups: Collection[int] = ()) -> bool:
        """Wait until the slabs announced so far are pinned, or their page tables filled.

        Args:
            timeout_s: at most.
            groups: slab groups that must have been announced; unless memory is pinned, those beyond
                the first few GiB are not filled before they are used.

        Returns:
            True then; False when the time is up, or there is no attachment.
        """
        current = self._current
        return current is not None and current.slabs.wait_filled(timeout_s, groups)

    @property
    def opens_devices(self) -> bool:
        """Whether the daemon's device memory can be opened, as far as it is known."""
        current = self._current
        return current is None or current.slabs.opens_devices

    @property
    def unfilled(self) -> int:
        """How often memory could not be faulted in ahead, under this attachment."""
        current = self._current
        return current.slabs.unfilled if current else 0

    def rest(self, resting: bool) -> None:
        """Let background work on mapped memory wait while this process needs its processors.

        Copies do not depend on it, they only become faster; whoever copies nothing rests for good.
        """
        self._rest.set(resting)

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

    def _attached(
        self,
        boot_id: bytes,
        attached: pb.Attached,
        up: UpStream,
        mapping: bool,
        told: tuple[str, ...],
    ) -> bool:
        """Become an incarnation; return False to attach again without mapping."""
        current = Incarnation(boot_id, attached, up, self._rest)
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
            if self._devices != told:
                current.tell_devices(self._devices)
            if self._pins is not None:
                current.slabs.pin_with(self._pins)
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
            if current is not None and current.boot_id not in self._ended_runs:
                self._ended_runs.append(current.boot_id)
            self._state.notify_all()
        if current is not None:
            _log.info("attachment %d ended: %s", current.id, problem)
            current.end(f"the attachment ended: {problem}")

    def _beat(self) -> pb.Heartbeat:
        current = self._current
        if current is not None:
            current.flush_releases(lambda batch: self._send_releases(current, batch))
        return pb.Heartbeat(usage=self.usage.take(), times=self.times.take())

    def close(self, timeout_s: float) -> None:
        """Let no new copy begin, wait for those under way, then leave. Idempotent.

        When copies take longer than `timeout_s` the stream breaks without a Detach: the daemon
        keeps the slots until the lock is gone, which is when the last copy has ended.
        """
        if os.getpid() != self._pid:
            return  # the parent's memory, locks and threads are none of a forked child's business
        self._closing.set()
        if self._pins is not None:
            self._pins.hurry()
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
