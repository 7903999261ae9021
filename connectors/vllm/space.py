"""What an engine is, and the space that its blocks belong to."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from kvstore.connectors.vllm.guard import log_once
from kvstore.connectors.vllm.settings import Settings
from kvstore.connectors.vllm.weights import draft_identity, model_identity
from kvstore.space import SpaceSpec

__all__ = ["EngineShape", "describe_engine", "memory_context", "root_seed", "space_spec"]

# Specs whose blocks hold all tokens of their positions, for as long as the request has them; and
# those derived from them of which that is not so.
_WHOLE_CONTEXT: Final = ("FullAttentionSpec", "MLAAttentionSpec")
_NOT_WHOLE: Final = ("SinkFullAttentionSpec", "RSWASpec", "HiddenStateCacheSpec")
# Kinds that vLLM keeps whole contexts of, too, beside a full one, when its hybrid manager is off.
_WHOLE_IF_ASKED: Final = {"SlidingWindowSpec", "ChunkedLocalAttentionSpec"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The facts about an engine that both halves need.

    Attributes:
        engine_block_tokens: tokens of one of the engine's blocks.
        group_blocks: engine blocks per stored block.
        ranks: workers of the engine.
        tensor_parallel: tensor-parallel size.
        pipeline_parallel: pipeline-parallel size.
        replicas: consecutive tensor-parallel ranks that hold the same bytes.
        model: name of the model.
        weights: names weights and model configuration.
        dtype: of the KV values.
        hash_algorithm: of the engine's block hashes.
        prefix_caching: whether the engine has a prefix cache of its own.
        step_tokens: most tokens of one step.
        delayed_stores: whether blocks are complete only at the next step (draft passes).
        refusal: why the connector must not act for this engine; "" when it may.
        layer_bytes: of one of the engine's blocks, in one layer of this rank.
        stage_layers: layers of each pipeline stage; empty when that is not known.
    """

    engine_block_tokens: int
    group_blocks: int
    ranks: int
    tensor_parallel: int
    pipeline_parallel: int
    replicas: int
    model: str
    weights: str
    dtype: str
    hash_algorithm: str
    prefix_caching: bool
    step_tokens: int
    delayed_stores: bool
    refusal: str
    layer_bytes: int = 0
    stage_layers: tuple[int, ...] = ()

    @property
    def block_tokens(self) -> int:
        """Tokens of one stored block."""
        return self.engine_block_tokens * self.group_blocks

    @property
    def shards(self) -> int:
        """Shards of one block: those of each pipeline stage."""
        return self.tensor_parallel // self.replicas * self.pipeline_parallel

    def shard(self, pipeline_rank: int, tensor_rank: int) -> int:
        """Return which shard a rank holds."""
        per_stage = self.tensor_parallel // self.replicas
        return pipeline_rank * per_stage + tensor_rank // self.replicas

    def shard_bytes(self, pipeline_rank: int, block_bytes: int) -> list[int]:
        """Return the bytes of a stored block in each shard, as one rank can tell; [] if it cannot.

        Args:
            pipeline_rank: stage of the rank.
            block_bytes: of one of the engine's blocks, on that rank.
        """
        if self.pipeline_parallel == 1:
            return [block_bytes * self.group_blocks] * self.shards
        # Stages differ by their layers. Only where this one is made of such layers and nothing else
        # (no draft model, no layers that share memory), it is taken that the others are, too.
        if len(self.stage_layers) != self.pipeline_parallel or (
            self.stage_layers[pipeline_rank] * self.layer_bytes != block_bytes
        ):
            return []
        per_stage = self.tensor_parallel // self.replicas
        stored = self.layer_bytes * self.group_blocks
        return [layers * stored for layers in self.stage_layers for _ in range(per_stage)]

    def writes(self, tensor_rank: int) -> bool:
        """Return whether a rank stores its shard; the other replicas only load it."""
        return tensor_rank % self.replicas == 0


