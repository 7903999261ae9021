"""One frame: lines of text that fit a terminal's width and height.

In 80 columns and 24 lines everything is there except spaces beyond the first few, and prefixes, which
`v` puts in their place; a taller terminal shows both.
"""

from __future__ import annotations

from typing import Any, Final

from rich.text import Text

from kvstore.cli.output import count, printable, shorten
from kvstore.cli.top.cells import heading, per_second, percent
from kvstore.cli.top.history import History, kvstore_tokens, reused_tokens
from kvstore.cli.top.lists import lists
from kvstore.cli.top.view import View
from kvstore.units import format_bytes, format_seconds, format_uptime

__all__ = ["frame", "to_ascii"]

_BAR: Final = 14
_MISSES: Final = 4
_SHORT_ID: Final = 8
# Part of a disk's budget below which it is mentioned.
_LITTLE: Final = 0.05
# What the daemon thought of times, not times that anybody spent.
_GUESSES: Final = frozenset({"wait_predicted", "wait_error", "wait_lost"})
_ASCII: Final = str.maketrans({"█": "#", "░": ".", "…": "~", "µ": "u"})


def to_ascii(line: Text) -> Text:
    """Return a line for a terminal that shows ASCII only, of the same width or less."""
    plain = line.plain.translate(_ASCII).encode("ascii", "replace").decode()
    return Text(plain, spans=list(line.spans), no_wrap=True)


def _bytes_per_second(rate: float | None) -> str:
    return "-" if rate is None else f"{format_bytes(round(max(0.0, rate)))}/s"


def _bar(part: float) -> Text:
    # Full is no warning: a cache that is not full is larger than it need be.
    full = round(min(1.0, max(0.0, part)) * _BAR)
    bar = Text(no_wrap=True)
    bar.append("█" * full, style="green")
    bar.append("░" * (_BAR - full), style="dim")
    return bar


def _head(stats: dict[str, Any], view: View, width: int) -> Text:
    line = Text(no_wrap=True)
    line.append(f"kvstore {stats['server_version']}", style="bold")
    line.append(
        f"  boot {stats['boot_id'][:_SHORT_ID]}  up {format_uptime(stats['uptime_seconds'])}"
        f"  every {format_seconds(view.interval_s)}"
    )
    if view.paused:
        line.append(" " * max(2, width - line.cell_len - 6))
        line.append("PAUSED", style="bold reverse")
    return line


def _hit_rates(history: History) -> list[Text]:
    now, before = history.now, history.before
    usage, old = now["usage"], before["usage"]
    prompt = usage["prompt_tokens"]
    recent = percent(
        reused_tokens(usage) - reused_tokens(old), history.change("usage", "prompt_tokens")
    )

    def asked(stats: dict[str, Any]) -> tuple[int, int]:
        found = sum(int(tier["hit_blocks"]) for tier in stats["tiers"])
        return found, found + sum(map(int, stats["misses_blocks"].values()))

    found, wanted = asked(now)
    old_found, old_wanted = asked(before)
    lines = [
        heading(f"{'HIT RATE':<34} {'NOW':>8} {'SINCE START':>12}"),
        Text(
            f"{'effective, of prompt tokens':<34} {recent:>8} "
            f"{percent(reused_tokens(usage), prompt):>12}  of {count(prompt)} tokens"
        ),
        Text(
            f"  kvstore {percent(kvstore_tokens(usage), prompt)}, engines' own caches "
            f"{percent(usage['local_tokens'], prompt)} since start; failed loads "
            f"{count(usage['load_failures'])}"
        ),
        Text(
            f"{'blocks found, of those asked for':<34} "
            f"{percent(found - old_found, wanted - old_wanted):>8} "
            f"{percent(found, wanted):>12}  of {count(wanted)} blocks"
        ),
    ]
    if usage["load_failures"]:
        lines[2].stylize("red", lines[2].plain.index("failed loads"))
    return lines


def _tiers(history: History) -> list[Text]:
    lines = [
        heading(
            f"{'TIER':<4} {'FILL':<{_BAR + 5}} {'USED':>8} {'OF':>8} {'BLOCKS':>7} "
            f"{'HITS/s':>7} {'EVICT/s':>7}  STATE"
        )
    ]
    notes = []
    for tier in history.now["tiers"]:
        name, state = tier["tier"], printable(tier["state"] or "ok")
        part = tier["used_bytes"] / tier["capacity_bytes"] if tier["capacity_bytes"] else 0.0
        line = Text(f"{name:<4} ", no_wrap=True)
        line.append_text(_bar(part))
        line.append(
            f" {part:>4.0%} {format_bytes(tier['used_bytes']):>8} "
            f"{format_bytes(tier['capacity_bytes']):>8} {count(tier['blocks']):>7} "
            f"{per_second(history.rate(history.tier_change(name, 'hit_blocks'))):>7} "
            f"{per_second(history.rate(history.tier_change(name, 'evicted_blocks'))):>7}  "
        )
        line.append(state.split(":")[0], style="green" if state == "ok" else "bold red")
        lines.append(line)
        if state != "ok":
            notes.append(Text(f"  {name}: {state}", style="red", no_wrap=True))
        wrong = [(tier["io_errors"], "I/O errors"), (tier["corrupt_blocks"], "corrupt blocks")]
        if any(number for number, _ in wrong):
            told = ", ".join(f"{count(number)} {what}" for number, what in wrong if number)
            notes.append(Text(f"  {name}: {told}", style="red", no_wrap=True))
        if tier["budget_bytes"] and tier["budget_left_bytes"] < tier["budget_bytes"] * _LITTLE:
            left = format_bytes(tier["budget_left_bytes"])
            told = f"{left} left of what may be written in 24 hours"
            notes.append(Text(f"  {name}: {told}", style="yellow", no_wrap=True))
    return [*lines, *notes]


