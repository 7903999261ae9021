"""The engine's workers, as the scheduler's half knows them."""

from __future__ import annotations

import hashlib
import logging

from kvstore.connectors.vllm.guard import log_once
from kvstore.connectors.vllm.metadata import WorkerInfo
from kvstore.connectors.vllm.space import EngineShape
from kvstore.connectors.vllm.store import Attachment

__all__ = ["Roster"]


class Roster:
    """Who holds which shard, and under which attachment.

    Attributes:
        complete: whether all workers are known, agree, and can take part.
        layout: of the blocks, all ranks together.
        shard_bytes: of a stored block, per shard.
    """

    def __init__(self, engine: EngineShape) -> None:
        """Know nobody."""
        self._engine = engine
        self._infos: dict[int, WorkerInfo] = {}
        self.complete = False
        self.layout = ""
        self.shard_bytes: tuple[int, ...] = ()

    def admit(self, infos: list[WorkerInfo]) -> None:
        """Take in the handshake of all workers, or say in one line why they cannot take part."""
        self.complete = False
        self._infos = {info.rank: info for info in infos}
        problem = self._engine.refusal or self._disagreement()
        if problem:
            log_once(logging.WARNING, "not used: %s", problem)
            return
        shards = {info.shard: info for info in self._infos.values()}
        layouts = [shards[i].layout for i in sorted(shards)]
        if len(set(layouts)) > 1:
            digest = hashlib.sha256(repr(layouts).encode()).hexdigest()[:24]
            self.layout = f"vllm/stages/{digest}"
        else:
            self.layout = layouts[0]
        self.shard_bytes = tuple(shards[i].shard_bytes for i in sorted(shards))
        self.complete = True

    def _disagreement(self) -> str:
        engine, infos = self._engine, list(self._infos.values())
        for info in infos:
            if info.refusal:
                return f"rank {info.rank}: {info.refusal}"
        if len(infos) != engine.ranks:
            return f"{len(infos)} of {engine.ranks} workers have introduced themselves"
        if {info.shard for info in infos} != set(range(engine.shards)):
            return f"workers hold shards {sorted(i.shard for i in infos)} of {engine.shards}"
        per_stage = engine.shards // engine.pipeline_parallel
        stages: dict[int, WorkerInfo] = {}
        for info in infos:
            other = stages.setdefault(info.shard // per_stage, info)
            if (other.layout, other.shard_bytes) != (info.layout, info.shard_bytes):
                return f"ranks {other.rank} and {info.rank} lay out their KV cache differently"
        return ""

    def update(self, infos: list[WorkerInfo]) -> None:
        """Take in attachments that have changed, and whether they can open device memory."""
        for info in infos:
            known = self._infos.get(info.rank)
            if known is not None:
                known.attachment_id, known.boot_id = info.attachment_id, info.boot_id
                known.mappable, known.device_uuid = info.mappable, info.device_uuid

    def loads(self, attachment: Attachment) -> bool:
        """Return whether workers can load what this process has leased now.

        What is known of their attachments is of the last step that the engine made, which may
        be long ago. A load does not need it: it names the daemon run, and a worker that has not
        found that run yet waits for it.
        """
        return (
            self.complete
            and attachment.alive
            and all(info.mappable for info in self._infos.values())
        )

    @property
    def devices(self) -> list[str]:
        """GPUs whose memory the workers can open; none unless every worker has one."""
        uuids = [info.device_uuid for info in self._infos.values()]
        return sorted(set(uuids)) if all(uuids) else []

    @property
    def writers(self) -> list[WorkerInfo]:
        """The workers that store, by shard: of replicas the first."""
        first: dict[int, WorkerInfo] = {}
        for rank in sorted(self._infos):
            first.setdefault(self._infos[rank].shard, self._infos[rank])
        return [first[shard] for shard in sorted(first)]
