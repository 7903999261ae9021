"""Moves that a request sets off are in its trace: writes to disk, evictions, reads, ways to the GPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvstore import tracing
from kvstore.index import SpaceLimits
from kvstore.tiers.base import TierName
from kvstore.tiers.faulty import Fault, FaultKind, Faulty
from kvstore.tiers.kvikio_engine import KvikioEngine

for directory in ("engine", "tiers_gpu"):
    sys.path.insert(0, str(Path(__file__).parents[1] / directory))

from engine_world import SLOT_BYTES, World, chain
from kvikio_stub import KvikioStub, kvikio_stub
from world_fixture import make_world

__all__ = ["make_world"]

MakeWorld = Callable[..., World]


class Traces:
    """What was recorded, by who asked for it: a span that has that name."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def moves(self, name: str) -> list[ReadableSpan]:
        found = self._exporter.get_finished_spans()
        return [span for span in found if span.name == f"kvstore.{name}"]

    def name(self, context: Any) -> str:
        [span] = [
            span
            for span in self._exporter.get_finished_spans()
            if span.context is not None and span.context.span_id == context.span_id
        ]
        return str(span.name)

    def askers(self, move: ReadableSpan) -> set[str]:
        """Names of a move's parent, and of the spans that it is linked to."""
        assert move.parent is not None
        return {self.name(context) for context in (move.parent, *(l.context for l in move.links))}

    def total(self, name: str, what: str = "blocks") -> int:
        return sum(
            int(str(span.attributes[f"kvstore.{what}"]))
            for span in self.moves(name)
            if span.attributes is not None
        )