def _refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return why this engine's blocks cannot be shared yet; "" when they can."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} above 1 is not supported yet"
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "this model keeps no KV"
    if len(groups) != 1:
        kinds = {type(group.kv_cache_spec).__name__ for group in groups}
        why = f"models with {len(groups)} KV-cache groups are not supported yet"
        if "FullAttentionSpec" in kinds and kinds <= {"FullAttentionSpec", *_WHOLE_IF_ASKED}:
            why += "; this one has 1 if vLLM is started with --disable-hybrid-kv-cache-manager"
        return why
    spec = groups[0].kv_cache_spec
    inner = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    for one in inner:
        names = {cls.__name__ for cls in type(one).__mro__}
        if not names.intersection(_WHOLE_CONTEXT) or names.intersection(_NOT_WHOLE):
            return f"a KV cache of kind {type(one).__name__} is not supported yet"
        if getattr(one, "non_causal", False):
            return "what this model computes for a token depends on later tokens, not on a prefix"
    if not getattr(vllm_config.model_config, "is_prefix_caching_supported", True):
        return "vLLM does not support prefix caching for this model and its pooling"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales makes blocks that only this engine run can read"
    unit = getattr(kv_cache_config, "hash_block_size", None)
    if unit not in (None, spec.block_size):
        return f"the engine hashes {unit} tokens at a time, its blocks hold {spec.block_size}"
    return ""


