"""Prometheus metrics, read from the engine when scraped. Label sets are bounded."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from kvstore.engine.counters import UsageCounts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from kvstore.engine import Engine

__all__ = ["EngineCollector"]


class EngineCollector(Collector):
    """Turns the engine's numbers into metric families.

    Runs on the HTTP server's thread: it reads plain numbers only, each of which is consistent.
    """

    def __init__(self, engine: Engine) -> None:
        """Read from an engine."""
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        engine = self._engine
        spaces = list(engine.index.spaces.values())
        tiers = [("host", engine.host.usage(), sum(s.host_blocks for s in spaces))]
        if engine.gpu is not None:
            tiers.append(("gpu", engine.gpu.usage(), sum(s.gpu_blocks for s in spaces)))
            yield CounterMetricFamily(
                "kvstore_gpu_copied_bytes_in",
                "Into the GPU pool.",
                value=engine.gpu.copied_in_bytes,
            )
            yield CounterMetricFamily(
                "kvstore_gpu_copied_bytes_out", "Out of it.", value=engine.gpu.copied_out_bytes
            )
            yield CounterMetricFamily(
                "kvstore_gpu_pin_failures",
                "Pieces of host memory that could not be locked for DMA.",
                value=engine.gpu.pin_failures,
            )
            yield GaugeMetricFamily(
                "kvstore_gpu_degraded",
                "1 after a device has failed: the pool is out of service.",
                value=int(engine.gpu.state != "ok"),
            )
        if engine.gpu_reader is not None:
            way = GaugeMetricFamily(
                "kvstore_gpu_direct",
                "1 for how blocks come from disk to the GPU pool now.",
                labels=["engine"],
            )
            way.add_metric([engine.gpu_reader.name], 1)
            yield way
            yield CounterMetricFamily(
                "kvstore_gpu_direct_failures",
                "Blocks that cuFile did not bring.",
                value=engine.gpu_reader.failures,
            )
        if engine.disk is not None:
            tiers.append(("disk", engine.disk.usage(), sum(s.disk_blocks for s in spaces)))
        capacity = GaugeMetricFamily("kvstore_tier_capacity_bytes", "Limit.", labels=["tier"])
        used = GaugeMetricFamily(
            "kvstore_tier_used_bytes", "In blocks or granted.", labels=["tier"]
        )
        blocks = GaugeMetricFamily("kvstore_tier_blocks", "Blocks with a copy.", labels=["tier"])
        for name, usage, count in tiers:
            capacity.add_metric([name], usage.capacity_bytes)
            used.add_metric([name], usage.used_bytes)
            blocks.add_metric([name], count)
        yield from (capacity, used, blocks)
        yield GaugeMetricFamily("kvstore_leases", "Leases held.", value=engine.leases.count)
        yield GaugeMetricFamily(
            "kvstore_granted_slots",
            "Slots granted and not settled.",
            value=engine.grants.slot_count,
        )
        yield GaugeMetricFamily(
            "kvstore_dirty_blocks", "Blocks on their way to disk.", value=engine.dirty_blocks()
        )
        if engine.budget is not None:
            yield GaugeMetricFamily(
                "kvstore_disk_budget_bytes",
                "May be written to disk in 24 hours.",
                value=engine.budget.day_bytes,
            )
            yield GaugeMetricFamily(
                "kvstore_disk_budget_left_bytes",
                "Of that, what is left now.",
                value=engine.budget.left_bytes,
            )
        for name, count in list(engine.counters.counts.items()):
            yield CounterMetricFamily(f"kvstore_{name}", name.replace("_", " "), value=count)
        for unit, misses in (
            ("blocks", engine.counters.miss_blocks),
            ("tokens", engine.counters.miss_tokens),
        ):
            family = CounterMetricFamily(
                f"kvstore_miss_{unit}", f"Asked for and not served, {unit}.", labels=["reason"]
            )
            for reason, count in list(misses.items()):
                family.add_metric([reason], count)
            yield family
        total = UsageCounts()
        for counts in list(engine.usage.values()):
            total.add(counts)
        for name, count in asdict(total).items():
            yield CounterMetricFamily(f"kvstore_client_{name}", "Reported by clients.", value=count)
        for timing in engine.counters.timings():
            yield SummaryMetricFamily(
                f"kvstore_{timing.name}_seconds",
                "Handler time.",
                count_value=timing.count,
                sum_value=timing.total,
            )
            yield GaugeMetricFamily(
                f"kvstore_{timing.name}_longest_seconds",
                "Longest since the daemon began to serve.",
                value=timing.longest,
            )
