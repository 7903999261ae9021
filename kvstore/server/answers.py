"""The boundary between engine errors and gRPC status."""

from __future__ import annotations

import functools
import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from kvstore import tracing
from kvstore.errors import InvalidRequest, KVStoreError, TierUnavailable
from kvstore.index.lmdb_env import StoreDamaged
from kvstore.server import present_call
from kvstore.wire import status_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from grpc import aio

__all__ = ["answering", "fail", "has_left", "streaming"]

log = logging.getLogger(__name__)

_Service = TypeVar("_Service")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


def _trace(context: aio.ServicerContext[Any, Any]) -> str:
    traceparent = present_call.said_traceparent(context)
    return f" ({traceparent})" if traceparent else ""


def _check_read(request: object) -> None:
    """Raise the error that stands in for a request that could not be read; see `reading`."""
    if isinstance(request, InvalidRequest):
        raise request


def has_left(error: BaseException | None) -> bool:
    """Return whether gRPC raised this because a call's client is gone."""
    # By name: the class lives in a private module.
    return type(error).__name__ == "ExecuteBatchError"


async def fail(context: aio.ServicerContext[Any, Any], error: Exception, call: str) -> None:
    """End a call with the status that an error means.

    Raises:
        AbortError: it ends the handler; or what `has_left` knows, when nobody is there to be told.
    """
    if isinstance(error, StoreDamaged):
        log.warning("%s failed: %s%s", call, error, _trace(context))
        error = TierUnavailable("state", str(error), error.errno)
    code, message, metadata = status_of(error)
    if code is grpc.StatusCode.INTERNAL:
        log.error("%s failed%s", call, _trace(context), exc_info=error)
    else:
        log.debug("%s refused: %s%s", call, message, _trace(context))
    await context.abort(code, message, metadata)


def answering(
    method: Callable[[_Service, _Request, aio.ServicerContext[Any, Any]], Awaitable[_Response]],
) -> Callable[[_Service, _Request, aio.ServicerContext[Any, Any]], Awaitable[_Response]]:
    """Make a unary handler answer errors as status, and time it in the engine's counters."""
    name = method.__name__.lower()

    @functools.wraps(method)
    async def wrapped(
        self: _Service, request: _Request, context: aio.ServicerContext[Any, Any]
    ) -> _Response:
        begun = time.perf_counter()
        engine = self.engine  # type: ignore[attr-defined]
        present_call.enter(engine, name, request, context)
        span = tracing.OFF
        if tracing.recording():
            span = present_call.begin_span(name, request, context)
        try:
            _check_read(request)
            return await method(self, request, context)
        except KVStoreError as error:
            span.fail(str(error))
            await fail(context, error, name)
            raise
        except Exception as error:
            # The RPC boundary: whatever else goes wrong is logged once and fails this call only.
            if isinstance(error, grpc.aio.AbortError) or has_left(error):
                raise
            span.fail(str(error))
            await fail(context, error, name)
            raise
        finally:
            span.end()
            engine.counters.record(name, time.perf_counter() - begun)

    return wrapped


def streaming(
    method: Callable[[_Service, _Request, aio.ServicerContext[Any, Any]], AsyncIterator[_Response]],
) -> Callable[[_Service, _Request, aio.ServicerContext[Any, Any]], AsyncIterator[_Response]]:
    """Make a handler that answers with a stream turn errors into status."""
    name = method.__name__.lower()

    @functools.wraps(method)
    async def wrapped(
        self: _Service, request: _Request, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[_Response]:
        present_call.enter(self.engine, name, request, context)  # type: ignore[attr-defined]
        span = tracing.OFF
        if tracing.recording():
            span = present_call.begin_span(name, request, context)
        try:
            _check_read(request)
            async for response in method(self, request, context):
                yield response
        except KVStoreError as error:
            span.fail(str(error))
            await fail(context, error, name)
        except Exception as error:
            # The RPC boundary, as above.
            if isinstance(error, grpc.aio.AbortError) or has_left(error):
                raise
            span.fail(str(error))
            await fail(context, error, name)
        finally:
            span.end()

    return wrapped
