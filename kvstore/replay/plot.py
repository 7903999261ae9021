"""A picture of the results: misses, time to first token and writes over tier size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import ConfigError
from kvstore.replay.result import SizeResult
from kvstore.replay.sizes import UNLIMITED
from kvstore.units import GIB, TIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot"]

_INCHES: Final = (12.0, 3.9)
_DOTS: Final = 90
_STYLES: Final = ("o-", "s--", "^:", "D-.")
# Blue, orange, green, purple: told apart also by the colour-blind, as by their marks.
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def plot(results: Sequence[SizeResult], title: str, path: Path) -> None:
    """Draw the results into a PNG file.

    Args:
        results: of all sizes.
        title: above it.
        path: of the file.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plot: needs matplotlib (pip install matplotlib)") from error
    figure = Figure(figsize=_INCHES, dpi=_DOTS, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    misses, times, writes = figure.subplots(1, 3)
    _draw(misses, results, lambda r: 100 - r.token_hit_rate, "computed tokens, % of the prompts'")
    misses.set_title("Misses")
    misses.set_ylim(0, 100)
    _draw(times, results, lambda r: r.ttft.mean, "mean", shade=True)
    times.set_title("Time to first token")
    times.set_ylabel("seconds: mean, and up to P95 (shaded)")
    times.set_ylim(bottom=0)
    disks = [r for r in results if r.size.disk]
    writes.set_title("Written to disk")
    if disks:
        _draw(writes, disks, lambda r: r.written_bytes_per_day / TIB, "TiB a day")
        writes.set_ylim(bottom=0)
    else:
        writes.text(0.5, 0.5, "no disk tier tried", ha="center", transform=writes.transAxes)
        writes.set_axis_off()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"plot: {path}: {error.strerror}") from error


def _draw(
    axes: Axes,
    results: Sequence[SizeResult],
    value: Callable[[SizeResult], float],
    label: str,
    *,
    shade: bool = False,
) -> None:
    """Draw one line per disk size over the host's size."""
    blocks = results[0].size.in_blocks
    known = [r.size.host for r in results if r.size.host < UNLIMITED]
    # What has no limit stands at the right end, beyond the largest that has one.
    end = 4 * max(known, default=1)
    ticks: dict[float, str] = {}
    for number, disk in enumerate(sorted({r.size.disk for r in results})):
        line = sorted((r for r in results if r.size.disk == disk), key=lambda r: r.size.host)
        places = [min(r.size.host, end) / (1 if blocks else GIB) for r in line]
        for r, place in zip(line, places, strict=True):
            ticks[place] = _tick(r)
        colour = _COLOURS[number % len(_COLOURS)]
        style = _STYLES[number % len(_STYLES)]
        name = f"disk {line[0].size.disk_text}" if disk else "no disk"
        axes.plot(places, [value(r) for r in line], style, color=colour, label=name, markersize=4)
        if shade:
            upper = [r.ttft.quantile(0.95) for r in line]
            axes.fill_between(places, [value(r) for r in line], upper, color=colour, alpha=0.12)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8, rotation=40, ha="right")
    axes.minorticks_off()
    axes.set_xlabel("one pool, blocks" if blocks else "host tier")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if not blocks:
        options: dict[str, Any] = {"fontsize": 8, "frameon": False}
        axes.legend(**options)


def _tick(result: SizeResult) -> str:
    size = result.size
    if size.host >= UNLIMITED:
        return "unlimited"
    return f"{size.host:,}" if size.in_blocks else format_bytes(size.host)
