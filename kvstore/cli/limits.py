"""`kvstore quota`, `kvstore ttl` and `kvstore pins`: what spaces may take, and what may not leave."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.cli.blocks import OwnerOption, SpaceOption
from kvstore.cli.connect import AddressOption, JsonOption, connect, find_space
from kvstore.cli.output import console, count, make_table, print_json, shorten
from kvstore.cli.plain import plain
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.units import format_bytes, format_duration, format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from kvstore.client import Space

__all__ = ["limit_words", "register", "until_words"]

_TIERS = ("gpu", "host", "disk")
_SHORT_ID = 8
_NAME_WIDTH = 22

quota_app = typer.Typer()
ttl_app = typer.Typer()

TierOption = Annotated[
    list[str] | None,
    typer.Option("--tier", metavar="TIER", help="Only gpu, host or disk; repeatable."),
]


def _size_option(tier: str) -> Any:
    return typer.Option(f"--{tier}", metavar="SIZE", help=f"Most to take in {tier}, or none.")


def limit_words(limits: dict[str, Any]) -> str:
    """Say what is in force: ``host 8 GiB, disk 1 TiB, ttl 7d``."""
    words = [
        f"{tier} {format_bytes(limits[f'{tier}_bytes'])}"
        for tier in _TIERS
        if limits[f"{tier}_bytes"] is not None
    ]
    if limits["ttl_ms"] is not None:
        words.append(f"ttl {format_duration(limits['ttl_ms'] / 1e3)}")
    return ", ".join(words)


def _spaces(address: str | None, chosen: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Return the spaces whose limits in force are of interest."""
    with connect(address) as client:
        listed = [plain(space) for space in client.spaces()]
    return [space for space in listed if chosen(space["limits"])]


