"""A gRPC server that does nothing: what a call costs before kvstore does anything.

Runs as ``python -m kvstore.cli.bench.echo ADDRESS`` and prints one line once it serves. It uses
the same server (grpc.aio, one event loop) and the same kind of channel as kvstore.
"""

from __future__ import annotations

import asyncio
import sys
import time

import grpc
import grpc.aio

__all__ = ["EchoClient", "main"]

_SERVICE = "kvstore.bench.Echo"
_METHOD = "Echo"
_LENGTH_BYTES = 4


async def _echo(request: bytes, _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    """Answer as many zero bytes as the request's first four bytes say."""
    return bytes(int.from_bytes(request[:_LENGTH_BYTES], "little"))


async def _serve(address: str) -> None:
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),)
    )
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


class EchoClient:
    """Calls the echo server synchronously, as kvstore's client calls the daemon."""

    def __init__(self, address: str) -> None:
        """Open a channel of its own."""
        self._channel = grpc.insecure_channel(
            address, options=(("grpc.use_local_subchannel_pool", 1),)
        )
        self._call = self._channel.unary_unary(
            f"/{_SERVICE}/{_METHOD}", request_serializer=bytes, response_deserializer=bytes
        )

    def seconds(self, request_bytes: int, response_bytes: int) -> float:
        """Make one call of these sizes, and return how long it took."""
        request = response_bytes.to_bytes(_LENGTH_BYTES, "little").ljust(request_bytes, b"\0")
        begin = time.perf_counter()
        self._call(request, timeout=30)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def main() -> None:
    """Serve at the address on the command line until killed."""
    asyncio.run(_serve(sys.argv[1]))


if __name__ == "__main__":
    main()
