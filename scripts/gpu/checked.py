"""The connector, with every block and every copy checked. For `storm.py`; never for serving.

    kv_connector CheckedConnector, kv_connector_module_path checked, KVSTORE_CHECKED=FILE

After every step each block that its requests use is compared with the first bytes of its key
(`oracle`). After every load what lies in the KV cache is compared with the slot; after every store the
slot with what the KV cache held when the step that stored it had ended. With `"load": false, "store":
false` only the first is left, and it says what the engine does by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from oracle import Oracle, Used

from kvstore.connectors.vllm.connector import KVStoreConnector
from kvstore.connectors.vllm.copier import Copier, SlotRun
from kvstore.connectors.vllm.geometry import Geometry, describe
from kvstore.connectors.vllm.metadata import StepMeta
from kvstore.connectors.vllm.space import memory_context

__all__ = ["CheckedConnector"]

_KEPT_BYTES = int(os.environ.get("KVSTORE_CHECKED_BYTES", str(4 << 30)))


@dataclass(slots=True)
class CheckedMeta(StepMeta):
    """A step, and the blocks that hold known bytes once it has ended."""

    used: list[Used] = field(default_factory=list)


def _views(caches: Any, geometry: Geometry) -> list[torch.Tensor]:
    """Return each segment of the KV cache as (blocks, values)."""
    tensors = [
        one
        for value in caches.values()
        for one in (value if isinstance(value, list | tuple) else [value])
    ]
    views = []
    for base, stride, length in zip(
        geometry.bases.tolist(), geometry.strides.tolist(), geometry.lengths.tolist(), strict=True
    ):
        for one in tensors:
            begin, size = one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()
            if begin <= base < begin + size:
                item = one.element_size()
                flat = one.new_empty(0).set_(one.untyped_storage(), 0, (size // item,))
                shape = (geometry.blocks, length // item)
                at = (base - begin) // item
                views.append(flat.as_strided(shape, (stride // item, 1), at))
                break
    return views


class CheckedCopier:
    """Passes everything on, and compares what came of it."""

    def __init__(
        self,
        inner: Any,
        geometry: Geometry,
        views: list[torch.Tensor],
        worker: Any,
        oracle: Oracle,
    ) -> None:
        """See `Copier`."""
        self._inner: Copier = inner
        self._geometry = geometry
        self._views = views
        self._attachment = worker._client.attachment
        self._shard = worker._shard
        self._group = worker._engine.group_blocks
        self._oracle = oracle
        # How often each block has been handed out: what was loaded early may have been overwritten.
        self._turns = np.zeros(geometry.blocks, np.int64)
        self._counts: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._guard = threading.Lock()

    def _note(self, what: str, wrong: str = "") -> None:
        with self._guard:
            self._counts[what] += 1
            if wrong:
                self._counts[f"{what} wrong"] += 1
                self._wrong[20:] = []
                self._wrong.append(wrong)
            found = {**self._counts, "examples": list(self._wrong)}
        with self._oracle.guard:
            self._oracle.account.copies = found

    def _gather(self, blocks: NDArray[np.int32]) -> list[torch.Tensor]:
        index = torch.from_numpy(blocks.astype(np.int64)).to(self._views[0].device)
        return [view.index_select(0, index) for view in self._views]

    def _apart(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for work that the engine's stream knows nothing of."""
        if not self._views[0].is_cuda:
            return contextlib.nullcontext()
        stream: contextlib.AbstractContextManager[object] = torch.cuda.stream(
            torch.cuda.Stream(self._views[0].device)
        )
        return stream

    def _packed(self, parts: list[torch.Tensor], count: int) -> NDArray[np.uint8]:
        """Return gathered blocks as they lie in slots, shape (blocks, bytes)."""
        packed = np.empty((count, self._geometry.block_bytes), np.uint8)
        offsets, lengths = self._geometry.offsets.tolist(), self._geometry.lengths.tolist()
        for part, offset, length in zip(parts, offsets, lengths, strict=True):
            host = part.cpu().contiguous().view(torch.uint8).numpy().reshape(count, length)
            packed[:, offset : offset + length] = host
        return packed

    def _slots(self, run: SlotRun, skip: int, count: int) -> NDArray[np.uint8] | None:
        """Return what lies in slots, shape (blocks, bytes); None if it is not host memory."""
        size = self._geometry.block_bytes
        with self._attachment.using(
            run.slots, boot_id=run.boot_id, writer_id=run.writer_id
        ) as held:
            addresses, reach = held.places(self._shard)
            if (reach == 2).any():
                return None
            found = np.empty((count, size), np.uint8)
            for at in range(count):
                slot, inside = divmod(skip + at, self._group)
                ctypes.memmove(found[at].ctypes.data, int(addresses[slot]) + inside * size, size)
        return found

    def _differing(
        self, blocks: NDArray[np.int32], one: NDArray[np.uint8], other: NDArray[np.uint8]
    ) -> str:
        bad = np.flatnonzero((one != other).any(1))
        if not len(bad):
            return ""
        values = (one[bad] != other[bad]).sum(1).tolist()
        return f"{len(bad)} of {len(blocks)} blocks: {blocks[bad][:8].tolist()} bytes {values[:8]}"

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
        turns = self._turns[blocks].copy()
        early: list[bool] = []

        def check(what: str) -> None:
            stored = self._slots(run, skip, len(blocks))
            if stored is None:
                self._note(f"{what}, from the GPU pool")
                return
            with self._apart():
                there = self._packed(self._gather(blocks), len(blocks))
            same = turns == self._turns[blocks]
            if not same.all():
                self._note(f"{what}, of which some were handed out again")
            self._note(what, self._differing(blocks[same], there[same], stored[same]))

        def loaded(right: NDArray[np.bool_]) -> None:
            # A load that is reported early calls back in the call, before its bytes are there.
            if threading.current_thread() is not caller:
                if right.all():
                    check("load")
                else:
                    self._note("load that failed")
            done(right)

        def arrived(right: bool) -> None:
            check("load reported early")
            assert landed is not None
            landed(right)

        caller = threading.current_thread()
        early.append(
            self._inner.load(
                blocks, run, skip, loaded, arrived if landed is not None else None, idle=idle
            )
        )
        return early[0]

    def store(self, blocks: NDArray[np.int32], run: SlotRun, done: Callable[[bool], None]) -> None:
        """See `Copier.store`."""
        flat = blocks.ravel()
        parts = self._gather(flat)  # on the compute stream: what the step has left there
        event = None
        if self._views[0].is_cuda:
            event = torch.cuda.Event(blocking=True)
            event.record()

        def stored(copied: bool) -> None:
            if not copied:
                self._note("store that failed")
            else:
                if event is not None:
                    event.synchronize()
                there = self._slots(run, 0, len(flat))
                if there is not None:
                    self._note(
                        "store", self._differing(flat, there, self._packed(parts, len(flat)))
                    )
            done(copied)

        self._inner.store(blocks, run, stored)

    def reuse(self, blocks: NDArray[np.int32] | None) -> None:
        """See `Copier.reuse`."""
        if blocks is None:
            self._turns += 1
        else:
            self._turns[blocks] += 1
        self._inner.reuse(blocks)

    def settle(self) -> None:
        """See `Copier.settle`."""
        self._inner.settle()

    def close(self) -> None:
        """See `Copier.close`."""
        self._inner.close()


