"""`kvstore stats` and `kvstore spaces`: what the daemon holds and how well it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.connect import AddressOption, JsonOption, connect
from kvstore.cli.limits import limit_words, until_words
from kvstore.cli.output import console, count, make_table, print_json, printable, shorten
from kvstore.cli.plain import plain
from kvstore.units import format_bytes, format_seconds, format_uptime

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["register"]

_SHORT_ID = 8
_NAME_WIDTH = 22
_PREFIXES = 5
_QUANTILES = ("p50", "p95", "p99", "max")


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _kvstore_tokens(usage: dict[str, Any]) -> int:
    return sum(int(usage[f"reused_tokens_{tier}"]) for tier in ("gpu", "host", "disk"))


def _hit_rate(usage: dict[str, Any]) -> str:
    """Effective hit rate: prompt tokens that nobody had to compute again."""
    reused = _kvstore_tokens(usage) + usage["local_tokens"]
    return _percent(reused, usage["prompt_tokens"])


def _tier_table(tiers: list[dict[str, Any]]) -> Table:
    numbers = ("capacity", "used", "blocks", "hits", "hit tokens", "evicted", "dirty")
    table = make_table("Tiers", ["tier"], numbers)
    table.add_column("state", overflow="fold")
    for tier in tiers:
        table.add_row(
            tier["tier"],
            format_bytes(tier["capacity_bytes"]),
            format_bytes(tier["used_bytes"]),
            count(tier["blocks"]),
            count(tier["hit_blocks"]),
            count(tier["hit_tokens"]),
            count(tier["evicted_blocks"]),
            count(tier["dirty_blocks"]),
            tier["state"] or "ok",
        )
    return table


def _space_table(spaces: list[dict[str, Any]]) -> Table:
    numbers = ("block", "blocks", "host", "disk", "pinned", "hit rate")
    table = make_table("Spaces", ["id", "model"], numbers)
    for space in spaces:
        spec = space["spec"]
        table.add_row(
            space["space"]["id"][:_SHORT_ID],
            shorten(spec["model"], _NAME_WIDTH),
            format_bytes(sum(spec["shard_bytes"])),
            count(space["blocks"]),
            count(space["blocks_host"]),
            count(space["blocks_disk"]),
            count(space["pinned"]),
            _hit_rate(space["usage"]),
        )
    return table


def _prefix_table(prefixes: list[dict[str, Any]]) -> Table:
    numbers = ("requests", "hit tokens", "shared", "bytes", "gpu", "host", "disk")
    table = make_table("Prefixes that are asked for most", ["space", "key"], numbers)
    for prefix in prefixes:
        table.add_row(
            prefix["space_id"][:_SHORT_ID],
            prefix["key"][:_SHORT_ID],
            count(prefix["requests"]),
            count(prefix["hit_tokens"]),
            count(prefix["shared_tokens"]),
            format_bytes(prefix["shared_bytes"]),
            *(count(prefix[f"blocks_{tier}"]) for tier in ("gpu", "host", "disk")),
        )
    return table


def _limits_table(spaces: list[dict[str, Any]]) -> Table:
    table = make_table("Limits", ["id", "model", "in force"], ("pinned", "first pin ends"))
    for space in spaces:
        table.add_row(
            space["space"]["id"][:_SHORT_ID],
            shorten(space["spec"]["model"], _NAME_WIDTH),
            limit_words(space["limits"]) or "-",
            format_bytes(space["pinned_bytes"]),
            until_words(space["pins_end_unix_ms"]) if space["pinned"] else "-",
        )
    return table


def _miss_table(stats: dict[str, Any]) -> Table:
    table = make_table("Misses", ["reason"], ("blocks", "tokens"))
    for reason, blocks in sorted(stats["misses_blocks"].items(), key=lambda item: -item[1]):
        table.add_row(
            reason.replace("_", " "), count(blocks), count(stats["misses_tokens"].get(reason, 0))
        )
    return table


def _timing_table(timings: list[dict[str, Any]]) -> Table:
    table = make_table("Times", ["what"], ("count", *_QUANTILES))
    for timing in timings:
        quantiles = (format_seconds(timing[f"{q}_seconds"]) for q in _QUANTILES)
        table.add_row(timing["name"].replace("_", " "), count(timing["count"]), *quantiles)
    return table


def _client_table(clients: list[dict[str, Any]]) -> Table:
    table = make_table("Clients", ["client", "state"], ("pid", "leases", "leased", "granted"))
    for client in clients:
        table.add_row(
            shorten(client["client"], _NAME_WIDTH),
            client["state"],
            str(client["pid"]),
            count(client["leases"]),
            format_bytes(client["leased_bytes"]),
            format_bytes(client["granted_bytes"]),
        )
    return table


def _summary(stats: dict[str, Any]) -> list[str]:
    usage = stats["usage"]
    prompt = usage["prompt_tokens"]
    own, shared = usage["local_tokens"], _kvstore_tokens(usage)
    return [
        (
            f"kvstore {stats['server_version']}, boot {stats['boot_id'][:_SHORT_ID]}, up "
            f"{format_uptime(stats['uptime_seconds'])}"
        ),
        (
            f"effective hit rate {_hit_rate(usage)} of {prompt:,} prompt tokens: kvstore "
            f"{_percent(shared, prompt)}, engines' caches {_percent(own, prompt)}"
        ),
        (
            f"leases {stats['leases']:,}, grants {stats['grants']:,} "
            f"({stats['granted_slots']:,} slots), stuck {stats['stuck_slots']:,} slots "
            f"({format_bytes(stats['stuck_bytes'])}), failed loads {usage['load_failures']:,}"
        ),
        *(["drained: nothing is stored until the next start"] if stats["draining"] else []),
    ]


def _budget(tiers: list[dict[str, Any]]) -> list[str]:
    return [
        f"{tier['tier']} budget: {format_bytes(tier['budget_left_bytes'])} left of "
        f"{format_bytes(tier['budget_bytes'])} in 24 hours\n"
        for tier in tiers
        if tier["budget_bytes"]
    ]


def _gpu(tiers: list[dict[str, Any]]) -> list[str]:
    """Say where the GPU pool is and how blocks come to it from disk."""
    lines = []
    for tier in tiers:
        if tier["tier"] == "gpu":
            devices = ", ".join(
                f"{device['name']} {format_bytes(device['capacity_bytes'])}"
                for device in tier["devices"]
            )
            way = tier["io_engine"]
            by = "through host memory" if way == "host" else f"by {way}"
            lines.append(f"gpu pool: {devices}; from disk {by}\n")
    return lines


def stats(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Show tiers, spaces, hits, misses, clients and times.

    Prefixes are what prompts begin with: "shared" is how many tokens at least half of the requests
    that begin alike have in common.
    """
    with connect(address) as client:
        values = plain(client.stats())
    if as_json:
        print_json(values)
        return
    out = console()
    for line in _summary(values):
        out.print(line, markup=False)
    print()
    out.print(_tier_table(values["tiers"]))
    for line in (*_gpu(values["tiers"]), *_budget(values["tiers"])):
        out.print(line, markup=False)
    if values["spaces"]:
        out.print(_space_table(values["spaces"]))
    if held := [s for s in values["spaces"] if s["pinned"] or limit_words(s["limits"])]:
        out.print(_limits_table(held))
    if values["prefixes"]:
        out.print(_prefix_table(values["prefixes"][:_PREFIXES]))
    if values["misses_blocks"]:
        out.print(_miss_table(values))
    if values["clients"]:
        out.print(_client_table(values["clients"]))
    out.print(_timing_table(values["timings"]))


def spaces(
    address: AddressOption = None,
    as_json: JsonOption = False,
    long: Annotated[bool, typer.Option("--long", "-l", help="Show every field.")] = False,
) -> None:
    """List the spaces that the daemon knows."""
    with connect(address) as client:
        listed = [plain(space) for space in client.spaces()]
    if as_json:
        print_json(listed)
        return
    if not listed:
        print("no spaces yet")
        return
    out = console()
    if not long:
        out.print(_space_table(listed))
        return
    for space in listed:
        out.print(f"{space['space']['id']} epoch {space['space']['epoch']}", markup=False)
        for name, value in space["spec"].items():
            out.print(f"  {name}: {printable(str(value))}", markup=False)
        if limits := limit_words(space["limits"]):
            out.print(f"  limits: {limits}", markup=False)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("stats")(stats)
    app.command("spaces")(spaces)
