"""Copies between a KV cache on a GPU and slots, ordered on the GPU.

The engine's thread calls `load`, `store` and `reuse`, and waits for nothing there; a copy is submitted
in the call, unless

* so much is on its way already that submitting would block: then a load is submitted when one
  before it has ended;
* the CPU must help with it: then a thread per direction submits it (`detour`);
* its slots cannot be touched yet, because this process has not found the daemon's new run, or has
  not mapped a slab, whose announcement may still be on its way: then a load waits for that on a
  thread of its own, and a store on the detour's.

Whenever it is submitted, it comes after what the compute stream had to do when it was asked for.
Threads wait for copies to end, in the order of submission: one for loads from host slots, one
for those that a thread has to submit, one for loads within the GPU's memory, one for stores.

A load may be reported before its bytes are there (`landed` is given, the engine has nothing else to
do, and little else is on its way): the compute stream then waits for it on the GPU, so the next
step is prepared meanwhile. That is only safe because the slots were the granted ones *after*
everything was submitted, and because `settle` compares them once more before the engine may pass
on anything computed from them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.attach.mapped import DEVICE, PAGEABLE
from kvstore.connectors.vllm.copier import Lane, Patience, SlotRun
from kvstore.connectors.vllm.cuda.detour import Detour
from kvstore.connectors.vllm.cuda.events import Events
from kvstore.connectors.vllm.cuda.flight import Flight, submit
from kvstore.connectors.vllm.cuda.pipe import Device, Mover, Pipe
from kvstore.connectors.vllm.cuda.readers import Readers
from kvstore.connectors.vllm.cuda.routes import Job, Route, job_of, route_of
from kvstore.connectors.vllm.geometry import Geometry
from kvstore.connectors.vllm.guard import log_once, tell_failed
from kvstore.connectors.vllm.store import Attachment
from kvstore.errors import KVStoreError

__all__ = ["MOST_CHUNK_BYTES", "CudaCopier"]

# Of each buffer in the rings: large enough that submitting is cheap.
MOST_CHUNK_BYTES: Final = 64 << 20
_BOUNCE_CHUNK_BYTES: Final = 16 << 20
# Loads that are submitted at a time (40 ms). More would fill the GPU's queues, where submitting
# blocks; and a load is reported early only while no more than this is on its way, because the
# compute stream, and whoever comes next, waits for it.
_INBOUND_BYTES: Final = 2 << 30
# The same where each is small: it uploads rows at least once, and a pipe takes twice as many uploads
# before it waits for the first one, which comes after the engine's last step.
_INBOUND_LOADS: Final = 32


class CudaCopier:
    """See `Copier`."""

    def __init__(
        self,
        device: Device,
        make_mover: Callable[[NDArray[np.int64]], Mover],
        geometry: Geometry,
        attachment: Attachment,
        shard: int,
        group_blocks: int,
        *,
        device_number: int,
        multiprocessors: int,
        serving: Callable[[], None] = lambda: None,
        chunk_bytes: int = MOST_CHUNK_BYTES,
        bounce_chunk_bytes: int = _BOUNCE_CHUNK_BYTES,
        inbound_bytes: int = _INBOUND_BYTES,
    ) -> None:
        """Take streams and buffers, all or none; compile kernels, start threads.

        Args:
            device: the runtime.
            make_mover: makes kernels, given pinned host memory for their rows.
            geometry: of the KV cache.
            attachment: that maps the slots.
            shard: that this rank holds.
            group_blocks: engine blocks per slot.
            device_number: of the GPU in this process.
            multiprocessors: it has so many.
            serving: called with each copy.
            chunk_bytes: of each of the six buffers on the GPU.
            bounce_chunk_bytes: of each of those for what is not pinned.
            inbound_bytes: loads that are submitted at a time.
        """
        self._serving = serving
        self._inbound_bytes = inbound_bytes
        self._device = device
        self._device_number = device_number
        self._geometry = geometry
        self._attachment = attachment
        self._shard = shard
        self._group_blocks = group_blocks
        route = route_of(geometry, group_blocks)

        def make_pipe(*, to_cache: bool, bounce: bool = False, here: bool = False) -> Pipe:
            return Pipe(
                device,
                make_mover,
                geometry,
                Route.KERNEL if here else route,
                to_cache=to_cache,
                chunk_bytes=bounce_chunk_bytes if bounce else chunk_bytes,
                device_programs=4 * multiprocessors,
                bounce=bounce,
            )

        with contextlib.ExitStack() as taken:

            def own(pipe: Pipe) -> Pipe:
                taken.callback(pipe.close)
                return pipe

            def lane(name: str) -> Lane:
                one = Lane(name, self._use_device)
                taken.callback(one.close)
                return one

            self._events: Final = Events(device)
            self._spinning: Final = Events(device, spin=True)
            taken.callback(self._events.close)
            taken.callback(self._spinning.close)
            self._in: Final = own(make_pipe(to_cache=True))
            self._near: Final = own(make_pipe(to_cache=True, here=True))
            self._out: Final = own(make_pipe(to_cache=False))
            # Pinning takes seconds: the first copies may well need it. Made here, because an engine
            # may capture CUDA graphs next, which other threads must not disturb.
            self._detour: Final = Detour(
                lambda to_cache: make_pipe(to_cache=to_cache, bounce=True),
                self._use_device,
                device.event_synchronize,
            )
            taken.callback(self._detour.close)
            # Closed from the last to the first: what submits before those who wait for the end of it.
            self._stores: Final = lane("kvstore-store")
            self._loads: Final = lane("kvstore-load")
            self._near_loads: Final = lane("kvstore-near")
            self._slow_loads: Final = lane("kvstore-slow")
            taken.callback(self._detour.end)
            self._late_loads: Final = lane("kvstore-late")
            self._taken: Final = taken.pop_all()
        self._readers: Final = Readers(geometry.blocks)
        self._guard = threading.Lock()
        self._changed = threading.Condition(self._guard)
        self._early = 0
        # Loads of host slots that are not submitted yet, in order, and how many are, of how much.
        self._queue: deque[tuple[Flight, Job]] = deque()
        self._inbound = self._inbound_loads = 0
        self._submitting = threading.Lock()

    def _use_device(self) -> None:
        self._device.set_device(self._device_number)
        self._device.relax_capture()

    # Loads.

    def load(
        self,
        blocks: NDArray[np.int32],
        run: SlotRun,
        skip: int,
        done: Callable[[NDArray[np.bool_]], None],
        landed: Callable[[bool], None] | None = None,
        *,
        idle: bool = False,
    ) -> bool:
        """See `Copier.load`."""
        flight: Flight | None = None
        pipe, lane = self._in, self._loads
        try:
            self._serving()
            if not self._granted(run):
                self._load_late(self._begun(), None, blocks, run, skip, done)
                return False
            flight = self._board(run)
            if not flight.held.mapped(self._shard):
                self._load_late(flight.begun, flight, blocks, run, skip, done)
                return False
            job = self._job(flight, blocks, skip)
            if job.least == PAGEABLE:
                log_once(logging.INFO, "a load takes longer: its memory is not pinned yet")
                self._detour.submit(flight, lambda: job, to_cache=True)
                lane, landed = self._slow_loads, None
            elif job.least == DEVICE:
                # Not behind those that are on the bus.
                pipe, lane = self._near, self._near_loads
                spinning = self._spinning.take()
                self._events.give(flight.done)
                flight.done, flight.spins = spinning, True
                submit(pipe, flight, job, to_cache=True)
            else:
                flight.length = len(blocks) * self._geometry.block_bytes
                self._queue.append((flight, job))
                self._submit_queued()
                if not idle or not self._little(flight):
                    landed = None
            if landed is not None and not self._intact(flight, run):
                landed = None
            if landed is not None:
                self._device.stream_wait_event(self._device.compute_stream(), flight.done)
        except Exception as error:  # noqa: BLE001 - the boundary: fail this load
            tell_failed("load", error)
            if flight is None:
                done(np.zeros(len(blocks), np.bool_))
                return False
            flight.failed, landed = True, None
            flight.submitted.set()
        if landed is not None:
            with self._guard:
                self._early += 1
            done(np.ones(len(blocks), np.bool_))
        lane.submit(lambda: self._loaded(pipe, flight, run, skip, len(blocks), done, landed))
        return landed is not None

    def _load_late(
        self,
        begun: int,
        flight: Flight | None,
        blocks: NDArray[np.int32],
        run: SlotRun,
        skip: int,
        done: Callable[[NDArray[np.bool_]], None],
    ) -> None:
        """Load what this process cannot touch yet; see the module. Returns at once.

        Args:
            begun: recorded when the load was asked for.
            flight: the load, if the daemon's run is the one that this process is attached to; None:
                another process of the engine has found that run a moment before.
            blocks: see `load`, also for what follows.
            run: slots.
            skip: blocks that are not wanted.
            done: takes what is right.
        """
        patience = Patience()

        def load(flight: Flight | None) -> None:
            try:
                if flight is None:
                    self._attachment.wait_run(run.boot_id, patience.left())
                    flight = self._board(run, begun)
                flight.held.map(self._shard, patience.left())
                job = self._job(flight, blocks, skip)
            except Exception as error:  # noqa: BLE001 - the thread's boundary: fail this load
                tell_failed("load", error)
                if flight is None:
                    self._events.give(begun)
                else:
                    self._leave(flight)
                done(np.zeros(len(blocks), np.bool_))
                return
            self._detour.submit(flight, lambda: job, to_cache=True)
            late, count = flight, len(blocks)
            self._slow_loads.submit(
                lambda: self._loaded(self._in, late, run, skip, count, done, None)
            )

        self._late_loads.submit(lambda: load(flight))

    def _submit_queued(self) -> None:
        """Submit loads in their order, as many as the GPU's queues take without blocking."""
        with self._submitting:
            while True:
                with self._guard:
                    full = self._inbound_loads >= _INBOUND_LOADS
                    if not self._queue or full or self._inbound >= self._inbound_bytes:
                        return
                    flight, job = self._queue.popleft()
                    self._inbound += flight.length
                    self._inbound_loads += 1
                try:
                    submit(self._in, flight, job, to_cache=True)
                except Exception as error:  # noqa: BLE001 - the boundary: fail this load
                    tell_failed("load", error)
                    flight.failed = True
                    flight.submitted.set()

    def _little(self, flight: Flight) -> bool:
        """Return whether a load was submitted, and little else is on its way."""
        with self._guard:
            return flight.submitted.is_set() and (
                self._inbound <= max(self._inbound_bytes, flight.length)
            )

    def _intact(self, flight: Flight, run: SlotRun) -> bool:
        """Return whether a load that was submitted can be reported at once."""
        # From here on nothing that stops this process delays the copy.
        return (
            not flight.failed
            and self._granted(run)
            and bool(flight.held.current(self._shard).all())
        )

    def _granted(self, run: SlotRun) -> bool:
        # A daemon that is gone raises no generation any more.
        return self._attachment.alive and self._attachment.boot_id == run.boot_id

    def _loaded(
        self,
        pipe: Pipe,
        flight: Flight,
        run: SlotRun,
        skip: int,
        count: int,
        done: Callable[[NDArray[np.bool_]], None],
        landed: Callable[[bool], None] | None,
    ) -> None:
        """On the loads' thread: wait for a load, compare generations, say what is right."""
        places = (skip + np.arange(count)) // self._group_blocks
        right = np.zeros(count, np.bool_)
        # Those before it have ended; now it is submitted, and the next one behind it.
        self._submit_queued()
        self._rehearse(flight)
        try:
            if self._arrived("load", pipe, flight):
                current = flight.held.current(self._shard)
                # Reported early, it was checked against the daemon before; see `load`.
                if landed is not None or self._granted(run):
                    right = current[places]
        except KVStoreError as error:
            tell_failed("load", error)
        finally:
            try:
                self._leave(flight)
                if landed is None:
                    done(right)
                else:
                    landed(bool(right.all()))
            finally:
                # Who settles waits for this, and so do loads that are not submitted yet.
                with self._changed:
                    self._inbound -= flight.length
                    # Those that passed the queue have a length.
                    self._inbound_loads -= flight.length > 0
                    self._early -= landed is not None
                    self._changed.notify_all()

    def _rehearse(self, flight: Flight) -> None:
        """Compare generations for nothing, so that it is a matter of microseconds afterwards."""
        if not flight.failed:
            with contextlib.suppress(KVStoreError):
                flight.held.current(self._shard)

    def settle(self) -> None:
        """Wait until every load that was reported early has said `landed`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._early)

    # Stores.

    def store(self, blocks: NDArray[np.int32], run: SlotRun, done: Callable[[bool], None]) -> None:
        """See `Copier.store`."""
        flat = blocks.ravel()
        flight: Flight | None = None
        number = 0
        try:
            self._serving()
            flight = self._board(run)
            flight.read = self._events.take()
            at_once = flight.held.mapped(self._shard)
            job = self._job(flight, flat, 0) if at_once else None
            if job is not None and job.least != PAGEABLE:
                number = self._readers.add(flat, flight)
                submit(self._out, flight, job, to_cache=False)
            elif self._detour.admit(flight, len(flat) * self._geometry.block_bytes):
                number = self._readers.add(flat, flight)
                late = flight
                self._detour.submit(flight, lambda: job or self._job(late, flat, 0), to_cache=False)
            else:
                refused = flight
                self._stores.submit(lambda: self._refused(refused, done))
                return
        except Exception as error:  # noqa: BLE001 - the boundary: fail this store
            tell_failed("store", error)
            if flight is None:
                done(False)
                return
            flight.failed = True
            flight.submitted.set()
        self._stores.submit(lambda: self._stored(number, flight, done))

    def _refused(self, flight: Flight, done: Callable[[bool], None]) -> None:
        """On the stores' thread, because letting slots go may unmap them: nothing was begun."""
        self._leave(flight)
        done(False)

    def _stored(self, number: int, flight: Flight, done: Callable[[bool], None]) -> None:
        """On the stores' thread: wait for a store."""
        arrived = self._arrived("store", self._out, flight)
        self._readers.remove(number)
        self._detour.left(flight)
        self._leave(flight)
        done(arrived and not flight.spoiled)

    def reuse(self, blocks: NDArray[np.int32] | None) -> None:
        """See `Copier.reuse`: the compute stream waits; loads submitted later wait for it."""
        found = self._readers.find(blocks)
        try:
            self._order(found)
        except BaseException:
            # The engine goes on: they may read what the blocks' new owners have written.
            for flight in found.values():
                flight.given_up = flight.spoiled = True
            raise

    def _order(self, found: dict[int, Flight]) -> None:
        """Let the compute stream wait for stores; give up those that it would wait for too long."""
        for flight in found.values():
            if not flight.submitted.is_set():
                # On the detour. Rather store less than let the engine wait.
                if not self._detour.give_up(flight):
                    # It reads nothing, and those before it may take a second.
                    continue
                flight.submitted.wait()
            if flight.failed:
                self._detour.synchronize(False)
                if not flight.given_up:
                    self._out.synchronize()
        if found:
            wait, compute = self._device.stream_wait_event, self._device.compute_stream()
            self._readers.order(found, lambda event: wait(compute, event))

    # Both.

    def _begun(self) -> int:
        """Remember what the compute stream has to do before."""
        return self._events.recorded(self._device.compute_stream())

    def _board(self, run: SlotRun, begun: int = 0) -> Flight:
        """Keep the slots mapped, and remember what the compute stream has to do before.

        Args:
            run: the slots.
            begun: what it had to do when the copy was asked for, if that was before.
        """
        held = self._attachment.using(run.slots, boot_id=run.boot_id, writer_id=run.writer_id)
        with contextlib.ExitStack() as undo:
            undo.callback(held.done)
            if not begun:
                begun = self._begun()
                undo.callback(self._events.give, begun)
            flight = Flight(held, begun, 0, self._events.take())
            undo.pop_all()
        return flight

    def _job(self, flight: Flight, blocks: NDArray[np.int32], skip: int) -> Job:
        """Look up where blocks go; waits where slots are not mapped."""
        held, shard, group = flight.held, self._shard, self._group_blocks
        addresses, reach = held.places(shard)
        return job_of(
            self._geometry, blocks, addresses, reach, lambda: held.stretches(shard), skip, group
        )

    def _arrived(self, what: str, pipe: Pipe, flight: Flight) -> bool:
        """Wait for a copy; return whether it went well. Afterwards nothing of it is under way."""
        flight.submitted.wait()
        try:
            if not flight.failed:
                if flight.spins:
                    # Steps before it may take their time.
                    self._device.event_synchronize(flight.begun)
                self._device.event_synchronize(flight.done)
                return True
        except KVStoreError as error:
            tell_failed(what, error)
        try:
            self._quiet(pipe)
        except KVStoreError as error:
            tell_failed(what, error)
        return False

    def _quiet(self, pipe: Pipe) -> None:
        try:
            pipe.synchronize()
        finally:
            self._detour.synchronize(True, False)

    def _leave(self, flight: Flight) -> None:
        flight.held.done()
        (self._spinning if flight.spins else self._events).give(flight.done)
        for event in (flight.begun, flight.read):
            if event:
                self._events.give(event)

    def close(self) -> None:
        """See `Copier.close`."""
        self._taken.close()
