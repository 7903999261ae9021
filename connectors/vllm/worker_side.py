"""The connector's half in a worker: starts copies, reports what they came to.

Hooks run on the step thread and return at once, but for two waits. A block that has a new owner must
not be written while a store still reads it: on a CPU the hook waits, on a GPU the compute stream
does. And what a step computed from a load that was reported early is not passed on before the
load's bytes have been compared.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore import tracing
from kvstore.connectors.vllm.committer import Committer
from kvstore.connectors.vllm.copier import Copier, CpuCopier, SlotRun
from kvstore.connectors.vllm.geometry import Geometry, UnsupportedLayout, describe
from kvstore.connectors.vllm.guard import Unsafe, log_once
from kvstore.connectors.vllm.metadata import (
    REPORTS,
    Load,
    StepMeta,
    Store,
    WorkerInfo,
    WorkerReport,
)
from kvstore.connectors.vllm.pool_wait import PoolWait
from kvstore.connectors.vllm.space import EngineShape
from kvstore.connectors.vllm.stats import LoadTimer, StatsLog
from kvstore.connectors.vllm.store import Client
from kvstore.connectors.vllm.traces import begin_load, begin_store
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.connectors.vllm.cuda.pins import SlabPins

__all__ = ["WorkerSide"]

# At start-up the daemon answers in milliseconds, unless the machine is busy, or is not there.
_ATTACH_SECONDS: Final = 5.0


class WorkerSide:
    """State of one rank.

    Attributes:
        stats: what vLLM's own metrics show.
    """

    def __init__(
        self,
        engine: EngineShape,
        client: Client,
        *,
        tensor_rank: int,
        pipeline_rank: int,
        early_loads: bool = True,
        pool_wait_seconds: float = 0.0,
    ) -> None:
        """Wait for the KV cache to be registered.

        Args:
            engine: the engine.
            client: this process's.
            tensor_rank: within the tensor-parallel group.
            pipeline_rank: pipeline stage.
            early_loads: see `Settings`.
            pool_wait_seconds: likewise.
        """
        # Without reports, leases would end when loads are reported, not when their bytes are there.
        self._early_loads = early_loads and REPORTS
        self._engine = engine
        self._client = client
        self._rank = pipeline_rank * engine.tensor_parallel + tensor_rank
        self._pipeline_rank = pipeline_rank
        self._shard = engine.shard(pipeline_rank, tensor_rank)
        self._writes = engine.writes(tensor_rank)
        self._info = WorkerInfo(self._rank, self._shard, 0, "", refusal="no KV cache registered")
        self._copier: Copier | None = None
        self._pool_wait_seconds = pool_wait_seconds
        # On a GPU: pins memory, at this half's convenience, and waits for it at the start.
        self._pins: SlabPins | None = None
        self._pool_wait: PoolWait | None = None
        self._committer: Committer | None = None
        self._block_bytes, self._device_uuid = 0, ""
        # Steps are computed by this machine's processors.
        self._computes_here = False
        self._meta: StepMeta | None = None
        self._prepared = self._loaded = self._submitted = 0
        self._delayed: list[Store] = []
        self.stats = StatsLog(client.report_time, lambda: client.attachment.unfilled)
        # When stores began, by job, and their spans.
        self._store_begun: dict[int, tuple[float, tracing.Span]] = {}
        # Written by other threads:
        self._lock = threading.Lock()
        self._finished: list[str] = []
        self._bad: list[int] = []
        self._report = WorkerReport()
        self._unsafe = False
        # Loads reported early: in this step, and before it.
        self._early = self._unsettled = False
        # For the step thread alone, after `finished`:
        self._errors: set[int] = set()

    def register(self, caches: Mapping[str, Any], blocks: int, context: str) -> None:
        """Take in the engine's KV cache.

        Args:
            caches: layer name to tensor.
            blocks: engine blocks in it.
            context: what else decides how its bytes are understood.
        """
        first = next(iter(caches.values()), None)
        first = first[0] if isinstance(first, list | tuple) else first
        kind = str(getattr(getattr(first, "device", None), "type", "none"))
        if kind not in ("cpu", "cuda"):
            self._refuse(f"a KV cache on {kind} is not supported, only on cpu and cuda")
            return
        try:
            geometry = describe(caches, blocks, context)
            uuid = self._make_copier(geometry, first)
        except (UnsupportedLayout, KVStoreError, ImportError) as error:
            self._refuse(str(error))
            return
        self._block_bytes, self._device_uuid = geometry.block_bytes, uuid
        self._committer = Committer(self._client, self._shard, self._committed)
        shard_bytes = geometry.block_bytes * self._engine.group_blocks
        self._info = WorkerInfo(
            self._rank, self._shard, shard_bytes, geometry.layout, device_uuid=uuid
        )
        if self._pool_wait is not None:
            self._pool_wait.ask()

    def _make_copier(self, geometry: Geometry, tensor: Any) -> str:
        """Make the copier for where the KV cache is; return its GPU's UUID."""
        attachment, group_blocks = self._client.attachment, self._engine.group_blocks
        if tensor.device.type == "cpu":
            self._copier = CpuCopier(geometry, attachment, self._shard, group_blocks)
            self._computes_here = True
            return ""
        from kvstore.connectors.vllm.cuda import make_copier

        self._copier, uuid, pins = make_copier(
            geometry, attachment, self._shard, group_blocks, tensor
        )
        self._pins = pins
        shard_bytes = self._engine.shard_bytes(self._pipeline_rank, geometry.block_bytes)
        self._pool_wait = PoolWait(attachment, shard_bytes, pins, self._pool_wait_seconds)
        return uuid

    def _refuse(self, why: str) -> None:
        self._info.refusal = why
        log_once(logging.WARNING, "not used: %s", why)

    def introduce(self) -> WorkerInfo:
        """Return what the scheduler's half must know.

        Waits a moment to be attached, and on a GPU for memory to be made and pinned: the engine is
        about to serve, and its first requests are to be as fast as later ones.
        """
        info = self._info
        if not info.refusal:
            self._client.attachment.wait_active(_ATTACH_SECONDS)
            if self._pool_wait is not None:
                self._pool_wait.wait()
            self._notice()
        return replace(info)

    def _notice(self) -> bool:
        """Take note of this process's attachment; return whether it is another one."""
        attachment, info = self._client.attachment, self._info
        alive = attachment.alive
        now = (attachment.id, attachment.boot_id) if alive else (0, b"")
        # While the daemon is away, what was known of its memory stays so.
        mappable = alive or (info.mappable and not attachment.streams_only)
        # Or each block that is in the GPU pool would be computed again, though it is in host memory.
        uuid = self._device_uuid if attachment.opens_devices else ""
        before = (info.attachment_id, info.boot_id, info.mappable, info.device_uuid)
        if (*now, mappable, uuid) == before:
            return False
        if not uuid and info.device_uuid:
            log_once(
                logging.WARNING,
                "rank %d cannot open the daemon's GPU pool (CUDA IPC must work between the two):"
                " blocks are loaded from host memory",
                self._rank,
            )
        (info.attachment_id, info.boot_id), info.mappable = now, mappable
        info.device_uuid = uuid
        return True

    def prepare(self, meta: StepMeta) -> None:
        """Before anything of this step writes to the KV cache. Idempotent."""
        if self._pins is not None:
            self._pins.step(under_way=True)
        with self._undisturbed():
            self._prepare(meta)

    def _undisturbed(self) -> AbstractContextManager[None]:
        """Keep memory from being pinned meanwhile: submitting copies would wait for that."""
        return contextlib.nullcontext() if self._pins is None else self._pins.submitting()

    def _prepare(self, meta: StepMeta) -> None:
        self._meta = meta
        if meta.step <= self._prepared:
            return
        self._prepared = meta.step
        if self._computes_here:
            self._client.attachment.rest(not meta.idle)
        # Draft passes of the last step have written their part by now.
        delayed, self._delayed = self._delayed, []
        try:
            for store in delayed:
                self._store(store)
        finally:
            # Whatever was wrong with those: the engine goes on and writes to these blocks.
            if self._copier is not None and (meta.handed_out is None or len(meta.handed_out)):
                self._copier.reuse(meta.handed_out)

    def load(self) -> None:
        """Start the step's loads. Idempotent."""
        meta = self._meta
        if meta is None or meta.step <= self._loaded:
            return
        self._loaded = meta.step
        with self._undisturbed():
            for load in meta.loads:
                self._load(load, idle=meta.idle)

    def _load(self, load: Load, *, idle: bool) -> None:
        timer = LoadTimer(self.stats, begin_load(load))

        def done(right: NDArray[np.bool_]) -> None:
            loaded = int(right.sum()) * self._block_bytes
            try:
                timer.done(loaded)
            finally:  # the engine waits for it, whatever becomes of figures
                with self._lock:
                    self._bad += load.blocks[~right].tolist()
                    self._finished.append(load.request_id)
                    self._report.loaded_bytes += loaded

        def landed(right: bool) -> None:
            try:
                timer.landed()
            finally:
                with self._lock:
                    self._report.landed.append(load.load_id)
                    self._unsafe = self._unsafe or not right

        if self._copier is None or not len(load.slots):
            done(np.zeros(len(load.blocks), np.bool_))
        else:
            run = SlotRun(load.slots, load.boot_id)
            early = self._copier.load(
                load.blocks, run, load.skip, done, landed if self._early_loads else None, idle=idle
            )
            timer.submitted(early=early)
            if early:
                self._early = True
                with self._lock:
                    self._report.early.append(load.load_id)

    def finish(self) -> set[str]:
        """After the forward pass: start the step's stores; return requests whose load is over."""
        try:
            return self._finish()
        finally:
            if self._pins is not None:
                self._pins.step(under_way=False)

    def _finish(self) -> set[str]:
        meta = self._meta
        if meta is not None and meta.step > self._submitted:
            self._submitted = meta.step
            try:
                with self._undisturbed():
                    self._begin_stores(meta)
            finally:
                # Whatever was wrong with those: what this step computed is passed on next.
                self._settle(meta)
                self._check()
        self._check()
        with self._lock:
            finished, self._finished = self._finished, []
            bad, self._bad = self._bad, []
        # What failed goes out with the same step as the request that waits for it.
        self._errors.update(bad)
        return set(finished)

    def _begin_stores(self, meta: StepMeta) -> None:
        if self._computes_here:
            self._client.attachment.rest(False)
        if self._engine.delayed_stores:
            self._delayed += meta.stores
            return
        for store in meta.stores:
            self._store(store)

    def _check(self) -> None:
        if self._unsafe:
            raise Unsafe(
                "kvstore: slots were taken back while they were being read, after the engine was"
                " told that their blocks are there; what it computed from them cannot be used"
            )

    def _settle(self, meta: StepMeta) -> None:
        """See that what this step computed does not rest on loads that are not there yet."""
        if self._copier is not None and self._unsettled and not meta.idle:
            self._copier.settle()
            self._unsettled = False
        # Those of this very step are used from the next one on.
        self._unsettled, self._early = self._unsettled or self._early, False

    def errors(self) -> set[int]:
        """Return engine blocks whose load failed, each once."""
        errors, self._errors = self._errors, set()
        return errors

    def _store(self, store: Store) -> None:
        committer = self._committer
        if not self._writes or self._copier is None or committer is None:
            return
        run = SlotRun(store.slots, store.boot_id, store.writers[self._shard])
        span = begin_store(store)
        self._store_begun[store.job_id] = time.perf_counter(), span
        self._copier.store(store.blocks, run, lambda copied: committer.submit(store, copied, span))

    def _committed(self, store: Store, outcomes: bytes) -> None:
        """On the committer's thread: a store is over."""
        committed = sum(outcome > 0 for outcome in outcomes)
        moved = committed * self._block_bytes * self._engine.group_blocks
        begun, span = self._store_begun.pop(store.job_id)
        seconds = time.perf_counter() - begun
        span.set(committed_blocks=committed)
        span.end()
        if committed:
            self.stats.time("store", seconds)
            self.stats.count("stored_bytes", moved)
        else:
            self.stats.count("store_failures")
        with self._lock:
            self._report.stored.setdefault(store.job_id, []).append(outcomes)
            self._report.stored_bytes += moved

    def report(self) -> WorkerReport | None:
        """Return what has happened since the last report; None for nothing."""
        changed = not self._info.refusal and self._notice()
        with self._lock:
            report = self._report
            if not changed and report == WorkerReport():
                return None
            self._report = WorkerReport()
        if changed:
            report.infos.append(replace(self._info))
        return report

    def close(self) -> None:
        """Finish copies and commits, then leave."""
        began = time.monotonic()
        # Whatever one of them fails at, the next one leaves in order.
        with contextlib.ExitStack() as closing:
            closing.callback(self._client.close)
            if self._committer is not None:
                closing.callback(self._committer.close)
            if self._copier is not None:
                closing.callback(self._copier.close)
            for store in self._delayed:
                self._store(store)
            self._delayed = []
        log_once(logging.DEBUG, "closed in %.1f s", time.monotonic() - began)