class CheckedConnector(KVStoreConnector):
    """See the module."""

    _oracle: Oracle | None = None

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Look at the KV cache as the connector does, and get between it and its copier."""
        super().register_kv_caches(kv_caches)
        worker = self._worker
        if worker is None or worker._copier is None:
            raise RuntimeError("the connector is not used: there is nothing to check")
        blocks = int(self._kv_cache_config.num_blocks)
        context = memory_context(self._vllm_config, list(kv_caches))
        geometry = describe(kv_caches, blocks, context)
        views = _views(kv_caches, geometry)
        capacity = _KEPT_BYTES // geometry.block_bytes
        self._oracle = Oracle(views, capacity, Path(os.environ["KVSTORE_CHECKED"]))
        checked: Any = CheckedCopier(worker._copier, geometry, views, worker, self._oracle)
        worker._copier = checked

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        """Add what the step's requests use."""
        meta = super().build_connector_meta(scheduler_output)
        values = {one.name: getattr(meta, one.name) for one in fields(StepMeta)}
        return CheckedMeta(**values, used=self._used(scheduler_output, meta))

    def _used(self, output: Any, meta: StepMeta) -> list[Used]:
        side = self._scheduler
        assert side is not None
        made: dict[int, str] = self.__dict__.setdefault("_made", {})
        for load in meta.loads:
            made.update((block, "L") for block in load.blocks.tolist())
        size = side.engine.engine_block_tokens
        used = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            track = side._tracks.get(request_id)
            table = track and side._plan._table(output, track)
            if not track or not table:
                continue
            hashes = track.request.block_hashes
            begin = track.extent - tokens
            for index in range(begin // size, min(-(-track.extent // size), len(table))):
                block = table[index]
                whole = index * size >= begin
                label = "" if whole else made.get(block, "")
                made[block] = "".join(sorted({*label, "P" if tokens > 1 else "D"}))
            for index in range(min(track.extent // size, len(hashes), len(table))):
                block = table[index]
                used.append(
                    Used(request_id, index, block, bytes(hashes[index]), made.get(block, "?"))
                )
        return used

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Look at the step's blocks first."""
        meta = self._worker._meta if self._worker is not None else None
        if isinstance(meta, CheckedMeta) and self._oracle is not None:
            used, meta.used = meta.used, []
            if used:
                self._oracle.look(meta.step, used)
        return super().get_finished(finished_req_ids)