def _throughput(history: History) -> list[Text]:
    def usage(name: str) -> str:
        return _bytes_per_second(history.rate(history.change("usage", name)))

    def tier(tier: str, name: str) -> str:
        return _bytes_per_second(history.rate(history.tier_change(tier, name)))

    paths = [("load", usage("loaded_bytes")), ("store", usage("stored_bytes"))]
    names = {t["tier"] for t in history.now["tiers"]}
    if "disk" in names:
        paths += [
            ("disk read", tier("disk", "read_bytes")),
            ("disk write", tier("disk", "written_bytes")),
        ]
    if "gpu" in names:
        paths += [("gpu in", tier("gpu", "written_bytes")), ("gpu out", tier("gpu", "read_bytes"))]
    lines = []
    for first in range(0, len(paths), 3):
        title = "THROUGHPUT" if first == 0 else ""
        line = heading(f"{title:<11}")
        cells = (f"{name} {rate}" for name, rate in paths[first : first + 3])
        line.append("".join(f"{cell:<23}" for cell in cells).rstrip(), style="not bold default")
        lines.append(line)
    return lines


def _work(history: History) -> list[Text]:
    stats = history.now
    counters = stats["counters"]
    dirty = sum(int(tier["dirty_blocks"]) for tier in stats["tiers"])
    queue = heading(f"{'QUEUE':<11}")
    queue.append(
        f"to disk {count(dirty)}  leases {count(stats['leases'])}  "
        f"grants {count(stats['grants'])} ({count(stats['granted_slots'])} slots)  "
        f"clients {count(len(stats['clients']))}  ",
        style="not bold default",
    )
    queue.append(
        f"stuck {count(stats['stuck_slots'])} ({format_bytes(stats['stuck_bytes'])})",
        style="bold red" if stats["stuck_slots"] else "not bold default",
    )
    evicted = heading(f"{'EVICTED':<11}")
    evicted.append(
        f"host in background {count(counters.get('evictions_background', 0))}, "
        f"a writer waiting {count(counters.get('evictions_inline', 0))}, "
        f"by request {count(counters.get('evicted_by_request', 0))}",
        style="not bold default",
    )
    if not stats["draining"]:
        return [queue, evicted]
    told = "  drained: nothing is stored until the next start"
    return [queue, Text(told, style="red", no_wrap=True), evicted]


def _misses_and_times(history: History) -> list[Text]:
    """Return misses by reason on the left, the slowest calls on the right."""
    misses = sorted(history.now["misses_blocks"].items(), key=lambda item: (-item[1], item[0]))
    left = [
        f"{shorten(reason.replace('_', ' '), 18):<18} "
        f"{per_second(history.rate(history.change('misses_blocks', reason))):>8} "
        f"{count(blocks):>8}"
        for reason, blocks in misses[:_MISSES]
    ]
    timings = sorted(
        (t for t in history.now["timings"] if t["name"] not in _GUESSES),
        key=lambda timing: -timing["p99_seconds"],
    )
    right = [
        f"{shorten(timing['name'].replace('_', ' '), 15):<15} "
        f"{format_seconds(timing['p50_seconds']):>8} {format_seconds(timing['p99_seconds']):>8} "
        f"{format_seconds(timing['max_seconds']):>8}"
        for timing in timings[:_MISSES]
    ]
    if not left:
        left = ["none"]
    lines = [
        heading(
            f"{'MISSED BLOCKS':<18} {'PER s':>8} {'ALL':>8}  "
            f"{'SLOWEST':<15} {'P50':>8} {'P99':>8} {'MAX':>8}"
        )
    ]
    for row in range(max(len(left), len(right))):
        first = left[row] if row < len(left) else ""
        second = right[row] if row < len(right) else ""
        lines.append(Text(f"{first:<36}  {second}".rstrip(), no_wrap=True))
    return lines


def _keys(view: View) -> Text:
    line = Text(no_wrap=True, style="dim")
    for key, what in (
        ("q", "quit"),
        ("p", "go on" if view.paused else "pause"),
        ("s", f"sort: {view.order}{', rev.' if view.reverse else ''}"),
        ("r", "reverse"),
        ("v", "spaces" if view.prefixes else "prefixes"),
        ("+ -", "speed"),
    ):
        line.append(key, style="bold not dim")
        line.append(f" {what}  ")
    line.rstrip()
    return line


def frame(
    history: History, view: View, width: int = 80, height: int = 24, *, keys: bool = True
) -> list[Text]:
    """Return the lines of one frame.

    Args:
        history: has at least one answer.
        view: the viewer's choices.
        width: columns; no line is wider.
        height: lines at most.
        keys: whether the last line says what keys do.
    """
    lines = [
        _head(history.now, view, width),
        *_hit_rates(history),
        *_tiers(history),
        *_throughput(history),
        *_work(history),
        *_misses_and_times(history),
    ]
    foot = [_keys(view)] if keys else []
    room = height - len(lines) - len(foot)
    lines += lists(history, view, room)
    lines = [*lines[: max(0, height - len(foot))], *foot]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines
