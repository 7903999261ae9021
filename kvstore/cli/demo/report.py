"""The demo's result as a table and as JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from kvstore.cli.demo.scenario import DemoResult, Row
from kvstore.cli.output import make_table
from kvstore.units import format_seconds

__all__ = ["as_json", "as_table"]


def as_json(result: DemoResult) -> dict[str, Any]:
    """Return everything measured. Durations are in seconds."""
    settings = result.settings
    return {
        "model": settings.model.name,
        "prompts": settings.prompts,
        "prompt_tokens": settings.prompt_tokens,
        "output_tokens": settings.output_tokens,
        "reusable_tokens": result.reusable_tokens,
        "rows": [
            {
                "row": row.name,
                "ttft_p50_seconds": row.ttft_p50_seconds,
                "ttft_seconds": row.ttft_seconds,
                "reused_tokens": row.reused_tokens,
                "served_tokens": row.served_tokens,
                "speed_up": result.speed_up(row),
            }
            for row in result.rows
        ],
        "hit_rates": [
            {"daemon": rates.daemon, "outputs": rates.outputs, "shown": dict(rates.shown)}
            for rates in result.hit_rates
        ],
        "tokens_identical": result.tokens_identical,
        "problems": result.problems(),
    }


def _served_by(row: Row) -> str:
    if not row.served_tokens:
        return "-"
    if len(row.served_tokens) == 1:
        return next(iter(row.served_tokens))
    total = sum(row.served_tokens.values())
    return ", ".join(f"{tier} {tokens / total:.0%}" for tier, tokens in row.served_tokens.items())


def as_table(result: DemoResult) -> Table:
    """Return the table that the demo ends with."""
    table = make_table("", [""], ("TTFT P50", "speed-up", "tokens reused", "served by"))
    for row in result.rows:
        table.add_row(
            row.name,
            format_seconds(row.ttft_p50_seconds),
            f"{result.speed_up(row):.1f}×",
            f"{row.reused_tokens:,} of {result.reusable_tokens:,}",
            _served_by(row),
        )
    return table
