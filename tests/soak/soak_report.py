"""Verdicts on the samples of a soak, and one page with plots that shows what they rest on.

The first third is warm-up: pools, segments and memories of evicted keys fill. Whatever leaks goes
on growing after it, so the last third is compared with the middle one.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

from soak_sampler import Sample

__all__ = ["Verdict", "flat", "plot", "verdicts", "write_report", "write_samples"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the report.

    Attributes:
        what: is claimed.
        good: it is so.
        why: the figures.
    """

    what: str
    good: bool
    why: str

    def __str__(self) -> str:
        """Return the line."""
        return f"{'yes' if self.good else 'NO'}: {self.what} ({self.why})"


# The proportional size is drawn, not judged: it is the pool's size divided by how many clients
# happen to map it, and rises whenever one is killed.
# Column, unit, part of the middle third's median that the last third's may be above it, and how
# much on top of that: noise of a value that is small, or that comes in steps.
_GROWING: Sequence[tuple[str, str, float, float]] = (
    ("rss_mib", "MiB", 0.05, 8.0),
    ("shared_mib", "MiB", 0.05, 8.0),
    ("descriptors", "", 0.05, 8.0),
    ("threads", "", 0.0, 4.0),
    ("leases", "", 0.25, 8.0),
    ("grants", "", 0.25, 8.0),
    ("stuck_slots", "", 0.25, 48.0),
)
# The machine is shared: a third less is no verdict on the daemon.
_SLOWER = 0.35
_WORST_HEALTH_MS = 1000.0


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the middle and of the last third."""
    part = len(values) // 3
    return median(values[part : 2 * part]), median(values[2 * part :])


def flat(what: str, values: Sequence[float], unit: str, part: float, more: float) -> Verdict:
    """Judge whether a value has stopped growing after warm-up."""
    middle, last = thirds(values)
    limit = middle * (1 + part) + more
    space = f" {unit}" if unit else ""
    why = f"median {middle:.0f}{space}, then {last:.0f}{space}; tolerated up to {limit:.0f}{space}"
    return Verdict(f"{what} flat after warm-up", last <= limit, why)


def verdicts(samples: Sequence[Sample]) -> list[Verdict]:
    """Judge the samples of a run, at least three of them."""
    found = [
        flat(name.removesuffix("_mib"), [getattr(s, name) for s in samples], unit, part, more)
        for name, unit, part, more in _GROWING
    ]
    speed = [s.put_mib_s + s.got_mib_s for s in samples]
    middle, last = thirds(speed)
    slowest = middle * (1 - _SLOWER)
    found.append(
        Verdict(
            "throughput flat after warm-up",
            last >= slowest > 0,
            f"median {middle:.0f} MiB/s, then {last:.0f} MiB/s; tolerated down to {slowest:.0f}",
        )
    )
    worst = max(s.health_ms for s in samples)
    found.append(
        Verdict(
            "health always answered within a second",
            worst <= _WORST_HEALTH_MS,
            f"slowest of {len(samples)} s: {worst:.0f} ms",
        )
    )
    return found


def write_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write one line a sample."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Sample.names())
        for sample in samples:
            writer.writerow([f"{v:.2f}" if isinstance(v, float) else v for v in astuple(sample)])


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Draw memory, descriptors, what is held, and throughput, one above the other."""
    # Slow to import, and needed by nobody else.
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    pictures: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
        (
            "memory of the daemon, MiB",
            (
                ("rss_mib", "anonymous"),
                ("pss_mib", "proportional, pool included"),
                ("shared_mib", "pool"),
            ),
        ),
        ("descriptors, threads", (("descriptors", "descriptors"), ("threads", "threads"))),
        (
            "held by clients",
            (("leases", "leases"), ("grants", "grants"), ("stuck_slots", "stuck slots")),
        ),
        ("used slots, MiB", (("host_mib", "host"), ("disk_mib", "disk"))),
        ("throughput, MiB/s", (("got_mib_s", "get"), ("put_mib_s", "put"))),
        ("slowest health check, ms", (("health_ms", "of each second"),)),
    )
    times = [sample.seconds / 60 for sample in samples]
    figure, axes = pyplot.subplots(
        len(pictures), 1, sharex=True, figsize=(9, 2.0 * len(pictures)), layout="constrained"
    )
    for axis, (title, lines) in zip(axes, pictures, strict=True):
        for name, label in lines:
            axis.plot(times, [getattr(s, name) for s in samples], label=label, linewidth=1)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.axvline(times[-1] / 3, color="grey", linewidth=0.8, linestyle=":")
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes[-1].set_xlabel("minutes (dotted: end of warm-up)")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def write_report(
    directory: Path,
    command: str,
    samples: Sequence[Sample],
    judged: Sequence[Verdict],
    facts: Sequence[tuple[str, str]],
) -> Path:
    """Write ``report.md``, ``soak.png`` and ``samples.csv``; return the page's path."""
    write_samples(samples, directory / "samples.csv")
    plot(samples, directory / "soak.png")
    good = all(verdict.good for verdict in judged)
    lines = ["# Soak report", "", f"Verdict: **{'good' if good else 'NOT good'}**. Made by", ""]
    lines += [f"    {command}", "", "| claim | holds | figures |", "|---|---|---|"]
    lines += [f"| {v.what} | {'yes' if v.good else '**NO**'} | {v.why} |" for v in judged]
    lines += ["", "| what was done | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts]
    lines += ["", "![what the daemon took and held, second by second](soak.png)", ""]
    page = directory / "report.md"
    page.write_text("\n".join(lines))
    return page
