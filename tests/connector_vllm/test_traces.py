"""Spans of requests: from vLLM's trace headers to the daemon's metadata and the workers' loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_store import FakeDaemon, FakeSpace
from mini_engine import MiniEngine, Request
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvstore import tracing
from kvstore.connectors.vllm import guard
from kvstore.connectors.vllm.traces import end_lookup

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PROMPT = list(range(64))


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use_provider(provider)
    yield exporter
    tracing.use_provider(None)
    provider.shutdown()


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the daemon would be told with each Acquire; and no hook fails."""
    guard.failures.clear()
    seen: list[str] = []
    acquire = FakeSpace.acquire

    def watched(self: FakeSpace, *args: Any, **options: Any) -> Any:
        seen.append(tracing.current())
        return acquire(self, *args, **options)

    monkeypatch.setattr(FakeSpace, "acquire", watched)
    yield seen
    assert not guard.failures


def run(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, headers: Any, **options: Any
) -> MiniEngine:
    with monkeypatch.context() as patch:
        patch.setattr(Request, "trace_headers", headers, raising=False)
        engine = MiniEngine(daemon, **options)
        engine.run(engine.add(PROMPT, 1))
    return engine


def test_a_request_s_trace_reaches_the_daemon_and_every_worker(
    spans: InMemorySpanExporter,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    until: Callable[..., None],
) -> None:
    daemon = FakeDaemon()
    run(daemon, monkeypatch, HEADERS, shards=2)

    def committed() -> int:
        stores = [span for span in spans.get_finished_spans() if span.name == "kvstore.store"]
        return sum(span.attributes["kvstore.committed_blocks"] for span in stores)

    until(lambda: committed() == 2 * 8)
    run(daemon, monkeypatch, HEADERS, shards=2)
    found = spans.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in found} == {TRACE}
    assert {f"{span.parent.span_id:016x}" for span in found} == {PARENT}
    lookups = [span for span in found if span.name == "kvstore.lookup"]
    assert [span.attributes["kvstore.found_blocks"] for span in lookups] == [0, 8]
    assert [f"00-{TRACE}-{span.context.span_id:016x}-01" for span in lookups] == told
    loads = [span for span in found if span.name == "kvstore.load"]
    assert len(loads) == 2
    assert {span.attributes["kvstore.blocks"] for span in loads} == {8}
    assert {span.attributes["kvstore.request"] for span in loads} == {"r0"}


def test_without_headers_the_first_lookup_begins_a_trace(
    spans: InMemorySpanExporter, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = FakeDaemon()
    run(daemon, monkeypatch, None)
    run(daemon, monkeypatch, {})
    found = spans.get_finished_spans()
    cold, warm, load = (span for span in found if span.name != "kvstore.store")
    assert (warm.name, load.name) == ("kvstore.lookup", "kvstore.load")
    assert warm.parent is cold.parent is None
    assert load.parent.span_id == warm.context.span_id
    assert cold.context.trace_id != warm.context.trace_id


def test_what_fails_is_said_and_ends(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = FakeDaemon()
    run(daemon, monkeypatch, HEADERS)
    daemon.faults.add("generation")
    spans.clear()
    run(daemon, monkeypatch, HEADERS)
    loads = [span for span in spans.get_finished_spans() if span.name == "kvstore.load"]
    assert len(loads) == 1
    daemon.stop()
    spans.clear()
    end_lookup(tracing.span("lookup"), daemon.answer(lambda: None))
    [ended] = spans.get_finished_spans()
    assert not ended.status.is_ok
    assert ended.status.description == "fake daemon is down"


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "rubbish"}])
def test_where_nobody_traces_nothing_goes_along(
    told: list[str], monkeypatch: pytest.MonkeyPatch, headers: Any
) -> None:
    run(FakeDaemon(), monkeypatch, headers)
    assert told == [""]


def test_a_trace_is_passed_on_where_nothing_is_recorded(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(FakeDaemon(), monkeypatch, HEADERS)
    assert told == [HEADERS["traceparent"]]


@pytest.mark.parametrize("hook", ["on_start", "on_end"])
def test_a_span_processor_that_raises_fails_no_load_and_no_store(
    monkeypatch: pytest.MonkeyPatch, until: Callable[..., None], hook: str
) -> None:
    """It is the program's around us; an engine would wait for ever for what is not reported."""
    raised = list[str]()

    def broken(_self: Any, span: Any, **_: Any) -> None:
        raised.append(span.name)
        raise RuntimeError("a broken span processor")

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(type("Broken", (SpanProcessor,), {hook: broken})())
    tracing.use_provider(provider)
    try:
        daemon = FakeDaemon()
        run(daemon, monkeypatch, HEADERS)
        until(lambda: sum(outcome > 0 for outcome in daemon.commits) == 8)
        warm = run(daemon, monkeypatch, HEADERS)
    finally:
        tracing.use_provider(None)
    assert (warm.loaded_tokens, warm.failed_blocks) == (len(PROMPT), 0)
    assert {"kvstore.lookup", "kvstore.load", "kvstore.store"} <= set(raised)
