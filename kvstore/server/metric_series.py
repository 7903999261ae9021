"""Every Prometheus series that the daemon has: name, type, unit, labels, meaning.

`metrics` fills them in; `make metrics-table` writes the table of docs/metrics.md from here. Labels
take few values, whatever clients do: tiers, reasons, states, calls and timings of this program;
never spaces, clients or keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["COUNTS", "SERIES", "TIMINGS", "Kind", "Series", "renewed", "table", "write"]

_BEGIN: Final = "<!-- series: begin -->"
_END: Final = "<!-- series: end -->"


class Kind(StrEnum):
    """Types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Series:
    """One metric.

    Attributes:
        name: without what its type adds.
        kind: its type.
        unit: of its values.
        labels: their names.
        meaning: one line.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def shown(self) -> str:
        """Name as it is scraped; of a histogram, without `_bucket`, `_sum`, `_count`."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


# Plain counts of the engine by their name there, which is also that in `kvstore stats`.
COUNTS: Final[dict[str, tuple[str, str]]] = {
    "stored_blocks": ("blocks", "committed by clients"),
    "promoted_blocks": ("blocks", "brought from disk to host memory"),
    "promoted_blocks_gpu": ("blocks", "brought to the GPU pool"),
    "direct_blocks_gpu": ("blocks", "of those, from disk past host memory"),
    "demoted_blocks": ("blocks", "brought from the GPU pool to host memory"),
    "gpu_promotions_dropped": ("blocks", "promotions to the GPU pool that were given up"),
    "moved_blocks_disk": ("blocks", "moved between segments for a smaller disk tier"),
    "warm_up_blocks": ("blocks", "brought from disk to host memory after the start"),
    "afterwards_blocks": (
        "blocks",
        "brought from disk to host memory after a request had declined and computed them",
    ),
    "afterwards_bytes": ("bytes", "of those"),
    "evictions_inline": ("blocks", "left host memory while somebody waited for their place"),
    "evictions_background": ("blocks", "left host memory ahead of need; they stay on disk"),
    "evicted_by_request": ("copies", "removed by `evict`"),
    "flushed_blocks": ("blocks", "written to disk"),
    "flushed_bytes": ("bytes", "written to disk"),
    "flush_refused_blocks": ("blocks", "refused by the disk tier, each time"),
    "flush_skipped_budget_blocks": ("blocks", "not written: the disk budget is spent"),
    "flush_skipped_no_room_blocks": ("blocks", "not written: no room on disk"),
    "flush_skipped_quota_blocks": ("blocks", "not written: over the quota of their space"),
    "quota_refused_blocks": ("blocks", "not granted to clients: the quota of their space"),
    "flush_skipped_not_reused_blocks": (
        "blocks",
        "left host memory without a second use (`reused`)",
    ),
    "corrupt_blocks": ("blocks", "digest failures: damaged, dropped, never served"),
    "scrubs": ("checks", "begun by `verify`"),
    "scrubbed_blocks": ("blocks", "read by `verify`"),
    "scrub_damaged_blocks": ("blocks", "found damaged by `verify`"),
    "adopted_blocks": ("blocks", "taken over from the daemon before, in host memory"),
    "adopted_checked_blocks": ("blocks", "of those, compared with their digests by now"),
    "adopted_damaged_blocks": ("blocks", "of those, found damaged"),
    "adoption_dropped_blocks": ("blocks", "in the saved host index, and not taken over"),
    "recovery_dropped_blocks": ("blocks", "on disk, and not taken over at the start"),
    "index_commit_failures": ("commits", "of the index that failed"),
    "waits_begun": ("leases", "began to wait for disk: loading was predicted to be faster"),
    "waits_ended": ("leases", "that got what they waited for"),
    "waits_cut": ("leases", "gave up in the middle: computing had become faster"),
    "waits_declined": (
        "leases",
        "did not wait, for all or some: computing was predicted to be faster",
    ),
    "waits_declined_stalled": ("leases", "did not wait: reads from disk had stalled"),
    "path_stalls": ("stalls", "times that reads from disk stalled"),
    "leases_revoked": ("leases", "ended by force: silent client, ended epoch"),
    "streams_given_up": ("streams", "ended because their client did not read or write"),
    "slab_groups_retired": ("groups", "memory given to another block size or back to the system"),
    "recorded_events": ("events", "written by `serve --record`"),
    "recording_dropped_events": ("events", "not written: the recorder was behind"),
}

# Timings of the engine by their name there; those of calls are one series.
TIMINGS: Final[dict[str, str]] = {
    "wait": "waits for disk that were worth it, as long as they took",
    "wait_predicted": "the same, as predicted",
    "wait_error": "difference between the two",
    "wait_lost": "waits for disk that were given up",
    "promote_batch": "one batch from disk to host memory",
    "promote_gpu_batch": "one batch to the GPU pool",
    "flush_group": "one group of blocks to disk, durable",
    "loop_slice": "what the daemon did in one go while everybody else waited",
    "loop_slice_cpu": "processor time of that",
}

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