def _entry(space: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return one space of a list, for `--json`."""
    named = {"space": space["space"], "model": space["spec"]["model"]}
    return {**named, **{name: space[name] for name in (*names, "limits", "own_limits")}}


def _is_for_another(context: typer.Context, address: str | None, as_json: bool) -> bool:
    """Return whether a command of the group follows, which has options of its own."""
    if context.invoked_subcommand is None:
        return False
    if address is not None or as_json:
        raise InvalidRequest("options", f"write them behind {context.invoked_subcommand}")
    return True


def _set(address: str | None, space: str, as_json: bool, change: Callable[[Space], Any]) -> None:
    with connect(address) as client:
        limits = plain(change(find_space(client, space)))
    if as_json:
        print_json(limits)
    else:
        print(f"in force now: {limit_words(limits['limits']) or 'no limits'}")


@quota_app.callback(invoke_without_command=True)
def list_quotas(
    context: typer.Context, address: AddressOption = None, as_json: JsonOption = False
) -> None:
    """Show what spaces with quotas take, and may take.

    A space that would take more loses its own coldest blocks, never others'.
    """
    if _is_for_another(context, address, as_json):
        return
    listed = _spaces(
        address, lambda limits: any(limits[f"{tier}_bytes"] is not None for tier in _TIERS)
    )
    if as_json:
        sizes = [f"bytes_{tier}" for tier in _TIERS]
        print_json([_entry(space, *sizes, "pinned_bytes") for space in listed])
        return
    if not listed:
        print("no quotas: see `kvstore quota set --help`")
        return
    table = make_table("", ["id", "model"], (*_TIERS, "pinned"))
    for space in listed:
        cells = []
        for tier in _TIERS:
            limit = space["limits"][f"{tier}_bytes"]
            of = "" if limit is None else f" of {format_bytes(limit)}"
            cells.append(f"{format_bytes(space[f'bytes_{tier}'])}{of}")
        table.add_row(
            space["space"]["id"][:_SHORT_ID],
            shorten(space["spec"]["model"], _NAME_WIDTH),
            *cells,
            format_bytes(space["pinned_bytes"]),
        )
    console().print(table)


@quota_app.command("set")
def set_quotas(
    space: SpaceOption,
    gpu: Annotated[str | None, _size_option("gpu")] = None,
    host: Annotated[str | None, _size_option("host")] = None,
    disk: Annotated[str | None, _size_option("disk")] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set quotas of a space, for good.

    Those that are not named stay as they are. All survive restarts.
    """
    given = zip(_TIERS, (gpu, host, disk), strict=True)
    sizes = {tier: _limit(text, parse_bytes) for tier, text in given if text is not None}
    if not sizes:
        raise InvalidRequest("quota", "give --gpu, --host or --disk")
    _set(address, space, as_json, lambda opened: opened.set_quotas(**sizes))


@quota_app.command("clear")
def clear_quotas(
    space: SpaceOption,
    tier: TierOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take quotas of a space away.

    The daemon's default is in force again.
    """
    sizes = dict.fromkeys(tier or _TIERS)
    _set(address, space, as_json, lambda opened: opened.set_quotas(**sizes))


@ttl_app.callback(invoke_without_command=True)
def list_ttls(
    context: typer.Context, address: AddressOption = None, as_json: JsonOption = False
) -> None:
    """Show spaces whose unused blocks leave after a while."""
    if _is_for_another(context, address, as_json):
        return
    listed = _spaces(address, lambda limits: limits["ttl_ms"] is not None)
    if as_json:
        print_json([_entry(space, "blocks") for space in listed])
        return
    if not listed:
        print("no times to live: see `kvstore ttl set --help`")
        return
    table = make_table("", ["id", "model"], ("blocks", "leave unused after"))
    for space in listed:
        table.add_row(
            space["space"]["id"][:_SHORT_ID],
            shorten(space["spec"]["model"], _NAME_WIDTH),
            count(space["blocks"]),
            format_duration(space["limits"]["ttl_ms"] / 1e3),
        )
    console().print(table)


@ttl_app.command("set")
def set_ttl(
    ttl: Annotated[str, typer.Argument(metavar="DURATION", help="7d, 3h, 90m, or none.")],
    space: SpaceOption,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have blocks leave that were not used for so long.

    From every tier; what is leased or pinned stays until it is not.
    """
    seconds = _limit(ttl, parse_seconds)
    if not seconds:
        raise InvalidRequest("ttl", "must be above 0, or none")
    _set(address, space, as_json, lambda opened: opened.set_ttl(seconds))


@ttl_app.command("clear")
def clear_ttl(
    space: SpaceOption, address: AddressOption = None, as_json: JsonOption = False
) -> None:
    """Take a space's time to live away.

    The daemon's default is in force again.
    """
    _set(address, space, as_json, lambda opened: opened.set_ttl(None))


def _limit(text: str, parse: Callable[[str], float]) -> float:
    """Parse a limit; "none": not even the daemon's default."""
    if text.strip().lower() == "none":
        return math.inf
    try:
        return parse(text)
    except ConfigError as e:
        raise ConfigError(f"{e}; or none") from e


def pins(
    space: Annotated[
        str | None,
        typer.Option("--space", "-s", metavar="ID", help="Only of this space (or its id's start)."),
    ] = None,
    owner: OwnerOption = "",
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what is pinned, per space and owner."""
    with connect(address) as client:
        opened = None if space is None else find_space(client, space)
        groups = [plain(group) for group in client.pins(opened, owner)]
    groups.sort(key=lambda group: (group["space_id"], -group["blocks"], group["owner"]))
    if as_json:
        print_json(groups)
        return
    if not groups:
        print("nothing is pinned")
        return
    table = make_table("", ["space", "owner"], ("blocks", "bytes", "first ends", "last ends"))
    for group in groups:
        table.add_row(
            group["space_id"][:_SHORT_ID],
            shorten(group["owner"], _NAME_WIDTH) or "-",
            count(group["blocks"]),
            format_bytes(group["bytes"]),
            until_words(group["first_end_unix_ms"]),
            until_words(group["last_end_unix_ms"]),
        )
    console().print(table)


def until_words(unix_ms: int) -> str:
    """Say when a pin ends: ``in 1.5 h``, ``never``."""
    if not unix_ms:
        return "never"
    return f"in {format_seconds(max(0.0, unix_ms / 1e3 - time.time()))}"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(quota_app, name="quota")
    app.add_typer(ttl_app, name="ttl")
    app.command("pins")(pins)
