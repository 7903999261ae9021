"""The call that is being answered: whose it is, for log lines and spans.

A handler runs in a task of its own, so what `enter` notes needs no end. It notes references only;
what they say is looked up when a line is logged or a span begins.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from kvstore import tracing

if TYPE_CHECKING:
    from kvstore.engine import Engine

__all__ = ["about", "begin_span", "enter", "said_traceparent"]

# Engine, name of the call, request, gRPC's context.
_present: Final[ContextVar[tuple[Engine, str, Any, Any] | None]] = ContextVar(
    "kvstore_call", default=None
)


def enter(engine: Engine, call: str, request: Any, context: Any) -> None:
    """Note the call that this task answers."""
    _present.set((engine, call, request, context))


def said_traceparent(context: Any) -> str:
    """Return the traceparent in a call's metadata; "" for none."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""


def begin_span(call: str, request: Any, context: Any) -> tracing.Span:
    """Begin the span of a call whose client traces, and make it the task's current one."""
    parent = said_traceparent(context)
    if not tracing.trace_id(parent):
        return tracing.OFF
    span = tracing.span(f"kvstore.{call}", parent=parent, kind="server", **_whose(request))
    span.adopt()
    return span


def _whose(request: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    request_id = getattr(request, "request_id", "")
    if request_id:
        found["request"] = request_id
    return found


def about() -> dict[str, str]:
    """Return `call`, `client`, `request` and `trace_id` of the present call, as far as known."""
    present = _present.get()
    if present is None:
        traced = tracing.trace_id(tracing.carried())
        return {"trace_id": traced} if traced else {}
    engine, call, request, context = present
    found = {"call": call, **_whose(request)}
    attached = engine.attachments.name_of(getattr(request, "attachment_id", 0))
    client = attached or getattr(request, "client", "")
    if client:
        found["client"] = client
    traced = tracing.trace_id(said_traceparent(context))
    if traced:
        found["trace_id"] = traced
    return found
