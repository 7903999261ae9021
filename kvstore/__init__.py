"""kvstore: a hierarchical KV-cache store for LLM inference.

Names are imported when they are first used, so that ``import kvstore.keys`` does not load gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.aio import AsyncClient
    from kvstore.client import Client
    from kvstore.errors import (
        ClientClosed,
        DeadlineExceeded,
        InvalidRequest,
        KVStoreError,
        ServerUnavailable,
        StaleEpoch,
    )
    from kvstore.keys import Keys, chain_keys
    from kvstore.space import SpaceSpec

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Client",
    "ClientClosed",
    "DeadlineExceeded",
    "InvalidRequest",
    "KVStoreError",
    "Keys",
    "ServerUnavailable",
    "SpaceSpec",
    "StaleEpoch",
    "__version__",
    "chain_keys",
]

_HOMES = {
    "AsyncClient": "kvstore.aio",
    "Client": "kvstore.client",
    "Keys": "kvstore.keys",
    "SpaceSpec": "kvstore.space",
    "chain_keys": "kvstore.keys",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "kvstore.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted(set(globals()) | set(__all__))
