"""Entry point `vllm.general_plugins`: makes `"kv_connector": "KVStoreConnector"` enough."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register the connector with vLLM. Idempotent: vLLM calls plugins in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVStoreConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KVStoreConnector", "kvstore.connectors.vllm.connector", "KVStoreConnector"
        )
