"""vLLM connector: loads prefixes from kvstore and stores what the engine computes.

Read `connector` first: it is the list of vLLM's hooks. The scheduler's half is `scheduler_side`, the
workers' half `worker_side`; `metadata` is what travels between them.

Worth knowing:

- Blocks are shared by engines that agree in everything that decides their bytes: model
  configuration, weights (sampled from the checkpoint, or named by `weights_version`), KV dtype,
  layout, vLLM's release, tensor and pipeline parallelism, hash algorithm and seed, tenant.
- `reset_cache` (vLLM calls it on sleep, on pauses that clear caches, and in
  `reset_prefix_cache(reset_connector=True)`) moves this engine to an empty view of its own until it
  restarts; what others share stays as it is. It is due whenever weights were changed in place. To
  retire what all share, bump the space's epoch.
- After an epoch was bumped, engines that had the space open before share nothing more until they
  are restarted or reset: what they hold may be of the old weights.
- Set `"kv_load_failure_policy": "recompute"`; with vLLM's default, a request whose load fails, fails.

The class is imported on first use: vLLM loads this package as a plugin before its own modules
are ready to be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.connectors.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector when somebody asks for it."""
    if name == "KVStoreConnector":
        from kvstore.connectors.vllm.connector import KVStoreConnector

        return KVStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