def noted(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return a list that takes, of each line that is logged, its text and the trace it is in."""
    lines: list[tuple[str, str]] = []

    def note(record: logging.LogRecord) -> bool:
        lines.append((record.getMessage(), tracing.trace_id(tracing.carried())))
        return True

    caplog.handler.addFilter(note)
    return lines


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


@pytest.fixture
def traces(spans: InMemorySpanExporter) -> Traces:
    return Traces(spans)


async def bring_to_gpu(world: World, keys: list[bytes]) -> int:
    blocks, done, _ = await world.engine.tickets.prefetch(
        world.space, keys, 77, 0, 0, 60, TierName.GPU
    )
    assert done
    return blocks


def test_writes_to_disk_belong_to_who_stored_the_blocks(
    make_world: MakeWorld, traces: Traces
) -> None:
    async def story(world: World) -> None:
        for name in ("a", "b"):
            with tracing.span(name):
                assert await world.player().put(chain(name, 6)) == 6
        assert await world.player().put(chain("nobody's", 6)) == 6
        await world.settle()
        assert world.counts("flushed_blocks") == 18

    make_world().run(story)
    writes = traces.moves("flush")
    # Groups are made as blocks come: one may hold some of each, and of those that nobody traces.
    assert 12 <= traces.total("flush") <= 18
    assert traces.total("flush", "bytes") == traces.total("flush") * SLOT_BYTES
    assert set.union(*(traces.askers(write) for write in writes)) == {"a", "b"}
    assert all(write.status.status_code is not StatusCode.ERROR for write in writes)


def test_a_flush_that_is_asked_for(make_world: MakeWorld, traces: Traces) -> None:
    async def story(world: World) -> None:
        keys = chain("a", 4)
        await world.player().put(keys)
        await world.settle()
        assert world.tiers(keys) == "hhhh"
        flusher = world.engine.flusher
        assert flusher is not None
        with tracing.span("ask"):
            assert not await flusher.flush([world.block(key) for key in keys], 60)
        await world.settle()

    make_world(flush_on_commit=False).run(story)
    assert traces.total("flush") == 4
    assert {asker for write in traces.moves("flush") for asker in traces.askers(write)} == {"ask"}


def test_what_could_not_be_written_says_so_and_its_next_try_is_nobodys(
    make_world: MakeWorld, traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    logged = noted(caplog)

    async def story(world: World) -> None:
        world.disk.plan.append(Fault(FaultKind.IO_ERROR, "sync"))
        flusher = world.engine.flusher
        assert flusher is not None
        with (
            caplog.at_level(logging.WARNING, "kvstore.engine.group_writer"),
            tracing.span("store"),
        ):
            assert await world.player().put(chain("a", 1)) == 1
            assert len(await flusher.flush([world.block(chain("a", 1)[0])], 60)) == 1
        world.disk.plan.clear()
        flusher.retry_refused()
        await world.settle()
        assert world.tiers(chain("a", 1)) == "b"

    make_world(wrap=Faulty).run(story)
    failed = [s for s in traces.moves("flush") if s.status.status_code is StatusCode.ERROR]
    assert failed == traces.moves("flush")
    assert all(span.status.description == "1 blocks are not on disk" for span in failed)
    assert all(traces.askers(span) == {"store"} for span in failed)
    # The log's line about it names the trace; later tries, of nobody's, may have failed as well.
    said = [trace for text, trace in logged if trace and text.startswith("flush failed")]
    assert said == [trace_of(span) for span in failed]


@pytest.mark.parametrize("limits", [None, SpaceLimits(host_bytes=8 * SLOT_BYTES)])
def test_evictions_belong_to_who_needs_the_place(
    make_world: MakeWorld, traces: Traces, limits: SpaceLimits | None
) -> None:
    async def story(world: World) -> None:
        await world.player().put(chain("old", 8))
        assert not world.counts("evicted_blocks_host")
        with tracing.span("push"):
            assert await world.player().put(chain("new", 5)) == 5
        assert world.counts("evicted_blocks_host") == 5

    make_world(host_blocks=8 if limits is None else 32, disk_blocks=0, default_limits=limits).run(
        story
    )
    assert traces.total("evict") == 5
    for eviction in traces.moves("evict"):
        assert traces.askers(eviction) == {"push"}
        assert eviction.attributes is not None
        assert eviction.attributes["kvstore.tier"] == "host"
        assert eviction.attributes["kvstore.pressure"] == ("room" if limits is None else "quota")


def test_what_leaves_the_disk_leaves_for_who_writes(make_world: MakeWorld, traces: Traces) -> None:
    async def story(world: World) -> None:
        await world.player().put(chain("old", 16))
        await world.settle()
        assert not world.counts("evicted_blocks_disk")
        with tracing.span("push"):
            await world.player().put(chain("new", 6))
        await world.settle()
        assert world.counts("evicted_blocks_disk") >= 6

    make_world(host_blocks=64, disk_blocks=16).run(story)
    left = [
        span
        for span in traces.moves("evict")
        if span.attributes is not None and span.attributes["kvstore.tier"] == "disk"
    ]
    assert left
    assert all(traces.askers(span) == {"push"} for span in left)


def test_a_write_that_makes_room_in_memory(
    make_world: MakeWorld, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        assert world.engine.flusher is not None
        world.engine.room.flush_on_evict = True
        # Room is made when it is needed, not ahead.
        monkeypatch.setattr(world.engine.room, "_schedule_ahead", lambda _: None)
        await world.player().put(chain("old", 8))
        await world.settle()
        assert world.tiers(chain("old", 8)) == "h" * 8
        with tracing.span("push"):
            assert await world.player().put(chain("new", 4), deadline=60) == 4
        await world.settle()

    make_world(host_blocks=8, flush_on_commit=False).run(story)
    assert {asker for write in traces.moves("flush") for asker in traces.askers(write)} == {"push"}


def test_a_read_that_fails_is_logged_with_its_trace(
    make_world: MakeWorld, traces: Traces, caplog: pytest.LogCaptureFixture
) -> None:
    logged = noted(caplog)

    async def story(world: World) -> None:
        keys = chain("a", 4)
        await world.player().put(keys)
        await world.evict_host()
        world.disk.plan.append(Fault(FaultKind.UNAVAILABLE, "read"))
        with (
            caplog.at_level(logging.WARNING, "kvstore.prefetch.promoter"),
            tracing.span("read"),
        ):
            player = world.player()
            lease, _ = player.acquire(keys, deadline=60)
            assert (await player.lease_done(lease)).blocks == 0
            player.release(lease)
        await world.settle()

    make_world(wrap=Faulty).run(story)
    [first, *_] = traces.moves("promote")
    assert first.status.status_code is StatusCode.ERROR
    said = [trace for text, trace in logged if text.startswith("read failed")]
    assert said == [trace_of(first)]


@pytest.fixture
def stub() -> Iterator[KvikioStub]:
    made = KvikioStub()
    with kvikio_stub(made):
        yield made


def test_reads_past_host_memory(make_world: MakeWorld, traces: Traces, stub: KvikioStub) -> None:
    async def story(world: World) -> None:
        keys = chain("a", 12)
        await world.player().put(keys)
        await world.evict_host()
        with tracing.span("prefetch"):
            assert await bring_to_gpu(world, keys) == 12
        assert world.counts("direct_blocks_gpu") == 12

    make_world(gpu_blocks=32, gpu_engine=KvikioEngine).run(story)
    assert traces.total("promote_direct") == traces.total("promote_direct", "landed_blocks") == 12
    for read in traces.moves("promote_direct"):
        assert traces.askers(read) == {"prefetch"}


def test_what_makes_room_in_the_gpu_pool(make_world: MakeWorld, traces: Traces) -> None:
    async def story(world: World) -> None:
        player = world.player()
        player.sees_gpus()
        first, second = chain("a", 4), chain("b", 4)
        await player.put(first)
        await world.settle()
        assert await bring_to_gpu(world, first) == 4
        await world.evict_host(first)
        await player.put(second)
        await world.settle()
        with tracing.span("prefetch"):
            assert await bring_to_gpu(world, second) == 4
        assert world.counts("demoted_blocks") == 4

    make_world(gpu_blocks=4).run(story)
    assert traces.total("demote") == 4
    for move in traces.moves("demote"):
        assert traces.askers(move) == {"kvstore.promote_gpu"}
    for move in traces.moves("promote_gpu"):
        assert traces.askers(move) == {"prefetch"}
