"""Prometheus metrics, read from the engine when scraped; `metric_series` says what there is."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvstore.buckets import BUCKET_SECONDS
from kvstore.engine.attachments import State
from kvstore.engine.counters import UsageCounts
from kvstore.miss import MissReason
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server.metric_series import COUNTS, SERIES, TIMINGS, Kind
from kvstore.tiers.base import TierName

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client import Metric

    from kvstore.engine import Engine
    from kvstore.prefetch.estimate import PathEstimate

__all__ = ["EngineCollector"]

# Name of a series, values of its labels, value.
_Sample = tuple[str, tuple[str, ...], float]

_CALLS: Final = frozenset(
    method.name.lower()
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
_BY_TIER: Final = (
    "hit_blocks",
    "hit_tokens",
    "evicted_blocks",
    "quota_evicted_blocks",
    "expired_blocks",
)
_STUCK: Final = (State.PRESUMED_DEAD, State.SILENT)


def _cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return a histogram's buckets as Prometheus wants them.

    What the loop adds meanwhile is in the next scrape: the sum of these is the count.
    """
    return [
        ("+Inf" if limit is None else f"{limit:g}", upto)
        for limit, upto in zip((*BUCKET_SECONDS, None), accumulate(counts), strict=True)
    ]


class EngineCollector(Collector):
    """Turns the engine's numbers into metric families.

    Runs on the HTTP server's thread: it reads plain numbers, each of which is consistent, and
    copies what the event loop may change before it iterates.
    """

    def __init__(self, engine: Engine) -> None:
        """Read from an engine."""
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield all families that have a value."""
        samples: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for name, labels, value in self._samples():
            samples.setdefault(name, []).append((labels, value))
        for name, found in samples.items():
            series = SERIES[name]
            family: CounterMetricFamily | GaugeMetricFamily
            if series.kind is Kind.COUNTER:
                family = CounterMetricFamily(name, series.meaning, labels=series.labels)
            else:
                family = GaugeMetricFamily(name, series.meaning, labels=series.labels)
            for labels, value in found:
                family.add_metric(labels, value)
            yield family
        yield from self._histograms()

    def _samples(self) -> Iterator[_Sample]:
        yield from self._usage()
        yield from self._tiers()
        yield from self._holders()
        yield from self._disk_path()
        yield from self._gpu()
        counters = self._engine.counters
        for name in COUNTS:
            # `get`, not `[]`: a scrape must not add to what the loop iterates over.
            yield f"kvstore_{name}", (), counters.counts.get(name, 0)
        for reason in MissReason:
            if reason is not MissReason.NONE:
                yield "kvstore_miss_blocks", (reason.value,), counters.miss_blocks.get(reason, 0)
                yield "kvstore_miss_tokens", (reason.value,), counters.miss_tokens.get(reason, 0)
        for timing in counters.histograms():
            yield "kvstore_longest_seconds", (timing.name,), timing.longest

    def _usage(self) -> Iterator[_Sample]:
        total = UsageCounts.total(list(self._engine.usage.values()))
        values = total.values()
        reused = total.local_tokens
        for tier in ("gpu", "host", "disk"):
            tokens = values.pop(f"reused_tokens_{tier}")
            reused += tokens
            yield "kvstore_client_reused_tokens", (tier,), tokens
        for name, value in values.items():
            yield f"kvstore_client_{name}", (), value
        if total.prompt_tokens:
            yield "kvstore_effective_hit_ratio", (), reused / total.prompt_tokens

    def _tiers(self) -> Iterator[_Sample]:
        engine = self._engine
        counts = engine.counters.counts
        spaces = list(engine.index.spaces.values())
        yield "kvstore_spaces", (), len(spaces)
        limited = [space for space in spaces if space.in_force]
        yield "kvstore_pinned_blocks", (), sum(engine.pins.counts().values())
        tiers = [("host", engine.host.usage(), engine.host.state)]
        blocks = Counter(host=sum(space.host_blocks for space in spaces))
        if engine.disk is not None:
            tiers.append(("disk", engine.disk.usage(), engine.disk_state))
            blocks["disk"] = sum(space.disk_blocks for space in spaces)
        if engine.gpu is not None:
            tiers.append(("gpu", engine.gpu.usage(), engine.gpu.state))
            blocks["gpu"] = sum(space.gpu_blocks for space in spaces)
        for tier, usage, state in tiers:
            label = (tier,)
            yield "kvstore_tier_capacity_bytes", label, usage.capacity_bytes
            yield "kvstore_tier_used_bytes", label, usage.used_bytes
            yield "kvstore_tier_blocks", label, blocks[tier]
            yield "kvstore_tier_degraded", label, int(state != "ok")
            for name in _BY_TIER:
                yield f"kvstore_{name}", label, counts.get(f"{name}_{tier}", 0)
            which = TierName[tier.upper()]
            quotas = [s for s in limited if s.in_force.quota_bytes(which) is not None]
            yield "kvstore_spaces_with_quota", label, len(quotas)
            yield "kvstore_spaces_over_quota", label, sum(s.excess(which) > 0 for s in quotas)

    def _holders(self) -> Iterator[_Sample]:
        engine = self._engine
        states = Counter[str]()
        stuck_slots, stuck_bytes = engine.quarantine.stuck
        leased = 0
        for attachment in engine.attachments.snapshot():
            states[attachment.state.value] += 1
            leased += attachment.leased_bytes
            if attachment.state in _STUCK:
                waiting = engine.grants.open_slots_of(attachment)
                stuck_slots += waiting.slots
                stuck_bytes += waiting.bytes
        for state in State:
            if state is not State.GONE:
                yield "kvstore_attachments", (state.value,), states[state.value]
        yield "kvstore_leases", (), engine.leases.count
        yield "kvstore_leased_bytes", (), leased
        yield "kvstore_grants", (), len(engine.grants)
        yield "kvstore_granted_slots", (), engine.grants.slot_count
        yield "kvstore_stuck_slots", (), stuck_slots
        yield "kvstore_stuck_bytes", (), stuck_bytes
        yield "kvstore_draining", (), int(engine.reservations.closed)

    def _disk_path(self) -> Iterator[_Sample]:
        engine = self._engine
        yield "kvstore_dirty_blocks", (), engine.dirty_blocks()
        if engine.disk is not None:
            yield "kvstore_disk_read_bytes", (), engine.disk.read_bytes
            yield "kvstore_disk_written_bytes", (), engine.disk.written_bytes
            yield "kvstore_disk_io_errors", (), engine.disk.io_errors
        if engine.budget is not None:
            yield "kvstore_disk_budget_bytes", (), engine.budget.day_bytes
            yield "kvstore_disk_budget_left_bytes", (), engine.budget.left_bytes
        promoter = engine.promoter
        if promoter is not None:
            yield "kvstore_promotion_queue_bytes", (), promoter.queued_bytes
            yield "kvstore_promotion_jobs", (), promoter.jobs
            yield "kvstore_path_stalled", ("disk",), int(engine.worth.stalled)
            yield from self._path("disk", promoter.path)

    @staticmethod
    def _path(name: str, path: PathEstimate) -> Iterator[_Sample]:
        if path.measured:
            yield "kvstore_path_bytes_per_second", (name,), path.bytes_per_second
            yield "kvstore_path_latency_seconds", (name,), path.latency_seconds

    def _gpu(self) -> Iterator[_Sample]:
        gpu, reader = self._engine.gpu, self._engine.gpu_reader
        if gpu is not None:
            yield "kvstore_gpu_copied_bytes_in", (), gpu.copied_in_bytes
            yield "kvstore_gpu_copied_bytes_out", (), gpu.copied_out_bytes
            yield "kvstore_gpu_pin_failures", (), gpu.pin_failures
        side = self._engine.gpu_side
        if side is not None:
            yield from self._path("host_to_gpu", side.mover.path)
            if side.direct is not None:
                yield from self._path("disk_to_gpu", side.direct.path)
        if reader is not None:
            yield "kvstore_gpu_direct", (reader.name,), 1
            yield "kvstore_gpu_direct_failures", (), reader.failures

    def _histograms(self) -> Iterator[Metric]:
        series = SERIES["kvstore_call_seconds"]
        calls = HistogramMetricFamily(series.name, series.meaning, labels=series.labels)
        for timing in self._engine.counters.histograms():
            buckets = _cumulative(timing.buckets)
            if timing.name in _CALLS:
                calls.add_metric([timing.name], buckets, timing.total)
            elif timing.name in TIMINGS:
                series = SERIES[f"kvstore_{timing.name}_seconds"]
                family = HistogramMetricFamily(series.name, series.meaning)
                family.add_metric([], buckets, timing.total)
                yield family
        yield calls
        series = SERIES["kvstore_client_seconds"]
        clients = HistogramMetricFamily(series.name, series.meaning, labels=series.labels)
        for operation, times in self._engine.counters.client_times.items():
            clients.add_metric([operation], _cumulative(times.counts), times.total)
        yield clients
