"""Copies between the engine's KV cache and slots, off the engine's thread.

A `Copier` takes copies in order and calls back, on a thread of its own, when one is over. On a CPU
a copy is a native call that does not hold the GIL; on a GPU (`cuda`) it is DMA behind an event of the
compute stream.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.attach.slabs import ANNOUNCEMENT_SECONDS
from kvstore.connectors.vllm.geometry import Geometry
from kvstore.connectors.vllm.guard import log_once
from kvstore.connectors.vllm.store import Attachment, Held
from kvstore.errors import AttachmentLost, KVStoreError
from kvstore.memory import copy_batch
from kvstore.syncpoint import reach

__all__ = ["ATTACH_SECONDS", "Copier", "CpuCopier", "Lane", "Patience", "SlotRun"]

# How much later than the scheduler a worker may find a daemon that was restarted.
ATTACH_SECONDS: Final = 2.0
# How long a store waits before it copies. The step that computed its blocks is not over: tokens
# are still to be sampled and handed out, on the same processors.
_LAG_SECONDS: Final = 0.02
# How long an engine waits for a slab that a store of blocks with new owners is still to be copied to.
_SLAB_SECONDS: Final = 0.02

U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Slots to copy from or to.

    Attributes:
        slots: shape (n,).
        boot_id: daemon run that granted them.
        writer_id: the attachment that may write to them; 0 for reading.
    """

    slots: NDArray[np.void]
    boot_id: bytes
    writer_id: int = 0


class Copier(Protocol):
    """Copies in the background. Every method returns at once."""

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
        """Copy slots into engine blocks.

        Args:
            blocks: engine blocks, shape (n,); nobody else touches them until `done`.
            run: leased slots.
            skip: engine blocks at the head of the first slot that are not wanted.
            done: called with what is right now, shape (n,): copied whole, from a slot that was
                still the granted one afterwards.
            landed: whoever gives it allows the copier to call `done` early, when everything is
                submitted and the compute stream waits for it. Then it is called once the bytes are
                there, with whether they are what `done` said they would be. If not, what was
                computed from them must not be used; see `settle`.
            idle: whether nobody minds the compute stream's waiting.

        Returns:
            Whether `done` was called early, so that `landed` will be called.
        """

    def settle(self) -> None:
        """Wait until each load whose `done` was called early has called `landed`."""

    def reuse(self, blocks: NDArray[np.int32] | None) -> None:
        """Let nothing write to blocks that a store still reads; these have new owners.

        Args:
            blocks: shape (n,); None: it may be any.
        """

    def store(self, blocks: NDArray[np.int32], run: SlotRun, done: Callable[[bool], None]) -> None:
        """Copy engine blocks into slots.

        Args:
            blocks: shape (slots, engine blocks per slot); nobody writes them until `done`.
            run: granted slots.
            done: called with whether all bytes are in place.
        """

    def close(self) -> None:
        """Begin nothing new, and wait for the copy under way."""


class Patience:
    """How long a load may still wait for its daemon, counted from when it was asked for.

    Loads wait one after the other: with a patience of its own for each, the last of many would be
    reported a minute after an engine could have begun to compute.
    """

    def __init__(self) -> None:
        """The load is asked for now."""
        self._until = time.monotonic() + ATTACH_SECONDS

    def left(self) -> float:
        """Return the seconds left, 0 at least."""
        return max(0.0, self._until - time.monotonic())


class Lane:
    """One thread that works off calls in order."""

    def __init__(self, name: str, begin: Callable[[], None] | None = None) -> None:
        """Start the thread.

        Args:
            name: of the thread.
            begin: called on it first.
        """
        self._begin = begin
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Call it on the thread, after those before."""
        self._calls.put(call)

    def _run(self) -> None:
        call = self._begin or self._calls.get()
        while call is not None:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - the thread's boundary
                log_once(logging.ERROR, "a copy's end failed: %r", error, exc_info=True)
            call = self._calls.get()

    def close(self) -> None:
        """Work off what was submitted, then stop."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()


class _Reading:
    """Blocks that a store reads until `over`; somebody waits for that once it is `wanted`.

    One that is over before it has begun was given up: it does not begin.
    """

    __slots__ = ("before", "begin_at", "blocks", "over", "wanted")

    def __init__(self, blocks: list[int], before: set[_Reading]) -> None:
        self.blocks = blocks
        # Earlier ones, not over, of some of the blocks: the daemon restarted meanwhile.
        self.before = before
        self.begin_at = time.monotonic() + _LAG_SECONDS
        self.wanted = threading.Event()
        self.over = threading.Event()

    def wait_turn(self) -> None:
        """Let the step end first, unless somebody waits."""
        left = self.begin_at - time.monotonic()
        if left > 0:
            self.wanted.wait(left)


