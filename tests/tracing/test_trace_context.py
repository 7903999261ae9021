"""Which request a piece of work belongs to: with and without OpenTelemetry."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvstore import tracing
from kvstore.tiers.base import TierName

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from engine_world import World, chain
from world_fixture import make_world

__all__ = ["make_world"]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(
    ("text", "trace"),
    [
        (GIVEN, TRACE),
        (f"00-{TRACE}-{PARENT}-00", TRACE),
        (f"cc-{TRACE}-{PARENT}-01-what-a-later-version-adds", TRACE),
        ("", ""),
        (f"ff-{TRACE}-{PARENT}-01", ""),
        (f"00-{'0' * 32}-{PARENT}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE.upper()}-{PARENT}-01", ""),
        (f"00-{TRACE}-{PARENT}-01\n", ""),
        (f"00-{TRACE[1:]}-{PARENT}-01", ""),
    ],
)
def test_the_trace_that_a_traceparent_names(text: str, trace: str) -> None:
    assert tracing.trace_id(text) == trace
    passed_on = tracing.span("x", parent=text)
    assert passed_on.traceparent == (text if trace else "")
    assert (passed_on is tracing.OFF) == (not trace)


def test_without_a_recorder_a_traceparent_is_passed_on_and_nothing_else() -> None:
    assert not tracing.recording()
    assert tracing.span("x") is tracing.OFF
    assert tracing.metadata() is None
    with tracing.span("outer", parent=GIVEN) as outer:
        outer.set(blocks=1)
        outer.fail("no matter")
        assert tracing.metadata() == (("traceparent", GIVEN),)
        with tracing.span("inner"):
            assert tracing.current() == GIVEN
    assert tracing.current() == tracing.carried() == ""


def test_spans_hang_on_their_parents_and_say_what_failed(spans: InMemorySpanExporter) -> None:
    def work(outer: tracing.Span) -> None:
        late = tracing.span("late")
        with tracing.using(late):
            assert tracing.carried() == late.traceparent
        assert tracing.carried() == outer.traceparent
        tracing.span("other", links=[GIVEN, "no traceparent"]).end()
        late.end()
        late.end()
        raise ValueError("why")

    outer = tracing.span("outer", parent=GIVEN, kind="server", blocks=3)
    with pytest.raises(ValueError, match="why"), outer:
        work(outer)
    found = {span.name: span for span in spans.get_finished_spans()}
    assert len(spans.get_finished_spans()) == 3
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    assert f"{found['outer'].parent.span_id:016x}" == PARENT
    assert found["outer"].kind is SpanKind.SERVER
    assert found["outer"].attributes == {"kvstore.blocks": 3}
    assert found["outer"].status.status_code is StatusCode.ERROR
    assert found["outer"].status.description == "ValueError: why"
    assert found["late"].parent.span_id == found["outer"].context.span_id
    [link] = found["other"].links
    assert f"{link.context.span_id:016x}" == PARENT


def test_what_a_caller_does_not_sample_is_not_recorded(spans: InMemorySpanExporter) -> None:
    with tracing.span("x", parent=f"00-{TRACE}-{PARENT}-00") as unsampled:
        assert tracing.trace_id(unsampled.traceparent) == TRACE
        assert unsampled.traceparent.endswith("-00")
    assert not spans.get_finished_spans()


def test_one_read_for_two_requests_is_in_one_trace_and_linked_to_the_other(
    make_world: Callable[..., World], spans: InMemorySpanExporter
) -> None:
    async def story(world: World) -> None:
        keys = chain("read", 4)
        await world.player().put(keys)
        await world.settle()
        await world.evict_host(keys)
        leases = []
        for name in ("a", "b", "untraced"):
            with tracing.span(name) if name != "untraced" else tracing.using(tracing.OFF):
                player = world.player(name)
                leases.append((player, player.acquire(keys, deadline=60)[0]))
        for player, lease in leases:
            assert (await player.lease_done(lease)).blocks == 4
            player.release(lease)

    make_world().run(story)
    found = spans.get_finished_spans()
    by_name = {span.name: span for span in found}
    promotions = [span for span in found if span.name == "kvstore.promote"]
    assert sum(span.attributes["kvstore.blocks"] for span in promotions) == 4
    assert (
        promotions[0].attributes["kvstore.bytes"]
        == promotions[0].attributes["kvstore.blocks"] * 4096
    )
    for span in promotions:
        assert span.parent.span_id == by_name["a"].context.span_id
        assert [link.context.span_id for link in span.links] == [by_name["b"].context.span_id]


def test_the_way_from_disk_to_the_gpu_is_in_the_trace_of_who_wants_it(
    make_world: Callable[..., World], spans: InMemorySpanExporter
) -> None:
    async def story(world: World) -> None:
        keys = chain("up", 6)
        player = world.player()
        player.sees_gpus()
        await player.put(keys)
        await world.settle()
        await world.evict_host(keys)
        with tracing.span("prefetch"):
            blocks, done, _ = await world.engine.tickets.prefetch(
                world.space, keys, 77, 0, 0, 60, TierName.GPU
            )
        assert (blocks, done) == (6, True)

    make_world(gpu_blocks=24, host_blocks=32, disk_blocks=32).run(story)
    found = {span.context.span_id: span for span in spans.get_finished_spans()}
    named = {
        name: [s for s in found.values() if s.name == f"kvstore.{name}"]
        for name in ("promote", "promote_gpu")
    }
    assert sum(span.attributes["kvstore.landed_blocks"] for span in named["promote_gpu"]) == 6
    assert len({span.context.trace_id for span in found.values()}) == 1
    for span in named["promote_gpu"]:
        assert found[span.parent.span_id].name == "kvstore.promote"
    for span in named["promote"]:
        assert found[span.parent.span_id].name == "prefetch"


@pytest.mark.parametrize(
    ("environment", "exporter"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "TRUE"}, ""),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
    ],
)
def test_what_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], exporter: str
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tracing.wanted() == exporter


@pytest.mark.parametrize(
    ("name", "protocol", "said"),
    [("zipkin", "", "OTEL_TRACES_EXPORTER: zipkin"), ("otlp", "carrier pigeon", "carrier pigeon")],
)
def test_what_cannot_be_had_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, name: str, protocol: str, said: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with pytest.raises(tracing.TracingUnavailable, match=said):
        tracing.set_up("kvstore", "1")
    assert not tracing.recording()


@pytest.mark.parametrize(
    ("variable", "value", "protocol"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "grpc"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "grpc"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "http/protobuf"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-4", "http/protobuf"),
    ],
)
def test_a_setting_that_opentelemetry_refuses_costs_the_traces_and_no_more(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, protocol: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv(variable, value)
    said = "does not accept its settings: .+"
    if (
        protocol == "grpc"
        and importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc") is None
    ):
        said = "pip install .* opentelemetry-exporter-otlp-proto-grpc"
    with pytest.raises(tracing.TracingUnavailable, match=said):
        tracing.set_up("kvstore", "1")
    assert not tracing.recording()


def test_what_a_program_sets_up_late_is_found() -> None:
    program = """
import time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from kvstore import tracing
assert tracing.span("x") is tracing.OFF
trace.set_tracer_provider(TracerProvider())
end = time.monotonic() + 60
while tracing.span("x") is tracing.OFF:
    assert time.monotonic() < end
with trace.get_tracer("program").start_as_current_span("outer") as outer:
    wanted = f"{outer.get_span_context().trace_id:032x}"
    assert tracing.trace_id(tracing.current()) == wanted
    assert tracing.trace_id(tracing.span("inner").traceparent) == wanted
"""
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_where_opentelemetry_is_not_installed() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None  # what is None cannot be imported
from kvstore import Client, tracing
assert tracing.span("x") is tracing.OFF
assert tracing.metadata() is None
try:
    tracing.set_up("kvstore", "1")
except tracing.TracingUnavailable as error:
    print(error)
assert not any(name.startswith("opentelemetry.") for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"OTEL_TRACES_EXPORTER": "otlp", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert "is not installed: pip install 'kvstore-tiers[otel]'" in done.stdout
