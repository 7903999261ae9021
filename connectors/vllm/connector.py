"""vLLM's hooks, each handed to the half that runs in this process.

vLLM makes one connector in the scheduler and one in each worker. Whatever goes wrong, the engine
goes on: an unusable connector answers every hook like a cache that misses.

Order of the hooks in a step, vLLM 0.26 to 0.33:

- scheduler: `get_num_new_matched_tokens` and `update_state_after_alloc` per waiting request, then
  `build_connector_meta`; after the step `update_connector_output`.
- worker: `handle_preemptions` (0.26: only after preemptions), `bind_connector_metadata`, `start_load_kv`
  (0.32: after the forward pass, 0.26: before), forward pass, `wait_for_save` (0.26: not without a
  forward pass), `get_finished`, `get_block_ids_with_load_errors`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from kvstore.connectors.vllm.control import Switch
from kvstore.connectors.vllm.guard import guarded, log_once
from kvstore.connectors.vllm.metadata import StepMeta, WorkerInfo, WorkerReport
from kvstore.connectors.vllm.scheduler_side import SchedulerSide
from kvstore.connectors.vllm.settings import Settings
from kvstore.connectors.vllm.space import EngineShape, describe_engine, memory_context
from kvstore.connectors.vllm.stats import KVStorePromMetrics, KVStoreStats
from kvstore.connectors.vllm.store import Client, load_factory
from kvstore.connectors.vllm.worker_side import WorkerSide
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KVStoreConnector"]


def _nothing() -> None:
    return None


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads prefixes from a kvstore daemon and stores what the engine computes.

    See `Settings` for what `kv_connector_extra_config` may say.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Called by vLLM; the third argument must have this name."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._start(vllm_config, role, kv_cache_config)

    @guarded(_nothing)
    def _start(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        try:
            settings = Settings.parse(dict(transfer.kv_connector_extra_config or {}))
            factory = load_factory(settings.store_factory)
            engine = describe_engine(vllm_config, kv_cache_config, settings)
            if engine.refusal:
                log_once(logging.WARNING, "not used: %s", engine.refusal)
                return
            if role == KVConnectorRole.SCHEDULER:
                if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
                    log_once(
                        logging.WARNING,
                        "kv_load_failure_policy is not recompute: a request whose load fails"
                        ' will fail; set "kv_load_failure_policy": "recompute"',
                    )
                client = factory(settings.target or None, name="vllm-scheduler")
                switch = Switch(str(getattr(transfer, "engine_id", "")))
                self._scheduler = SchedulerSide(settings, engine, client, enabled=switch.on)
                # Begin to attach. Nothing is copied in the scheduler's half.
                client.attachment.rest(True)
            else:
                self._worker = self._make_worker(settings, engine, factory)
        except KVStoreError as error:
            log_once(logging.ERROR, "not used: %s", error)

    @staticmethod
    def _make_worker(settings: Settings, engine: EngineShape, factory: Any) -> WorkerSide:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        tensor_rank, pipeline_rank = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        client: Client = factory(
            settings.target or None,
            name=f"vllm-worker-{pipeline_rank}-{tensor_rank}",
            shards=[engine.shard(pipeline_rank, tensor_rank)],
        )
        _ = client.attachment  # begin to attach
        return WorkerSide(
            engine,
            client,
            tensor_rank=tensor_rank,
            pipeline_rank=pipeline_rank,
            early_loads=settings.early_loads,
            pool_wait_seconds=settings.pool_wait_seconds,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is a miss later on, nothing worse."""
        return False

    # Scheduler.

    @guarded(_nothing)
    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Take in what the workers said in `get_handshake_metadata`."""
        if self._scheduler is not None:
            infos = [info for info in metadata.values() if isinstance(info, WorkerInfo)]
            self._scheduler.set_workers(infos)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """The same, where vLLM names workers by (pipeline rank, tensor rank)."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    @guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        """Ask for a lease ahead of scheduling."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Answer from state; see `SchedulerSide.matched`."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    @guarded(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load that was promised."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Say which tiers a hit came from."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        if self._scheduler is None or not num_external_tokens:
            return {}
        host = CacheHitSource.HOST
        names = {1: getattr(CacheHitSource, "DEVICE", host), 2: host, 3: CacheHitSource.DISK}
        tiers = self._scheduler.tier_tokens(request)
        return {names.get(tier, host): tokens for tier, tokens in tiers.items()}

    @guarded(lambda: StepMeta(0, handed_out=None))
    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        """Plan the step."""
        if self._scheduler is None:
            return StepMeta(0)
        return self._scheduler.build(scheduler_output)

    @guarded(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers have finished."""
        if self._scheduler is not None:
            self._scheduler.output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget the request. Its blocks are never held back for us."""
        self._finished(request, block_ids)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """The same, for several KV-cache groups."""
        self._finished(request, block_ids[0] if block_ids else [])
        return False, None

    @guarded(_nothing)
    def _finished(self, request: Any, table: list[int]) -> None:
        if self._scheduler is not None:
            self._scheduler.finished(request, table)

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping for us."""
        return self._scheduler is not None and self._scheduler.pending()

    @guarded(lambda: False)
    def reset_cache(self) -> bool:
        """Move this engine to a fresh view; other engines keep what they share."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # Metrics.

    @guarded(_nothing)
    def get_kv_connector_stats(self) -> KVStoreStats | None:
        """Hand out what this process has counted since the last call; vLLM adds it up."""
        half = self._worker if self._worker is not None else self._scheduler
        return half.stats.take() if half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        """Make stats anew of what has travelled to the API server."""
        return KVStoreStats(data)

    @classmethod
    @guarded(_nothing)
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStorePromMetrics:
        """Make our series at vLLM's `/metrics`."""
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker.

    @guarded(_nothing)
    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Learn where blocks lie."""
        if self._worker is not None:
            blocks = int(self._kv_cache_config.num_blocks)
            context = memory_context(self._vllm_config, list(kv_caches))
            self._worker.register(kv_caches, blocks, context)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        """The same for one tensor of all layers (0.26)."""
        self.register_kv_caches({"all layers": kv_cache})

    @guarded(_nothing)
    def get_handshake_metadata(self) -> WorkerInfo | None:
        """Introduce this worker to the scheduler's half."""
        return self._worker.introduce() if self._worker is not None else None

    @guarded(_nothing)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Wait for stores that read blocks which get new owners (0.26 passes request ids)."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMeta):
            self._worker.prepare(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        self._bind(connector_metadata)

    @guarded(_nothing)
    def _bind(self, metadata: Any) -> None:
        if self._worker is not None and isinstance(metadata, StepMeta):
            self._worker.prepare(metadata)
            # Before the forward pass in every version: a load that ends while it runs is
            # reported one step earlier.
            self._worker.load()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads have been started when the step began."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no step waits for them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole blocks are stored, after the step."""

    def wait_for_save(self) -> None:
        """Stores go on after the step; `prepare` waits where it must."""

    @guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start the step's stores; report the loads that are over."""
        if self._worker is None:
            return None, None
        return None, self._worker.finish() or None

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report blocks that were not loaded."""
        return self._worker.errors() if self._worker is not None else set()

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Report to the scheduler's half."""
        return self._worker.report() if self._worker is not None else None

    @guarded(_nothing)
    def shutdown(self) -> None:
        """Leave. vLLM does not always call this."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
