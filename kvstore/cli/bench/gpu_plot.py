"""The bench's figures as a picture: rates over shard sizes, one panel a layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.cli.bench.figure import Figure
from kvstore.cli.child import ChildError
from kvstore.units import format_bytes, parse_bytes

__all__ = ["draw", "series"]

# What is drawn, in this order and in these colours; everything else is in the table.
_COLOURS: Final = {
    "load": "#1f77b4",
    "store": "#ff7f0e",
    "load and store": "#2ca02c",
    "load from GPU pool": "#9467bd",
    "disk to host to GPU": "#8c564b",
    "disk to GPU pool": "#e377c2",
}
_DPI: Final = 120

Point = tuple[int, float, float | None]


def series(figures: Sequence[Figure]) -> dict[str, dict[str, list[Point]]]:
    """Sort figures into layout → what → (shard bytes, GB/s, baseline GB/s), by size.

    Figures that belong to no layout are left out.
    """
    found: dict[str, dict[str, list[Point]]] = {}
    for figure in figures:
        parts = figure.name.split(", ")
        if len(parts) != 3 or parts[0] not in _COLOURS:
            continue
        what, layout, size = parts
        points = found.setdefault(layout, {}).setdefault(what, [])
        points.append((parse_bytes(size.replace(" ", "")), figure.value, figure.baseline))
    for layers in found.values():
        for points in layers.values():
            points.sort()
    return found


def draw(figures: Sequence[Figure], path: Path, title: str) -> None:
    """Write the picture.

    Raises:
        ChildError: matplotlib is not there, or there is nothing to draw.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ChildError(f"no plot without matplotlib: {error}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = series(figures)
    if not panels:
        raise ChildError("no plot: nothing was measured by shard size")
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6.4 * len(panels), 5), sharey=True, squeeze=False
    )
    for axis, (layout, layers) in zip(axes[0], panels.items(), strict=True):
        _panel(axis, layout, layers)
    axes[0][0].set_ylabel("GB/s (10⁹ bytes a second)")
    axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def _panel(axis: Any, layout: str, layers: dict[str, list[Point]]) -> None:
    for what, colour in _COLOURS.items():
        points = layers.get(what)
        if not points:
            continue
        sizes = [size for size, _, _ in points]
        axis.plot(sizes, [rate for _, rate, _ in points], "o-", color=colour, label=what)
        if all(baseline is not None for _, _, baseline in points):
            axis.plot(
                sizes,
                [baseline for _, _, baseline in points],
                "x:",
                color=colour,
                linewidth=1,
                markersize=4,
                label=f"{what}: baseline",
            )
    ticks = sorted({size for points in layers.values() for size, _, _ in points})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [format_bytes(size) for size in ticks], fontsize=8)
    axis.minorticks_off()
    rates = [5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    low, high = axis.get_ylim()
    shown = [rate for rate in rates if low <= rate <= high]
    axis.set_yticks(shown, [str(rate) for rate in shown])
    axis.grid(visible=True, alpha=0.3)
    axis.set_xlabel("shard size")
    axis.set_title(f"layout: {layout}", fontsize=10)
