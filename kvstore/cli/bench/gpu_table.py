"""The bench's figures as two tables: the machine alone, and kvstore by layout and shard size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table

from kvstore.cli.bench.figure import Figure
from kvstore.cli.output import make_table

__all__ = ["tables"]

_COLUMNS: Final = {
    "load": "load",
    "store": "store",
    "load and store": "both ways",
    "load from GPU pool": "GPU pool",
    "disk to host to GPU": "disk, host",
    "disk to GPU pool": "disk, pool",
}


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    ratio = "" if figure.ratio is None else f" {figure.ratio:.2f}"
    return f"{figure.value:.3g}{ratio}{'!' if figure.met is False else ''}"


def tables(figures: Sequence[Figure]) -> list[Table]:
    """Return the tables that have rows.

    A cell is GB/s and the ratio to the baseline; ``!`` marks a missed target.
    """
    alone = make_table("the machine alone", [""], ("GB/s",))
    rows: dict[tuple[str, str], dict[str, Figure]] = {}
    for figure in figures:
        parts = figure.name.split(", ")
        if len(parts) == 3:
            rows.setdefault((parts[1], parts[2]), {})[parts[0]] = figure
        else:
            alone.add_row(figure.name.removeprefix("raw, "), f"{figure.value:.3g}")
    used = [what for what in _COLUMNS if any(what in row for row in rows.values())]
    table = make_table(
        "kvstore, GB/s and ratio to the same bytes without it (! = target missed)",
        ["layout", "shard"],
        [_COLUMNS[what] for what in used],
    )
    for (layout, size), row in rows.items():
        table.add_row(layout, size, *(_cell(row.get(what)) for what in used))
    return [t for t in (alone, table) if t.row_count]