class CpuCopier:
    """Copies within this process's memory, loads and stores on a thread each."""

    def __init__(
        self, geometry: Geometry, attachment: Attachment, shard: int, group_blocks: int
    ) -> None:
        """Start the threads.

        Args:
            geometry: of the KV cache.
            attachment: that maps the slots.
            shard: that this rank holds.
            group_blocks: engine blocks per slot.
        """
        self._geometry = geometry
        self._attachment = attachment
        self._shard = shard
        self._group_blocks = group_blocks
        self._loads: Final = Lane("kvstore-load")
        self._stores: Final = Lane("kvstore-store")
        # Engine block -> the store that reads it; the engine's thread alone uses it.
        self._reading: dict[int, _Reading] = {}
        self._guard = threading.Lock()
        # Stores that the engine's thread waits for, and whether they wait for a slab in their turn.
        self._needed: set[_Reading] = set()
        self._stuck = False

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
        """See `Copier.load`. Never early."""
        patience = Patience()
        self._loads.submit(lambda: done(self._load(blocks, run, skip, patience)))
        return False

    def _load(
        self, blocks: NDArray[np.int32], run: SlotRun, skip: int, patience: Patience
    ) -> NDArray[np.bool_]:
        right = np.zeros(len(blocks), np.bool_)
        try:
            self._attachment.wait_run(run.boot_id, patience.left())
            with self._attachment.using(run.slots, boot_id=run.boot_id) as held:
                held.map(self._shard, patience.left())
                cache, stored, lengths = self._geometry.pair(
                    blocks, held.addresses(self._shard), skip, self._group_blocks
                )
                half = len(lengths) // 2
                copy_batch(cache[:half], stored[:half], lengths[:half])
                reach("load.copied_half")
                copy_batch(cache[half:], stored[half:], lengths[half:])
                current = held.current(self._shard)
            # A daemon that is gone raises no generation any more.
            if self._attachment.alive and self._attachment.boot_id == run.boot_id:
                right[:] = current[(skip + np.arange(len(blocks))) // self._group_blocks]
        except KVStoreError as error:
            log_once(logging.WARNING, "a load could not be done: %s", error)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: fail this load
            log_once(logging.ERROR, "a load failed: %r", error, exc_info=True)
        return right

    def store(self, blocks: NDArray[np.int32], run: SlotRun, done: Callable[[bool], None]) -> None:
        """See `Copier.store`."""
        named = blocks.ravel().tolist()
        others = {other for block in named if (other := self._reading.get(block))}
        others.update(*(other.before for other in others))
        reading = _Reading(named, {other for other in others if not other.over.is_set()})
        for block in named:
            self._reading[block] = reading

        def copy() -> None:
            copied = False
            try:
                reading.wait_turn()
                copied = self._store(blocks, run, reading)
            finally:
                # Whatever happens: the engine's thread waits for this.
                reading.over.set()
                done(copied)

        self._stores.submit(copy)
        for other in {r for r in self._reading.values() if r.over.is_set()}:
            self._forget(other)

    def reuse(self, blocks: NDArray[np.int32] | None) -> None:
        """See `Copier.reuse`. Waits for copying, but not for slabs: then less is stored."""
        if not self._reading:
            return
        wanted = list(self._reading) if blocks is None else blocks.tolist()
        read = {r for block in wanted if (r := self._reading.get(block))}
        read.update(*(reading.before for reading in read))
        if not read:
            return
        with self._guard:
            self._needed = read
            if self._stuck:
                self._give_up()
        self._hurry()
        for reading in read:
            reading.over.wait()
            self._forget(reading)
        with self._guard:
            self._needed = set()

    def _give_up(self) -> None:
        """Let the engine go on; the caller holds the lock, and none of these has begun."""
        for reading in self._needed:
            reading.over.set()

    def _hurry(self) -> None:
        """Let no store lag: they are copied in order, so those before a wanted one as well."""
        for reading in set(self._reading.values()):
            reading.wanted.set()

    def _forget(self, reading: _Reading) -> None:
        for block in reading.blocks:
            if self._reading.get(block) is reading:
                del self._reading[block]

    def settle(self) -> None:
        """See `Copier.settle`: there is nothing to wait for."""

    def _begin(self, held: Held, reading: _Reading) -> bool:
        """On the stores' thread: map a store's slots; return whether its blocks may be read.

        A slab's announcement may still be on its way, which is no reason for an engine to wait: what
        it needs is given up then, this store and those behind it.
        """
        try:
            held.map(self._shard, _SLAB_SECONDS)
        except AttachmentLost:
            with self._guard:
                self._stuck = True
                self._give_up()
            try:
                held.map(self._shard, ANNOUNCEMENT_SECONDS)
            finally:
                with self._guard:
                    self._stuck = False
        return not reading.over.is_set()

    def _store(self, blocks: NDArray[np.int32], run: SlotRun, reading: _Reading) -> bool:
        try:
            with self._attachment.using(
                run.slots, boot_id=run.boot_id, writer_id=run.writer_id
            ) as held:
                if not self._begin(held, reading):
                    return False
                cache, stored, lengths = self._geometry.pair(
                    blocks.ravel(), held.addresses(self._shard), 0, self._group_blocks
                )
                copy_batch(stored, cache, lengths)
        except KVStoreError as error:
            log_once(logging.WARNING, "a store could not be done: %s", error)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: fail this store
            log_once(logging.ERROR, "a store failed: %r", error, exc_info=True)
        else:
            return True
        return False

    def close(self) -> None:
        """See `Copier.close`."""
        self._hurry()
        self._loads.close()
        self._stores.close()
