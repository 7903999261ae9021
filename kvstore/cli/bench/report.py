"""The bench's result as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvstore.cli.bench.figure import Figure
from kvstore.cli.output import make_table

__all__ = ["as_table"]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _target(figure: Figure) -> str:
    if figure.target is None:
        return ""
    less = figure.unit != "GB/s"
    text = f"≤ {_number(figure.target)} {figure.unit}" if less else f"≥ {figure.target:g}"
    return f"{text}, {'met' if figure.met else 'MISSED'}"


def as_table(figures: Sequence[Figure]) -> Table:
    """Return one row per figure."""
    table = make_table("", ["median"], ("kvstore", "baseline", "ratio", "target"))
    # Names give way before numbers do.
    table.columns[0].no_wrap = False
    for figure in figures:
        baseline = f"{_number(figure.baseline)} {figure.against}" if figure.against else ""
        table.add_row(
            figure.name,
            f"{_number(figure.value)} {figure.unit}",
            baseline,
            _number(figure.ratio),
            _target(figure),
        )
    return table
