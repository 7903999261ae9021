"""The connector's half in a worker: starts copies, reports what they came to.

Hooks run on the step thread and return at once, but for one wait: a block that has a new owner must
not be written while a store still reads it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.vllm.committer import Committer
from kvstore.connectors.vllm.copier import Copier, CpuCopier, SlotRun
from kvstore.connectors.vllm.geometry import UnsupportedLayout, describe
from kvstore.connectors.vllm.guard import log_once
from kvstore.connectors.vllm.metadata import Load, StepMeta, Store, WorkerInfo, WorkerReport
from kvstore.connectors.vllm.space import EngineShape
from kvstore.connectors.vllm.store import Client

__all__ = ["WorkerSide"]

# At start-up the daemon answers in milliseconds, or is not there.
_ATTACH_SECONDS: Final = 1.0


class _Storing:
    """A store whose blocks are being read."""

    __slots__ = ("blocks", "copied", "store")

    def __init__(self, store: Store) -> None:
        self.store = store
        self.blocks: list[int] = store.blocks.ravel().tolist()
        self.copied = threading.Event()


class WorkerSide:
    """State of one rank."""

    def __init__(
        self, engine: EngineShape, client: Client, *, tensor_rank: int, pipeline_rank: int
    ) -> None:
        """Wait for the KV cache to be registered.

        Args:
            engine: the engine.
            client: this process's.
            tensor_rank: within the tensor-parallel group.
            pipeline_rank: pipeline stage.
        """
        self._engine = engine
        self._client = client
        self._rank = pipeline_rank * engine.tensor_parallel + tensor_rank
        self._shard = engine.shard(pipeline_rank, tensor_rank)
        self._writes = engine.writes(tensor_rank)
        self._info = WorkerInfo(self._rank, self._shard, 0, "", refusal="no KV cache registered")
        self._copier: Copier | None = None
        self._committer: Committer | None = None
        self._block_bytes = 0
        self._meta: StepMeta | None = None
        self._prepared = self._loaded = self._submitted = 0
        self._delayed: list[Store] = []
        self._storing: dict[int, _Storing] = {}  # engine block -> the store that reads it
        # Written by other threads:
        self._lock = threading.Lock()
        self._finished: list[str] = []
        self._bad: list[int] = []
        self._report = WorkerReport()
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
        device = str(getattr(getattr(first, "device", None), "type", "none"))
        if device != "cpu":
            self._refuse(f"a KV cache on {device} is not supported yet, only on cpu")
            return
        try:
            geometry = describe(caches, blocks, context)
        except UnsupportedLayout as error:
            self._refuse(str(error))
            return
        self._block_bytes = geometry.block_bytes
        attachment = self._client.attachment
        self._copier = CpuCopier(geometry, attachment, self._shard, self._engine.group_blocks)
        self._committer = Committer(self._client, self._shard, self._committed)
        shard_bytes = geometry.block_bytes * self._engine.group_blocks
        self._info = WorkerInfo(self._rank, self._shard, shard_bytes, geometry.layout)

    def _refuse(self, why: str) -> None:
        self._info.refusal = why
        log_once(logging.WARNING, "not used: %s", why)

    def introduce(self) -> WorkerInfo:
        """Return what the scheduler's half must know. Waits a moment to be attached."""
        info = self._info
        if not info.refusal:
            self._client.attachment.wait_active(_ATTACH_SECONDS)
            self._notice()
        return replace(info)

    def _notice(self) -> bool:
        """Take note of this process's attachment; return whether it is another one."""
        attachment, info = self._client.attachment, self._info
        alive = attachment.alive
        now = (attachment.id, attachment.boot_id) if alive else (0, b"")
        # While the daemon is away, what was known of its memory stays so.
        mappable = alive or (info.mappable and not attachment.streams_only)
        if (*now, mappable) == (info.attachment_id, info.boot_id, info.mappable):
            return False
        (info.attachment_id, info.boot_id), info.mappable = now, mappable
        return True

    def prepare(self, meta: StepMeta) -> None:
        """Before anything of this step writes to the KV cache. Idempotent."""
        self._meta = meta
        if meta.step <= self._prepared:
            return
        self._prepared = meta.step
        # Draft passes of the last step have written their part by now.
        delayed, self._delayed = self._delayed, []
        for store in delayed:
            self._store(store)
        if not self._storing:
            return
        wanted = self._storing if meta.handed_out is None else meta.handed_out.tolist()
        for storing in {s for block in list(wanted) if (s := self._storing.get(block))}:
            storing.copied.wait()
            self._forget(storing)

    def load(self) -> None:
        """Start the step's loads. Idempotent."""
        meta = self._meta
        if meta is None or meta.step <= self._loaded:
            return
        self._loaded = meta.step
        for load in meta.loads:
            self._load(load)

    def _load(self, load: Load) -> None:
        def done(right: NDArray[np.bool_]) -> None:
            with self._lock:
                self._bad += load.blocks[~right].tolist()
                self._finished.append(load.request_id)
                self._report.loaded_bytes += int(right.sum()) * self._block_bytes

        if self._copier is None or not len(load.slots):
            done(np.zeros(len(load.blocks), np.bool_))
        else:
            self._copier.load(load.blocks, SlotRun(load.slots, load.boot_id), load.skip, done)

    def finish(self) -> set[str]:
        """After the forward pass: start the step's stores; return requests whose load is over."""
        meta = self._meta
        if meta is not None and meta.step > self._submitted:
            self._submitted = meta.step
            if self._engine.delayed_stores:
                self._delayed += meta.stores
            else:
                for store in meta.stores:
                    self._store(store)
        with self._lock:
            finished, self._finished = self._finished, []
            bad, self._bad = self._bad, []
        # What failed goes out with the same step as the request that waits for it.
        self._errors.update(bad)
        return set(finished)

    def errors(self) -> set[int]:
        """Return engine blocks whose load failed, each once."""
        errors, self._errors = self._errors, set()
        return errors

    def _store(self, store: Store) -> None:
        committer = self._committer
        if not self._writes or self._copier is None or committer is None:
            return
        storing = _Storing(store)
        for block in storing.blocks:
            self._storing[block] = storing

        def done(copied: bool) -> None:
            storing.copied.set()
            committer.submit(store, copied)

        run = SlotRun(store.slots, store.boot_id, store.writers[self._shard])
        self._copier.store(store.blocks, run, done)
        for other in {s for s in self._storing.values() if s.copied.is_set()}:
            self._forget(other)

    def _forget(self, storing: _Storing) -> None:
        for block in storing.blocks:
            if self._storing.get(block) is storing:
                del self._storing[block]

    def _committed(self, store: Store, outcomes: bytes) -> None:
        """On the committer's thread: a store is over."""
        moved = sum(outcome > 0 for outcome in outcomes) * self._block_bytes
        with self._lock:
            self._report.stored.setdefault(store.job_id, []).append(outcomes)
            self._report.stored_bytes += moved * self._engine.group_blocks

    def report(self) -> WorkerReport | None:
        """Return what has happened since the last report; None for nothing."""
        changed = not self._info.refusal and self._notice()
        with self._lock:
            report = self._report
            if not (changed or report.stored or report.loaded_bytes or report.stored_bytes):
                return None
            self._report = WorkerReport()
        if changed:
            report.infos.append(replace(self._info))
        return report

    def close(self) -> None:
        """Finish copies and commits, then leave."""
        began = time.monotonic()
        for store in self._delayed:
            self._store(store)
        self._delayed = []
        if self._copier is not None:
            self._copier.close()
        if self._committer is not None:
            self._committer.close()
        self._client.close()
        log_once(logging.DEBUG, "closed in %.1f s", time.monotonic() - began)
