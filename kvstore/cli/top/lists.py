"""The lists below a frame: spaces, and the beginnings of prompts that are asked for most."""

from __future__ import annotations

from typing import Any, Final

from rich.text import Text

from kvstore.cli.output import count, printable
from kvstore.cli.top.cells import heading, per_second, percent
from kvstore.cli.top.history import History, reused_tokens
from kvstore.cli.top.view import View
from kvstore.units import format_bytes

__all__ = ["lists"]

_MODEL: Final = 26
_TAIL: Final = _MODEL - 6  # what is left of it beside four digits of the id
_PREFIX: Final = 17  # four digits of the space's id, twelve of the key
# Lines that the second list gets at least, its heading included; with less there is none.
_SECOND: Final = 4


def lists(history: History, view: View, room: int) -> list[Text]:
    """Return at most `room` lines: the list that the viewer chose, and the other if there is room."""
    makers = (_prefixes, _spaces) if view.prefixes else (_spaces, _prefixes)
    first, second = (make(history, view) for make in makers)
    if room < 2 or not history.now["spaces"]:
        return []
    if len(second) > 1 and room >= 2 * _SECOND:
        first = first[: max(room - len(second), room - room // 2)]
        first += second[: room - len(first)]
    return first[:room]


def _sorted(
    spaces: list[dict[str, Any]], changes: dict[str, dict[str, int]], view: View
) -> list[dict[str, Any]]:
    def rank(space: dict[str, Any]) -> tuple[Any, ...]:
        usage, space_id = space["usage"], space["space"]["id"]
        match view.sort:
            case "tokens/s":
                value = -changes[space_id]["prompt_tokens"]
            case "hit rate":
                value = -(reused_tokens(usage) / max(1, usage["prompt_tokens"]))
            case "pinned":
                value = -space["pinned"]
            case "model":
                value = space["spec"]["model"].lower()
            case _:
                value = -space["blocks"]
        return value, -space["blocks"], space_id

    return sorted(spaces, key=rank, reverse=view.reverse)


def _is_full(space: dict[str, Any], tier: str) -> bool:
    """Return whether a space has all that its quota allows in a tier, to a block."""
    quota = space["limits"][f"{tier}_bytes"]
    size = sum(space["spec"]["shard_bytes"])
    return quota is not None and space[f"bytes_{tier}"] + size > quota


def _spaces(history: History, view: View) -> list[Text]:
    """Return a heading and a line per space."""
    spaces, changes = history.now["spaces"], history.usage_changes()
    title = f"SPACES ({count(history.now['counters'].get('spaces', len(spaces)))})"
    lines = [
        heading(
            f"{title:<{_MODEL}} {'BLOCKS':>7} {'GPU':>6} {'HOST':>6} {'DISK':>6} "
            f"{'PINNED':>6} {'TOK/s':>7} {'HIT':>7}"
        )
    ]
    for space in _sorted(spaces, changes, view):
        usage = space["usage"]
        name = f"{space['space']['id'][:4]} {printable(space['spec']['model'])}"
        cell = Text(name, no_wrap=True)
        if cell.cell_len > _MODEL:
            # Of a path, the end is what tells it from others.
            cell = Text(f"{space['space']['id'][:4]} …{printable(space['spec']['model'])[-_TAIL:]}")
        cell.truncate(_MODEL, pad=True)
        cell.append(f" {count(space['blocks']):>7}")
        for tier in ("gpu", "host", "disk"):
            full = _is_full(space, tier)
            cell.append(f" {count(space[f'blocks_{tier}']):>6}", style="yellow" if full else "")
        cell.append(
            f" {count(space['pinned']):>6} "
            f"{per_second(history.rate(changes[space['space']['id']]['prompt_tokens'])):>7} "
            f"{percent(reused_tokens(usage), usage['prompt_tokens']):>7}"
        )
        lines.append(cell)
    return lines


def _prefixes(history: History, view: View) -> list[Text]:
    """Return a heading and a line per prefix."""
    grown = history.prefix_changes()
    prefixes = list(history.now["prefixes"])
    match view.prefix_sort:
        case "requests/s":
            prefixes.sort(key=lambda prefix: -grown[prefix["space_id"], prefix["root"]])
        case "requests":
            prefixes.sort(key=lambda prefix: -prefix["requests"])
        case "hit tokens":
            prefixes.sort(key=lambda prefix: -prefix["hit_tokens"])
        case "shared":
            prefixes.sort(key=lambda prefix: -prefix["shared_tokens"])
        case _:
            pass  # as the daemon sent them: hottest first
    if view.reverse:
        prefixes.reverse()
    lines = [
        heading(
            f"{'PREFIXES, SHARED':<{_PREFIX}} {'TOKENS':>7} {'BYTES':>8} {'GPU':>5} {'HOST':>5} "
            f"{'DISK':>5} {'REQS':>7} {'REQ/s':>7} {'HIT TOK':>8}"
        )
    ]
    for prefix in prefixes:
        rate = history.rate(grown[prefix["space_id"], prefix["root"]])
        lines.append(
            Text(
                f"{prefix['space_id'][:4]} {prefix['key'][:12]:<12} "
                f"{count(prefix['shared_tokens']):>7} {format_bytes(prefix['shared_bytes']):>8} "
                f"{count(prefix['blocks_gpu']):>5} {count(prefix['blocks_host']):>5} "
                f"{count(prefix['blocks_disk']):>5} {count(prefix['requests']):>7} "
                f"{per_second(rate):>7} {count(prefix['hit_tokens']):>8}",
                no_wrap=True,
            )
        )
    return lines
