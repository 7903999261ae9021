"""The schema of every command's `--json` output."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from schema_parts import (
    INTEGER,
    NUMBER,
    TEXT,
    TRUTH,
    Contract,
    Schema,
    counts,
    described,
    nullable,
    one_of,
    record,
    several,
    with_fields,
    without,
)

from kvstore.proto import kvstore_pb2 as pb

_PROTO: Final = Path(pb.__file__).parent / "kvstore.proto"
_TTFT: Final = record(
    **{name: (NUMBER, f"seconds, {name}") for name in ("mean", "p50", "p95", "p99", "max")}
)


def _messages() -> dict[str, Schema]:
    contract = Contract(_PROTO)
    verify = without(contract.message(pb.VerifyResponse.DESCRIPTOR), "faults")
    online = contract.message(pb.ExplainResponse.DESCRIPTOR)
    online["properties"] |= {
        "tokens": described(INTEGER, "with --tokens: of the prompt"),
        "tail_tokens": described(INTEGER, "with --tokens: at its end, that fill no block"),
    }
    return {
        "stats": contract.message(pb.StatsResponse.DESCRIPTOR, "What the daemon holds and does."),
        "spaces": {
            "description": "The spaces that the daemon knows.",
            **several(contract.message(pb.SpaceInfo.DESCRIPTOR)),
        },
        "flush": contract.message(pb.FlushResponse.DESCRIPTOR, "What a flush wrote."),
        "drain": contract.message(pb.DrainResponse.DESCRIPTOR, "Whether storing has ended."),
        "resize": contract.message(pb.SetCapacityResponse.DESCRIPTOR, "A tier's new capacity."),
        "verify": {
            **with_fields(
                verify,
                seconds=(NUMBER, "that it took"),
                faults=(several(contract.message(pb.BlockFault.DESCRIPTOR)), "all that was found"),
            ),
            "description": "What reading the blocks on disk again has found.",
        },
        "explain-request": {
            **online,
            "description": "Why a run ends: explain SPACE --tokens, --keys, or --request.",
        },
        "doctor": record(
            "What is wrong with a machine, and what to do.",
            daemon=(nullable(TEXT), "address of the daemon that looked; null: the command did"),
            errors=(INTEGER, "findings of level error"),
            warnings=(INTEGER, "findings of level warning"),
            findings=(
                several(
                    record(
                        subject=(TEXT, "what was looked at"),
                        level=(one_of("ok", "warning", "error"), "how bad it is"),
                        text=(TEXT, "what was seen; for people"),
                        advice=(TEXT, "what to do; may be empty"),
                    )
                ),
                "in the order of the table",
            ),
        ),
    }


def _limits() -> dict[str, Schema]:
    contract = Contract(_PROTO)
    space = contract.message(pb.SpaceInfo.DESCRIPTOR)["properties"]

    def listed(what: str, *names: str) -> Schema:
        fields = {name: (space[name], "") for name in (*names, "limits", "own_limits")}
        model = space["spec"]["properties"]["model"]
        return {
            "description": what,
            **several(record(space=(space["space"], ""), model=(model, ""), **fields)),
        }

    sizes = ("bytes_gpu", "bytes_host", "bytes_disk", "pinned_bytes")
    answer = contract.message(pb.SetLimitsResponse.DESCRIPTOR, "What is in force for a space now.")
    return {
        "quota": listed("The spaces that have quotas.", *sizes),
        "ttl": listed("The spaces whose unused blocks leave after a while.", "blocks"),
        **dict.fromkeys(("quota-set", "quota-clear", "ttl-set", "ttl-clear"), answer),
        "pins": {
            "description": "What is pinned, by whom.",
            **several(contract.message(pb.PinGroup.DESCRIPTOR)),
        },
    }


def _blocks() -> dict[str, Schema]:
    return {
        "pin": record(
            "How much of a chain is pinned.",
            pinned_blocks=(INTEGER, "leading run that is pinned now"),
            keys=(INTEGER, "that were named"),
        ),
        "unpin": record("How much was unpinned.", unpinned_blocks=(INTEGER, "pinned until now")),
        "evict": record(
            "What was dropped.",
            copies=(INTEGER, "removed"),
            skipped=(INTEGER, "that stay: in use, pinned, or above a block that stays"),
        ),
        "prefetch": record(
            "What was brought.",
            blocks=(INTEGER, "leading run that is there now"),
            keys=(INTEGER, "that were named"),
        ),
    }


def _size() -> Schema:
    percent = {
        name: (NUMBER, "percent of those asked for, leading runs only")
        for name in (
            *("block_hit_rate", "token_hit_rate", "block_hit_rate_host", "block_hit_rate_disk"),
            *("token_hit_rate_host", "token_hit_rate_disk"),
        )
    }
    numbers = {
        "hit_blocks_host": "served from host",
        "hit_blocks_disk": "served from disk",
        "not_worth_blocks": "on disk, but computed because that was faster",
        "stored_blocks": "taken in",
        "not_stored_blocks": "no room: a chain longer than the pool",
        "promoted_blocks": "copied from disk to host",
        "evicted_blocks_host": "copies that left for room",
        "evicted_blocks_disk": "copies that left for room",
        "disk_written_blocks": "in the whole trace",
        "disk_written_bytes": "in the whole trace",
    }
    return record(
        host_bytes=(nullable(INTEGER), "null: no limit"),
        disk_bytes=(nullable(INTEGER), "null: no limit; 0: none"),
        requests=(INTEGER, ""),
        blocks=(INTEGER, "asked for"),
        tokens=(INTEGER, "asked for"),
        **percent,
        **{name: (INTEGER, text) for name, text in numbers.items()},
        disk_written_bytes_per_day=(NUMBER, "if every day were like the trace"),
        drive_writes_per_day=(nullable(NUMBER), "of the disk tier's size, as SSDs are rated"),
        ttft_seconds=(_TTFT, "time to first token"),
        span_seconds=(NUMBER, "from the first request to the last"),
    )


def _replay() -> Schema:
    compared = record(
        predicted=(NUMBER, "by the replay"),
        measured=(NUMBER, "on a daemon"),
        off_percent=(nullable(NUMBER), "null: nothing was measured"),
    )
    rates = ("host_read", "disk_read", "disk_write")
    choice = {
        "host_bytes": (nullable(INTEGER), ""),
        "disk_bytes": (nullable(INTEGER), ""),
        "price": (NUMBER, ""),
        "ttft_mean_seconds": (NUMBER, ""),
    }
    document = record(
        "What tiers of some sizes would have done; with a single size its fields stand here, too.",
        trace=(
            record(
                name=(TEXT, ""),
                format=(TEXT, "mooncake, bailian, kvstore"),
                **{
                    name: (INTEGER, "")
                    for name in ("block_tokens", "block_bytes", "requests", "blocks", "tokens")
                },
                span_seconds=(NUMBER, ""),
            ),
            "what was replayed",
        ),
        model=(
            record(
                token_bytes=(INTEGER, ""),
                write_policy=(one_of("through", "reused", "evict"), ""),
                prefill_tokens_per_second=(NUMBER, ""),
                **{f"{name}_bytes_per_second": (NUMBER, "") for name in rates},
                engines=(INTEGER, "prefills at a time; 0: no limit"),
            ),
            "what was assumed",
        ),
        sizes=(several(_size()), "one entry a size"),
        recommendation=(
            nullable(
                record(
                    within_percent=(NUMBER, ""),
                    **choice,
                    **{f"best_{name}": field for name, field in choice.items()},
                )
            ),
            "null without --recommend",
        ),
        measured=(
            nullable(
                record(
                    **{
                        name: (compared, "")
                        for name in ("hit_blocks_host", "hit_blocks_disk", "disk_written_bytes")
                    }
                )
            ),
            "null without --measure",
        ),
    )
    document["properties"] |= _size()["properties"]
    return document


def _prompts() -> Schema:
    variants = (
        several(record(line=(INTEGER, "of the file"), text=(TEXT, "cut at 60 characters"))),
        "up to three different values",
    )
    finding = record(
        kind=(TEXT, "timestamp, uuid, user_id, random_id, number, json_keys, json_items, …"),
        prompts=(INTEGER, "that have it there"),
        tokens_won=(INTEGER, "that need not be computed without it"),
        chars_won=(INTEGER, "the same in characters"),
        line=(INTEGER, "of the prompt that the places are about"),
        start=(INTEGER, "of what varies, in characters of the prompt"),
        end=(INTEGER, "of what varies"),
        field=(TEXT, "that it is in, such as messages[0].content"),
        field_start=(INTEGER, "its place there"),
        diverges=(INTEGER, "the first character that differs"),
        before=(TEXT, "up to 40 characters"),
        after=(TEXT, "up to 40 characters"),
        variants=variants,
        advice=(TEXT, "what to do"),
    )
    group = record(
        prompts=(INTEGER, ""),
        shared_tokens=(INTEGER, "of the prefix"),
        shared_chars=(INTEGER, "of the prefix"),
        prefix=(TEXT, "how it begins"),
        ends_by=(TEXT, "a finding's kind, or content: they differ for good"),
        field=(TEXT, "where it ends"),
        field_offset=(INTEGER, "where it ends"),
        before=(TEXT, "text before that"),
        variants=variants,
    )
    return record(
        "What keeps prompts from sharing: explain PROMPTS.",
        file=(TEXT, ""),
        tokens_estimated=(TRUTH, "false: measured with --tokenizer"),
        prompts=(INTEGER, ""),
        chars=(INTEGER, ""),
        tokens=(INTEGER, ""),
        chars_per_token=(NUMBER, ""),
        reused_percent=(NUMBER, "by a perfect prefix cache"),
        reused_percent_after=(NUMBER, "with all findings out of the way"),
        computed_tokens=(INTEGER, "that are left to compute"),
        computed_tokens_after=(INTEGER, "with all findings out of the way"),
        findings=(several(finding), "most won first"),
        groups=(several(group), "prompts with a prefix in common, largest first"),
    )


def _benches() -> dict[str, Schema]:
    figure = record(
        name=(TEXT, ""),
        unit=(one_of("GB/s", "ms", "%", "leases", "copies"), ""),
        value=(NUMBER, "median"),
        baseline=(nullable(NUMBER), "median of the same without kvstore; null: there is none"),
        against=(TEXT, "what the baseline is"),
        ratio=(nullable(NUMBER), "value / baseline"),
        target=(nullable(NUMBER), "least ratio (GB/s), or the most there may be (any other unit)"),
        met=(nullable(TRUTH), "null: there is no target"),
        samples=(several(NUMBER), "that value is the median of"),
    )
    figures = (several(figure), "")
    machine = record(cores=(INTEGER, ""), machine=(TEXT, ""), kernel=(TEXT, ""), python=(TEXT, ""))
    times = {name: (several(NUMBER), "seconds") for name in ("without_s", "kvstore_s")}
    step = record(
        bytes_per_second=(nullable(INTEGER), "of the disk; null: as fast as it is"),
        **times,
        without_again_s=(several(NUMBER), "seconds"),
        reused_tokens=(several(INTEGER), "per request"),
        without_page_faults=(several(INTEGER), "of the engine, per request"),
        kvstore_page_faults=(several(INTEGER), "of the engine, per request"),
        p50_ratio=(NUMBER, "with kvstore / without"),
        p95_ratio=(NUMBER, "with kvstore / without"),
        aa_p50_ratio=(NUMBER, "without / without: the noise"),
        aa_p95_ratio=(NUMBER, "without / without: the noise"),
    )
    behind = record(
        bytes_per_second=(nullable(INTEGER), "of the disk; null: as fast as it is"),
        disk_s=(several(NUMBER), "seconds, blocks on disk only"),
        host_s=(several(NUMBER), "seconds, blocks in memory"),
        disk_reused_tokens=(several(INTEGER), "per request"),
        host_reused_tokens=(several(INTEGER), "per request"),
        ratio=(NUMBER, "median of the pairs' disk / host"),
    )
    sweep = record(
        "With --model.",
        cores=(INTEGER, ""),
        prompt_tokens=(INTEGER, ""),
        steps=(several(step), ""),
        queued=(several(behind), "requests behind others"),
    )
    row = record(
        row=(TEXT, ""),
        ttft_p50_seconds=(NUMBER, ""),
        ttft_seconds=(several(NUMBER), "one a prompt"),
        reused_tokens=(INTEGER, ""),
        served_tokens=(counts(), "by who held them: the engine or a tier"),
        speed_up=(NUMBER, "over the first row"),
    )
    rates = record(
        daemon=(TEXT, "its name in the demo"),
        outputs=(NUMBER, "0 to 1, by the engines' own outputs"),
        shown=(
            {"type": "object", "additionalProperties": dict(NUMBER)},
            "0 to 1, by where it is shown: stats, status page, Prometheus",
        ),
    )
    return {
        "bench": record(
            "Figures of the data path.",
            machine=(machine, ""),
            rounds=(INTEGER, ""),
            figures=figures,
        ),
        "bench-gpu": {
            "description": "Each line of the output: the machine first, then a figure a line.",
            "anyOf": [record(machine=(TEXT, "the device"), rounds=(INTEGER, "")), figure],
        },
        "bench-prefetch": {
            "description": "Figures of prefetch, or of a sweep of disk speeds.",
            "anyOf": [record("", rounds=(INTEGER, ""), figures=figures), sweep],
        },
        "demo": record(
            "What the demo measured.",
            model=(TEXT, ""),
            prompts=(INTEGER, ""),
            prompt_tokens=(INTEGER, ""),
            output_tokens=(INTEGER, ""),
            reusable_tokens=(INTEGER, "of all prompts, in whole blocks"),
            rows=(several(row), "cold, warm, …"),
            hit_rates=(several(rates), "effective hit rates, one a daemon that was started"),
            tokens_identical=(TRUTH, "generated tokens are those of the cold run"),
            problems=(several(TEXT), "empty: everything is as it should be"),
        ),
    }


def documents() -> dict[str, Schema]:
    """Return the schemas by the name of their file; a command's name comes first in it."""
    return {
        **_messages(),
        **_blocks(),
        **_limits(),
        "replay": _replay(),
        "explain-prompts": _prompts(),
        **_benches(),
    }
