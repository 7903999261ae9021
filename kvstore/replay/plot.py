"""A picture of the results: misses, time to first token and writes over tier size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
    picture = _Picture(results)
    picture.draw(misses, lambda r: 100 - r.token_hit_rate)
    misses.set_title("Misses", fontsize=10)
    misses.set_ylabel("computed tokens, % of the prompts'")
    misses.set_ylim(0, 100)
    picture.draw(times, lambda r: r.ttft.quantile(0.95), thin=True)
    picture.draw(times, lambda r: r.ttft.mean)
    times.set_title("Time to first token: mean, P95 (thin)", fontsize=10)
    times.set_ylabel("seconds")
    times.set_ylim(bottom=0)
    writes.set_title("Written to disk", fontsize=10)
    if any(r.size.disk for r in results):
        picture.draw(writes, lambda r: r.written_bytes_per_day / TIB if r.size.disk else None)
        writes.set_ylabel("TiB a day")
        writes.set_ylim(0, 1.08 * writes.get_ylim()[1])
    else:
        writes.text(0.5, 0.5, "no disk tier tried", ha="center", transform=writes.transAxes)
        writes.set_axis_off()
    if not results[0].size.in_blocks:
        misses.legend(fontsize=8, frameon=False, loc="lower left")
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"plot: {path}: {error.strerror}") from error


class _Picture:
    """One line per disk size over the host's size, the same colours in each panel."""

    def __init__(self, results: Sequence[SizeResult]) -> None:
        self._results = sorted(results, key=lambda r: r.size.host)
        self._disks = sorted({r.size.disk for r in results})
        self._blocks = results[0].size.in_blocks
        known = [r.size.host for r in results if r.size.host < UNLIMITED]
        # What has no limit stands at the right end, beyond the largest that has one.
        self._end = 4 * max(known, default=1)

    def _place(self, result: SizeResult) -> float:
        return min(result.size.host, self._end) / (1 if self._blocks else GIB)

    def draw(
        self, axes: Axes, value: Callable[[SizeResult], float | None], *, thin: bool = False
    ) -> None:
        """Draw one line per disk size; sizes without a value are left out."""
        for number, disk in enumerate(self._disks):
            line = [r for r in self._results if r.size.disk == disk]
            values = [value(r) for r in line]
            if None in values:
                continue
            name = f"disk {line[0].size.disk_text}" if disk else "no disk"
            axes.plot(
                [self._place(r) for r in line],
                [v for v in values if v is not None],
                "-" if thin else _STYLES[number % len(_STYLES)],
                color=_COLOURS[number % len(_COLOURS)],
                linewidth=0.8 if thin else 1.6,
                alpha=0.7 if thin else 1.0,
                label=name,
                markersize=4,
            )
        ticks = {self._place(r): _tick(r) for r in self._results}
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8, rotation=40, ha="right")
        axes.minorticks_off()
        axes.set_xlabel("one pool, blocks" if self._blocks else "host tier")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)


def _tick(result: SizeResult) -> str:
    size = result.size
    if size.host >= UNLIMITED:
        return "unlimited"
    return f"{size.host:,}" if size.in_blocks else format_bytes(size.host)