def _replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many consecutive ranks hold the same KV."""
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    known = getattr(kv_cache_config, "kv_tp_replicas", None)
    if isinstance(known, int) and known > 1 and ranks % known == 0:
        return known
    model = vllm_config.model_config
    if getattr(model, "use_mla", False):
        return ranks
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    try:
        heads = int(model.get_total_num_kv_heads())
    except (AttributeError, TypeError, ValueError):
        return 1
    # Only where every layer has the model's number of heads, one on each rank.
    if 0 < heads < ranks and ranks % heads == 0 and getattr(spec, "num_kv_heads", 0) == 1:
        return ranks // heads
    return 1


def _stage_layers(vllm_config: Any) -> tuple[int, ...]:
    """Return how many layers each pipeline stage holds; () when vLLM does not say."""
    stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    # A model of its own, on the last stage.
    if getattr(vllm_config, "speculative_config", None) is not None:
        return ()
    count: Any = getattr(vllm_config.model_config, "get_num_layers", None)
    try:
        found = tuple(
            int(
                count(
                    SimpleNamespace(
                        rank=stage, tensor_parallel_size=1, pipeline_parallel_size=stages
                    )
                )
            )
            for stage in range(stages)
        )
    except (AttributeError, TypeError, ValueError):
        return ()
    return found if min(found) > 0 else ()


def _dtype(vllm_config: Any) -> str:
    cache = str(getattr(vllm_config.cache_config, "cache_dtype", "auto"))
    model = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return model if cache == "auto" else f"{cache}/{model}"


def describe_engine(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> EngineShape:
    """Read an engine's configuration."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    refusal = _refusal(vllm_config, kv_cache_config)
    groups = kv_cache_config.kv_cache_groups
    block_tokens = int(groups[0].kv_cache_spec.block_size if groups else cache.block_size)
    model, weights = settings.model, ""
    if not refusal:
        found, weights = model_identity(
            vllm_config.model_config,
            getattr(vllm_config, "load_config", None),
            settings.weights_version,
        )
        model = model or found
        draft = draft_identity(vllm_config)
        if weights and draft:
            weights = f"{weights}/{draft}"
        if not weights:
            refusal = (
                f"the weights of {model} are not found on this machine: set weights_version in"
                " kv_connector_extra_config, it must change whenever they do"
            )
    algorithm = str(getattr(cache, "prefix_caching_hash_algo", "sha256"))
    if algorithm == "sha256":
        log_once(
            logging.WARNING,
            "prefix_caching_hash_algo is sha256, whose pickled input can differ for equal"
            " requests with images or adapters; use --prefix-caching-hash-algo sha256_cbor",
        )
    elif algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        log_once(
            logging.WARNING,
            "prefix_caching_hash_algo is %s with a random seed: nothing is shared with other"
            " engines or after a restart; use --prefix-caching-hash-algo sha256_cbor",
            algorithm,
        )
    return EngineShape(
        engine_block_tokens=block_tokens,
        group_blocks=max(1, -(-settings.block_tokens // block_tokens)),
        ranks=int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size),
        tensor_parallel=int(parallel.tensor_parallel_size),
        pipeline_parallel=int(parallel.pipeline_parallel_size),
        replicas=1 if refusal else _replicas(vllm_config, kv_cache_config),
        model=model or str(vllm_config.model_config.model),
        weights=weights,
        dtype=_dtype(vllm_config),
        hash_algorithm=algorithm,
        prefix_caching=bool(cache.enable_prefix_caching),
        step_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
        delayed_stores=getattr(vllm_config, "speculative_config", None) is not None,
        refusal=refusal,
        layer_bytes=int(getattr(groups[0].kv_cache_spec, "page_size_bytes", 0)) if groups else 0,
        stage_layers=_stage_layers(vllm_config),
    )


def root_seed() -> str:
    """Return the value that the engine's hash chains start from.

    Valid once the engine is up; vLLM derives it after it has made the connector.
    """
    from vllm.v1.core import kv_cache_utils

    root = getattr(kv_cache_utils, "NONE_HASH", None)
    return root.hex() if isinstance(root, bytes) else ""


def space_spec(
    engine: EngineShape,
    settings: Settings,
    *,
    layout: str,
    shard_bytes: tuple[int, ...],
    seed: str,
    view: str = "",
    adapter: str = "",
) -> SpaceSpec:
    """Name the space of an engine's blocks.

    Args:
        engine: the engine.
        settings: the connector's.
        layout: of all ranks.
        shard_bytes: bytes of a stored block per shard.
        seed: from `root_seed`.
        view: id of this engine's fresh view after `reset_cache`; "" before.
        adapter: from `Adapters.identity`.
    """
    # Lengths keep "a" + "bc" apart from "ab" + "c".
    tenant = f"{len(settings.tenant)}:{settings.tenant}/view {view}" if view else settings.tenant
    weights = f"{len(engine.weights)}:{engine.weights}/{adapter}" if adapter else engine.weights
    return SpaceSpec(
        model=engine.model,
        weights_version=weights,
        dtype=engine.dtype,
        block_tokens=engine.block_tokens,
        shard_bytes=shard_bytes,
        layout=layout,
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=engine.pipeline_parallel,
        kv_group="0",
        hash_algorithm=f"vllm-{engine.hash_algorithm}/{engine.engine_block_tokens}",
        root_seed=seed,
        tenant=tenant,
        # Keys are as long as the root: 16 bytes for the xxhash algorithms, else 32.
        key_bytes=len(seed) // 2 or 32,
    )


def memory_context(vllm_config: Any, layers: list[str]) -> str:
    """Name what decides how KV bytes are understood besides shapes and strides.

    vLLM's release is part of it: a backend may reorder values inside a block from one release to
    the next without any visible sign, so an upgrade starts cold.
    """
    import torch
    import vllm

    release = ".".join(str(getattr(vllm, "__version__", "")).split(".")[:2])
    known = getattr(vllm_config.compilation_config, "static_forward_context", {})
    backends: set[str] = set()
    for name in layers:
        backend = getattr(known.get(name), "get_attn_backend", None)
        if backend is not None:
            backends.add(str(backend().get_name()))
    capability = f"{torch.backends.cpu.get_cpu_capability()}"
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"{release} {sorted(backends)} {capability} {amx}"