SERIES: Final[dict[str, Series]] = {
    series.name: series
    for series in (
        Series("kvstore_effective_hit_ratio", _G, "ratio", (), "of all prompt tokens those that were not computed: reused or found in engines' own caches, as clients report since the start; absent before"),
        Series("kvstore_client_requests", _C, "requests", (), "served, as clients report them"),
        Series("kvstore_client_prompt_tokens", _C, "tokens", (), "of these requests"),
        Series("kvstore_client_reused_tokens", _C, "tokens", ("tier",), "loaded instead of computed, by the tier that held them when asked"),
        Series("kvstore_client_local_tokens", _C, "tokens", (), "found in the engines' own prefix caches"),
        Series("kvstore_client_load_failures", _C, "loads", (), "reported failed to the engine"),
        Series("kvstore_client_loaded_bytes", _C, "bytes", (), "copied out by clients"),
        Series("kvstore_client_stored_bytes", _C, "bytes", (), "copied in by clients"),
        Series("kvstore_hit_blocks", _C, "blocks", ("tier",), "leased or streamed, by the tier that held them when asked"),
        Series("kvstore_hit_tokens", _C, "tokens", ("tier",), "the same in tokens"),
        Series("kvstore_miss_blocks", _C, "blocks", ("reason",), "asked for and not served, by why the run ended"),
        Series("kvstore_miss_tokens", _C, "tokens", ("reason",), "the same in tokens"),
        Series("kvstore_tier_capacity_bytes", _G, "bytes", ("tier",), "limit"),
        Series("kvstore_tier_used_bytes", _G, "bytes", ("tier",), "slots that hold blocks, are granted or in transfer"),
        Series("kvstore_tier_blocks", _G, "blocks", ("tier",), "with a copy there"),
        Series("kvstore_tier_degraded", _G, "0 or 1", ("tier",), "1: out of service, or in part; `kvstore stats` says why"),
        Series("kvstore_evicted_blocks", _C, "blocks", ("tier",), "copies that left for others"),
        Series("kvstore_quota_evicted_blocks", _C, "blocks", ("tier",), "of those, for the quota of their own space"),
        Series("kvstore_expired_blocks", _C, "blocks", ("tier",), "left because nobody used them for as long as their space keeps blocks"),
        Series("kvstore_spaces_with_quota", _G, "spaces", ("tier",), "that have a quota there"),
        Series("kvstore_spaces_over_quota", _G, "spaces", ("tier",), "of those, beyond it now: what is too much is leased, pinned or on its way"),
        Series("kvstore_pinned_blocks", _G, "blocks", (), "pinned now"),
        Series("kvstore_spaces", _G, "spaces", (), "known"),
        Series("kvstore_attachments", _G, "processes", ("state",), "attached, by state"),
        Series("kvstore_leases", _G, "leases", (), "held"),
        Series("kvstore_leased_bytes", _G, "bytes", (), "that they cover"),
        Series("kvstore_grants", _G, "grants", (), "not settled"),
        Series("kvstore_granted_slots", _G, "slots", (), "granted and not settled"),
        Series("kvstore_stuck_slots", _G, "slots", (), "granted, their writer silent or presumed dead, its lock held"),
        Series("kvstore_stuck_bytes", _G, "bytes", (), "of those"),
        Series("kvstore_draining", _G, "0 or 1", (), "1: nothing is stored until the next start (`kvstore drain`)"),
        Series("kvstore_dirty_blocks", _G, "blocks", (), "on their way to disk"),
        Series("kvstore_promotion_queue_bytes", _G, "bytes", (), "queued or on their way from disk to host memory"),
        Series("kvstore_promotion_jobs", _G, "jobs", (), "leases, streams and tickets that wait for them"),
        Series("kvstore_path_bytes_per_second", _G, "bytes/s", ("path",), "speed as measured; absent before the first read"),
        Series("kvstore_path_latency_seconds", _G, "s", ("path",), "of a read, beyond the time of its bytes"),
        Series("kvstore_path_stalled", _G, "0 or 1", ("path",), "1: nobody begins to wait for it"),
        Series("kvstore_disk_read_bytes", _C, "bytes", (), "read from disk"),
        Series("kvstore_disk_written_bytes", _C, "bytes", (), "written to disk"),
        Series("kvstore_disk_io_errors", _C, "errors", (), "of the disk tier"),
        Series("kvstore_disk_budget_bytes", _G, "bytes", (), "may be written to disk in 24 hours; absent without a budget"),
        Series("kvstore_disk_budget_left_bytes", _G, "bytes", (), "of that, what is left now"),
        Series("kvstore_gpu_copied_bytes_in", _C, "bytes", (), "into the GPU pool"),
        Series("kvstore_gpu_copied_bytes_out", _C, "bytes", (), "out of it"),
        Series("kvstore_gpu_pin_failures", _C, "pieces", (), "of host memory that could not be locked for DMA"),
        Series("kvstore_gpu_direct", _G, "1", ("engine",), "how blocks come from disk to the GPU pool now"),
        Series("kvstore_gpu_direct_failures", _C, "blocks", (), "that cuFile did not bring"),
        Series("kvstore_call_seconds", _H, "s", ("call",), "time in the handler of a call, by its name in the contract, lower case; waits on purpose included"),
        Series("kvstore_client_seconds", _H, "s", ("operation",), "operations as clients time and report them: `lookup`, `load` and `store` of blocks, vLLM's and Python's"),
        Series("kvstore_longest_seconds", _G, "s", ("timing",), "longest since the start, of calls and of the histograms below"),
        *(Series(f"kvstore_{name}_seconds", _H, "s", (), text) for name, text in TIMINGS.items()),
        *(Series(f"kvstore_{name}", _C, unit, (), text) for name, (unit, text) in COUNTS.items()),
    )
}  # fmt: skip


def table() -> str:
    """Return all series as a Markdown table."""
    rows = ["| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for series in SERIES.values():
        labels = ", ".join(f"`{label}`" for label in series.labels)
        rows.append(
            f"| `{series.shown}` | {series.kind} | {series.unit} | {labels} | {series.meaning} |"
        )
    return "\n".join(rows)


def renewed(text: str) -> str:
    """Return a document with its table as it should be.

    Raises:
        ValueError: it has no place for one.
    """
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"has no {_BEGIN} … {_END}")
    return f"{head}{begin}\n{table()}\n{end}{tail}"


def write(document: Path) -> None:
    """Write a document's table anew."""
    document.write_text(renewed(document.read_text()))
