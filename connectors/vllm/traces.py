"""Spans of a request: `kvstore.lookup` in the scheduler, `load` and `store` in each worker.

A step's store may be of several requests: it is in the trace of the first and linked to the others.

They belong to the trace of the request's headers, if vLLM was given any; else the first lookup
begins one. Where vLLM's process records no spans, a traceparent of the request still goes along to the
daemon, whose log lines and spans name it.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from kvstore import tracing
from kvstore.connectors.vllm.metadata import Load, Store
from kvstore.connectors.vllm.tracks import Track

__all__ = ["begin_load", "begin_lookup", "begin_store", "end_lookup"]


def begin_lookup(track: Track, blocks: int) -> tracing.Span:
    """Begin the span of asking for a request's blocks."""
    headers = getattr(track.request, "trace_headers", None)
    parent = track.traceparent or str((headers or {}).get("traceparent", ""))
    request_id = track.request.request_id
    span = tracing.span(
        "kvstore.lookup", parent=parent, kind="client", request=request_id, blocks=blocks
    )
    track.traceparent = parent or span.traceparent
    return span


def end_lookup(span: tracing.Span, asked: Future[Any]) -> None:
    """End it when the answer is there."""
    if span is tracing.OFF:
        return

    def answered(answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            span.set(found_blocks=answer.result().blocks)
        else:
            span.fail(str(error))
        span.end()

    asked.add_done_callback(answered)


def begin_load(load: Load) -> tracing.Span:
    """Begin the span of a load, if its request is traced."""
    if not load.traceparent:
        return tracing.OFF
    return tracing.span(
        "kvstore.load", parent=load.traceparent, request=load.request_id, blocks=len(load.slots)
    )


def begin_store(store: Store) -> tracing.Span:
    """Begin the span of a store, if a request of it is traced."""
    if not store.traceparents:
        return tracing.OFF
    return tracing.batch_span("kvstore.store", store.traceparents, blocks=len(store.slots))
