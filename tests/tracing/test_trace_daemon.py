"""A request's trace from a program through the client and the daemon to the disk and the log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_collector import Collector

import kvstore
from kvstore import tracing

SPEC = kvstore.SpaceSpec(model="m", dtype="f", block_tokens=16, shard_bytes=(4096,))
KEYS = kvstore.chain_keys(list(range(64)), 16)


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


def test_a_get_is_followed_to_the_disk_and_into_the_log(
    start_daemon: Callable[..., Any],
    collector: Collector,
    spans: InMemorySpanExporter,
    until: Callable[..., None],
    tmp_path: Any,
) -> None:
    daemon = start_daemon(
        *("--disk", str(tmp_path / "disk"), "--disk-capacity", "64MiB"),
        *("--log-format", "json", "--log-level", "debug"),
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="50",
        OTEL_SERVICE_NAME="store-7",
    )
    blocks = np.arange(4 * 4096, dtype=np.uint64).astype(np.uint8).reshape(4, 4096)
    with kvstore.Client(daemon.address) as client:
        space = client.open_space(SPEC)
        assert client.attachment.wait_active(60)
        assert space.put(KEYS, blocks, timeout_s=60) == 4
        assert client.flush().done
        assert space.evict(tier="host").copies == 4
        with tracing.span("program") as program:
            trace = tracing.trace_id(program.traceparent)
            assert (space.get(KEYS, timeout_s=60) == blocks).all()
            # A lease is released a moment after its bytes were read.
            until(lambda: space.evict(tier="host").skipped == 0)
            assert space.prefetch(KEYS).wait(60) == 4
            with pytest.raises(kvstore.InvalidRequest):
                client.explain_request("nobody's")
    until(lambda: collector.named("kvstore.promote") and collector.named("kvstore.explain"))
    assert collector.services == {"store-7"}
    [get] = [span for span in spans.get_finished_spans() if span.name == "kvstore.get"]
    assert f"{get.context.trace_id:032x}" == trace
    mine = [span for span in collector.spans if span.trace_id.hex() == trace]
    acquire = next(span for span in mine if span.name == "kvstore.acquire")
    assert acquire.parent_span_id.hex() == f"{get.context.span_id:016x}"
    assert acquire.kind == acquire.SPAN_KIND_SERVER
    prefetch = next(span for span in mine if span.name == "kvstore.prefetch")
    promotions = [span for span in mine if span.name == "kvstore.promote"]
    assert {span.parent_span_id for span in promotions} == {acquire.span_id, prefetch.span_id}
    [explain] = [span for span in mine if span.name == "kvstore.explain"]
    assert explain.status.code == explain.status.STATUS_CODE_ERROR
    # The put was traced, too, as a trace of its own; nobody's calls are no spans.
    put = next(span for span in spans.get_finished_spans() if span.name == "kvstore.put")
    reserve = next(span for span in collector.named("kvstore.reserve"))
    assert reserve.trace_id.hex() == f"{put.context.trace_id:032x}" != trace
    # What was stored was written to disk for it.
    commits = {span.span_id: span for span in collector.named("kvstore.commit")}
    writes = collector.named("kvstore.flush")
    assert {span.parent_span_id for span in writes} <= commits.keys()
    assert {span.trace_id for span in writes} == {reserve.trace_id}
    assert not collector.named("kvstore.openspace")
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    [refused] = [line for line in lines if line["message"].startswith("explain refused")]
    assert refused["trace_id"] == trace
    assert refused["request"] == "nobody's"


def test_the_asynchronous_client_traces_as_well(
    start_daemon: Callable[..., Any],
    collector: Collector,
    spans: InMemorySpanExporter,
    until: Callable[..., None],
) -> None:
    daemon = start_daemon(
        OTEL_TRACES_EXPORTER="otlp",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="50",
    )

    async def use() -> None:
        async with kvstore.AsyncClient(daemon.address) as client:
            space = await client.open_space(SPEC)

            async def look(name: str) -> None:
                with tracing.span(name):
                    await space.lookup(KEYS)

            await asyncio.gather(look("a"), look("b"))

    asyncio.run(use())
    until(lambda: len(collector.named("kvstore.lookup")) == 2)
    found = spans.get_finished_spans()
    lookups = {span.context.span_id: span for span in found if span.name == "kvstore.lookup"}
    assert {f"{number:016x}" for number in lookups} == {
        span.parent_span_id.hex() for span in collector.named("kvstore.lookup")
    }
    assert {span.parent.span_id for span in lookups.values()} == {
        span.context.span_id for span in found if span.name in ("a", "b")
    }


def test_spans_on_the_console_are_lines_of_the_log(
    start_daemon: Callable[..., Any], spans: InMemorySpanExporter
) -> None:
    daemon = start_daemon("--log-format", "json", OTEL_TRACES_EXPORTER="console")
    with kvstore.Client(daemon.address) as client:
        client.open_space(SPEC).lookup(KEYS)
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    [lookup] = [line for line in lines if line["message"] == "span: kvstore.lookup"]
    assert lookup["span"]["kind"] == "SpanKind.SERVER"
    assert lookup["level"] == "info"


@pytest.mark.parametrize(
    "environment",
    [
        # Nobody listens there.
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"},
        {"OTEL_TRACES_EXPORTER": "smoke signals"},
    ],
)
def test_a_daemon_whose_traces_cannot_go_anywhere_serves_and_stops(
    start_daemon: Callable[..., Any], spans: InMemorySpanExporter, environment: dict[str, str]
) -> None:
    daemon = start_daemon("--log-format", "json", **environment)
    with kvstore.Client(daemon.address) as client:
        assert client.open_space(SPEC).lookup(KEYS).blocks == 0
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    if "OTEL_TRACES_EXPORTER" in environment:
        [said] = [line for line in lines if "no traces" in line["message"]]
        assert said["level"] == "warning"
