"""A gRPC channel to one daemon with its stubs, and its failures as kvstore's errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import grpc

from kvstore import tracing
from kvstore.address import Address
from kvstore.errors import ClientClosed, KVStoreError, ServerUnavailable
from kvstore.process import keep_in_children
from kvstore.proto import kvstore_pb2_grpc as rpc
from kvstore.wire import channel_options, error_from_rpc

__all__ = ["ADMIN_CALLS", "Link", "failed", "translate"]

T = TypeVar("T")

# Calls of the Admin service; all others are the KVStore service's.
ADMIN_CALLS: Final = frozenset(
    {
        "Stats",
        "WatchStats",
        "ListSpaces",
        "SetCapacity",
        "SetLimits",
        "ListPins",
        "Flush",
        "Verify",
        "Drain",
        "Doctor",
    }
)


def translate(error: grpc.RpcError, address: Address) -> KVStoreError:
    """Return the error that a failed call means, naming the address when nobody answers."""
    meant = error_from_rpc(error)
    if isinstance(meant, ServerUnavailable):
        return ServerUnavailable(f"no daemon answers at {address} ({meant})")
    return meant


def failed(error: BaseException) -> Future[Any]:
    """Return a future that has failed already."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class Link:
    """The synchronous channel of one client. All methods may be called from any thread.

    Attributes:
        address: the daemon's.
    """

    def __init__(self, address: Address) -> None:
        """Prepare the channel; connects at the first call."""
        self.address = address
        self._pid = os.getpid()
        self._closed = False
        self._guard = threading.Lock()
        self._channel = grpc.insecure_channel(
            address.target, options=channel_options(local=address.local)
        )
        keep_in_children(self._channel)
        kv = rpc.KVStoreStub(self._channel)  # type: ignore[no-untyped-call]
        admin = rpc.AdminStub(self._channel)  # type: ignore[no-untyped-call]
        self._kv: Any = kv
        self._admin: Any = admin

    def check(self) -> None:
        """Raise when the client cannot be used.

        Raises:
            ClientClosed: it was closed, or this process is a fork of the one that opened it.
        """
        if os.getpid() != self._pid:
            raise ClientClosed(
                "this process was forked from the one that opened the client: open another here"
            )
        if self._closed:
            raise ClientClosed("the client is closed")

    def _method(self, name: str) -> Any:
        self.check()
        return getattr(self._admin if name in ADMIN_CALLS else self._kv, name)

    def call(self, name: str, request: Any, timeout_s: float) -> Any:
        """Make a call and wait for its answer, at most `timeout_s`.

        Raises:
            KVStoreError: what the daemon, or its absence, says.
        """
        method = self._method(name)
        try:
            return method(request, timeout=timeout_s, metadata=tracing.metadata())
        except grpc.RpcError as error:
            raise self._meaning(error) from error
        except ValueError as error:  # grpc's way to say that the channel is closed
            raise ClientClosed("the client is closed") from error

    def stream(self, name: str, request: Any, timeout_s: float | None) -> Iterator[Any]:
        """Make a call that answers with a stream; breaking off the iteration cancels it.

        Raises:
            KVStoreError: what the daemon, or its absence, says.
        """
        method = self._method(name)
        try:
            answers = method(request, timeout=timeout_s, metadata=tracing.metadata())
        except ValueError as error:
            raise ClientClosed("the client is closed") from error
        try:
            yield from answers
        except grpc.RpcError as error:
            raise self._meaning(error) from error
        finally:
            answers.cancel()

    def submit(
        self, name: str, request: Any, timeout_s: float, accept: Callable[[Any], T]
    ) -> Future[T]:
        """Start a call without waiting.

        Args:
            name: of the call.
            request: its message.
            timeout_s: after which it fails.
            accept: turns the answer into the future's result; runs on gRPC's thread.

        Returns:
            A future that cannot be cancelled: whoever asked must take the answer.
        """
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()
        try:
            pending = self._method(name).future(
                request, timeout=timeout_s, metadata=tracing.metadata()
            )
        except KVStoreError as error:
            result.set_exception(error)
            return result
        except ValueError:
            result.set_exception(ClientClosed("the client is closed"))
            return result

        def done(answer: Any) -> None:
            try:
                value = accept(answer.result())
            except grpc.RpcError as error:
                meant = self._meaning(error)
                meant.__cause__ = error
                result.set_exception(meant)
            except grpc.FutureCancelledError:
                result.set_exception(ClientClosed("the client is closed"))
            except Exception as error:  # noqa: BLE001 - thread boundary: the caller gets it
                result.set_exception(error)
            else:
                result.set_result(value)

        pending.add_done_callback(done)
        return result

    def _meaning(self, error: grpc.RpcError) -> KVStoreError:
        if self._closed:
            return ClientClosed("the client is closed")
        return translate(error, self.address)

    def close(self) -> None:
        """End all calls and close the channel. Idempotent."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
        if os.getpid() == self._pid:
            self._channel.close()
