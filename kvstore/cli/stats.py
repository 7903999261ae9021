"""`kvstore stats` and `kvstore spaces`: what the daemon holds and how well it serves."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvstore.cli.connect import AddressOption, JsonOption, connect
from kvstore.units import format_bytes, format_seconds

__all__ = ["register"]

_SHORT_ID = 8


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _kvstore_tokens(usage: dict[str, Any]) -> int:
    return sum(int(usage[f"reused_tokens_{tier}"]) for tier in ("gpu", "host", "disk"))


def _hit_rate(usage: dict[str, Any]) -> str:
    """Effective hit rate: prompt tokens that nobody had to compute again."""
    reused = _kvstore_tokens(usage) + usage["local_tokens"]
    return _percent(reused, usage["prompt_tokens"])


def _tier_table(tiers: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="Tiers", title_justify="left")
    table.add_column("tier")
    for name in ("capacity", "used", "blocks", "hits", "hit tokens", "evicted", "dirty"):
        table.add_column(name, justify="right")
    table.add_column("state", overflow="fold")
    for tier in tiers:
        table.add_row(
            tier["tier"],
            format_bytes(tier["capacity_bytes"]),
            format_bytes(tier["used_bytes"]),
            f"{tier['blocks']:,}",
            f"{tier['hit_blocks']:,}",
            f"{tier['hit_tokens']:,}",
            f"{tier['evicted_blocks']:,}",
            f"{tier['dirty_blocks']:,}",
            tier["state"] or "ok",
        )
    return table


def _space_table(spaces: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="Spaces", title_justify="left")
    table.add_column("id")
    table.add_column("model", overflow="ellipsis", no_wrap=True, max_width=20)
    for name in ("block", "blocks", "host", "disk", "pinned", "hit rate"):
        table.add_column(name, justify="right")
    for space in spaces:
        spec = space["spec"]
        table.add_row(
            space["space"]["id"][:_SHORT_ID],
            spec["model"],
            format_bytes(sum(spec["shard_bytes"])),
            f"{space['blocks']:,}",
            f"{space['blocks_host']:,}",
            f"{space['blocks_disk']:,}",
            f"{space['pinned']:,}",
            _hit_rate(space["usage"]),
        )
    return table


def _miss_table(stats: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title="Misses", title_justify="left")
    table.add_column("reason")
    table.add_column("blocks", justify="right")
    table.add_column("tokens", justify="right")
    for reason, blocks in sorted(stats["misses_blocks"].items(), key=lambda item: -item[1]):
        table.add_row(
            reason.replace("_", " "), f"{blocks:,}", f"{stats['misses_tokens'].get(reason, 0):,}"
        )
    return table


def _timing_table(timings: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="Times", title_justify="left")
    table.add_column("what")
    for name in ("count", "p50", "p95", "p99"):
        table.add_column(name, justify="right")
    for timing in timings:
        quantiles = (format_seconds(timing[f"{q}_seconds"]) for q in ("p50", "p95", "p99"))
        table.add_row(timing["name"], f"{timing['count']:,}", *quantiles)
    return table


def _client_table(clients: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="Clients", title_justify="left")
    table.add_column("id", justify="right")
    table.add_column("client", overflow="ellipsis", no_wrap=True, max_width=24)
    table.add_column("pid", justify="right")
    table.add_column("state")
    for name in ("leases", "leased", "granted"):
        table.add_column(name, justify="right")
    for client in clients:
        table.add_row(
            str(client["attachment_id"]),
            client["client"],
            str(client["pid"]),
            client["state"],
            f"{client['leases']:,}",
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
            f"{format_seconds(stats['uptime_seconds'])}"
        ),
        (
            f"effective hit rate {_hit_rate(usage)} of {prompt:,} prompt tokens "
            f"(kvstore {_percent(shared, prompt)}, engines' own caches {_percent(own, prompt)}); "
            f"{usage['load_failures']:,} failed loads"
        ),
        (
            f"leases {stats['leases']:,}, grants {stats['grants']:,} "
            f"({stats['granted_slots']:,} slots), stuck {stats['stuck_slots']:,} slots "
            f"({format_bytes(stats['stuck_bytes'])})"
        ),
    ]


def stats(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Show tiers, spaces, hits, misses, clients and times."""
    from kvstore.cli.output import console, print_json
    from kvstore.cli.plain import plain

    with connect(address) as client:
        values = plain(client.stats())
    if as_json:
        print_json(values)
        return
    out = console()
    for line in _summary(values):
        out.print(line, markup=False)
    out.print(_tier_table(values["tiers"]))
    for key, table in (
        ("spaces", _space_table),
        ("clients", _client_table),
        ("timings", _timing_table),
    ):
        if values[key]:
            out.print(table(values[key]))
    if values["misses_blocks"]:
        out.print(_miss_table(values))


def spaces(
    address: AddressOption = None,
    as_json: JsonOption = False,
    long: Annotated[bool, typer.Option("--long", "-l", help="Show every field.")] = False,
) -> None:
    """List the spaces that the daemon knows."""
    from kvstore.cli.output import console, print_json
    from kvstore.cli.plain import plain

    with connect(address) as client:
        listed = [plain(space) for space in client.spaces()]
    if as_json:
        print_json(listed)
        return
    out = console()
    if not long:
        out.print(_space_table(listed))
        return
    for space in listed:
        out.print(f"{space['space']['id']} epoch {space['space']['epoch']}", markup=False)
        for name, value in space["spec"].items():
            out.print(f"  {name}: {value}", markup=False)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("stats")(stats)
    app.command("spaces")(spaces)
