"""vLLM connector: loads prefixes from kvstore and stores what the engine computes.

Read `connector` first: it is the list of vLLM's hooks. The scheduler's half is `scheduler_side`, the
workers' half `worker_side`; `metadata` is what travels between them.

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
