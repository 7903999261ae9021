"""The gRPC face of the engine, and the process around it."""

from kvstore.server.daemon import serve

__all__ = ["serve"]
