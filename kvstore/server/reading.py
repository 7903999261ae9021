"""Requests that cannot be read are refused by our own rules, not by gRPC's.

Left to itself gRPC answers bytes that are no message with UNKNOWN, an exception's name and a
traceback in the daemon's log. A stream's reader gets the error where it reads; a call's handler
gets it in place of its request, because nothing of ours runs before it (`answers` looks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from grpc import aio

__all__ = ["CarefulServer"]


def _careful(read: Callable[[bytes], Any] | None, *, streaming: bool) -> Callable[[bytes], Any]:
    def careful(data: bytes) -> Any:
        assert read is not None
        try:
            return read(data)
        except DecodeError as error:
            refusal = InvalidRequest("request", f"cannot be read: {error}")
            if streaming:
                raise refusal from error
            return refusal

    return careful


class CarefulServer:
    """Stands in for a server while servicers are added: wraps how their requests are read."""

    def __init__(self, server: aio.Server) -> None:
        """Add to `server`."""
        self._server = server

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: the same handlers come registered, and those take precedence."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Add a service's handlers by method name."""
        careful = {
            # gRPC's own handlers are named tuples, whatever its stubs say.
            name: handler._replace(  # type: ignore[attr-defined]
                request_deserializer=_careful(
                    handler.request_deserializer, streaming=handler.request_streaming
                )
            )
            for name, handler in handlers.items()
        }
        generic = grpc.method_handlers_generic_handler(service, careful)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_registered_method_handlers(service, careful)  # type: ignore[attr-defined]
