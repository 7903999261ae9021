"""What travels between the scheduler's half and the workers' halves.

Arrays rather than lists of tuples: vLLM pickles this once per rank and step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvstore.space import SpaceSpec

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

    REPORTS = True
except ImportError:  # vLLM without reports from workers: then nothing calls for one
    KVConnectorWorkerMetadata = object
    REPORTS = False

__all__ = ["NO_BLOCKS", "REPORTS", "Load", "StepMeta", "Store", "WorkerInfo", "WorkerReport"]

NO_BLOCKS = np.empty(0, np.int32)


@dataclass(slots=True)
class Load:
    """One request's blocks to copy from the store into the engine's KV cache.

    Attributes:
        request_id: reported as finished receiving, exactly once.
        blocks: engine blocks to fill, in order, shape (n,).
        skip: engine blocks at the head of the first stored block that are not wanted.
        slots: leased slots, one per stored block; empty: report the load as failed.
        boot_id: daemon run that the slots belong to.
        load_id: reported when it may be reported as finished before its bytes are there.
        traceparent: of the request; "" when nobody traces it.
    """

    request_id: str
    blocks: NDArray[np.int32]
    skip: int
    slots: NDArray[Any]
    boot_id: bytes
    load_id: int = 0
    traceparent: str = ""


@dataclass(slots=True)
class Store:
    """Stored blocks to copy out of the engine's KV cache, and to commit.

    Attributes:
        job_id: reported back.
        spec: names the space.
        boot_id: daemon run that the slots belong to.
        owner_id: attachment that reserved the slots.
        writers: attachment id per shard that the grants name.
        grants: grant of each slot, shape (n,).
        slots: shape (n,).
        blocks: engine blocks, shape (n, engine blocks per stored block).
        keys: packed.
        parents: packed; all-zero where a chain starts.
        traceparents: of the requests that are traced.
    """

    job_id: int
    spec: SpaceSpec
    boot_id: bytes
    owner_id: int
    writers: tuple[int, ...]
    grants: NDArray[np.uint64]
    slots: NDArray[Any]
    blocks: NDArray[np.int32]
    keys: bytes
    parents: bytes
    traceparents: tuple[str, ...] = ()


@dataclass(slots=True)
class StepMeta(KVConnectorMetadata):  # type: ignore[misc]
    """One step.

    Attributes:
        step: counts up; workers act once on each.
        loads: to start.
        stores: to start once this step's forward pass has written the blocks.
        handed_out: engine blocks with new owners: they may be written from this step on. None:
            not known, it may be any.
        idle: nothing is computed in this step.
    """

    step: int
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    handed_out: NDArray[np.int32] | None = field(default_factory=lambda: NO_BLOCKS)
    idle: bool = False


@dataclass(slots=True)
class WorkerInfo(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What the scheduler's half must know about a worker.

    Attributes:
        rank: of the worker within its engine.
        shard: which it holds.
        shard_bytes: bytes of one stored block on this rank.
        layout: id of the memory layout.
        attachment_id: 0 while not attached.
        boot_id: of the daemon run attached to.
        refusal: why this worker cannot take part; "" when it can.
        mappable: whether it can map the pool, as far as it knows.
        device_uuid: of the GPU that it can open the daemon's memory on; "" for none.
    """

    rank: int
    shard: int
    shard_bytes: int
    layout: str
    attachment_id: int = 0
    boot_id: bytes = b""
    refusal: str = ""
    mappable: bool = True
    device_uuid: str = ""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers tell the scheduler's half after a step.

    Attributes:
        stored: per job, the outcomes of each rank that has finished it.
        infos: ranks whose attachment has changed.
        loaded_bytes: copied into the KV cache since the last report.
        stored_bytes: committed since the last report.
        early: `load_id` of loads that are reported as finished while their bytes are on the way:
            their slots must stay leased; once per rank.
        landed: of those among them whose bytes are there now.
    """

    stored: dict[int, list[bytes]] = field(default_factory=dict)
    infos: list[WorkerInfo] = field(default_factory=list)
    loaded_bytes: int = 0
    stored_bytes: int = 0
    early: list[int] = field(default_factory=list)
    landed: list[int] = field(default_factory=list)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Merge two ranks' reports."""
        stored = {job: list(outcomes) for job, outcomes in self.stored.items()}
        for job, outcomes in other.stored.items():
            stored.setdefault(job, []).extend(outcomes)
        return WorkerReport(
            stored,
            self.infos + other.infos,
            self.loaded_bytes + other.loaded_bytes,
            self.stored_bytes + other.stored_bytes,
            self.early + other.early,
            self.landed + other.landed,
        )
