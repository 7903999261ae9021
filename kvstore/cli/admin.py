"""`kvstore flush`, `kvstore drain` and `kvstore resize`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.connect import AddressOption, JsonOption, connect
from kvstore.cli.output import print_json
from kvstore.cli.plain import plain
from kvstore.errors import InvalidRequest
from kvstore.units import format_bytes, parse_bytes, parse_seconds

__all__ = ["register"]

TimeoutOption = Annotated[
    str, typer.Option("--timeout", metavar="DURATION", help="How long it may take.")
]


def flush(
    address: AddressOption = None, as_json: JsonOption = False, timeout: TimeoutOption = "60s"
) -> int:
    """Write everything committed so far to disk."""
    with connect(address) as client:
        result = plain(client.flush(parse_seconds(timeout)))
    if as_json:
        print_json(result)
    else:
        state = "the time ran out"
        if result["done"]:
            state = "not everything is on disk" if result["skipped"] else "everything is on disk"
        print(f"{state}: {result['blocks']} blocks written, {result['skipped']} skipped")
        for block in result["skipped_blocks"][:10]:
            print(f"  skipped {block['key']}: {block['reason']}")
    return 0 if result["done"] and not result["skipped"] else 1


def drain(
    address: AddressOption = None, as_json: JsonOption = False, timeout: TimeoutOption = "60s"
) -> int:
    """Stop storing until a restart, and flush; reading goes on.

    Waits for writers that have begun.
    """
    with connect(address) as client:
        result = plain(client.drain(parse_seconds(timeout)))
    if as_json:
        print_json(result)
    elif result["done"] and not result["skipped"]:
        print("drained: nothing is being stored, everything is on disk")
    elif result["done"]:
        print(
            f"nothing is being stored, and {result['skipped']} blocks are not on disk: "
            "`kvstore flush` says why"
        )
    elif result["grants"]:
        print(f"not drained yet: {result['grants']} grants are outstanding")
    else:
        print("not drained yet: the time ran out before everything was on disk")
    return 0 if result["done"] and not result["skipped"] else 1


def resize(
    size: Annotated[str, typer.Argument(metavar="SIZE", help="What the tier may take: 8GiB.")],
    tier: Annotated[str, typer.Option("--tier", metavar="TIER", help="host or disk.")],
    address: AddressOption = None,
    as_json: JsonOption = False,
    timeout: TimeoutOption = "60s",
) -> int:
    """Grow or shrink a tier while it serves.

    It holds until the daemon restarts. A smaller tier keeps what was used last. Ends with 1 when the time was up before it fits; the
    daemon goes on by itself.
    """
    if tier == "gpu":
        raise InvalidRequest("tier", "the gpu pool keeps its size; restart with --gpu-pool")
    if tier not in ("host", "disk"):
        raise InvalidRequest("tier", f"{tier!r} is not host or disk")
    with connect(address) as client:
        result = plain(client.set_capacity(tier, parse_bytes(size), parse_seconds(timeout)))
    if as_json:
        print_json(result)
    else:
        takes = f"the {tier} tier takes {format_bytes(result['bytes'])} at most"
        left = f"; {result['evicted']:,} copies had to leave" if result["evicted"] else ""
        more = "" if result["done"] else "; the rest is in use, it goes as soon as it is not"
        print(f"{takes}{left}{more}")
    return 0 if result["done"] else 1


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("flush")(flush)
    app.command("drain")(drain)
    app.command("resize")(resize)
