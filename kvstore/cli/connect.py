"""Reaching a daemon from a command, and the options that all such commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore.errors import InvalidRequest, ServerUnavailable

if TYPE_CHECKING:
    from kvstore.client import Client, Space

__all__ = ["AddressOption", "JsonOption", "connect", "find_space"]

AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        metavar="ADDRESS",
        help="The daemon: unix:///path or host:port. Default: $KVSTORE_ADDRESS, else where "
        "`kvstore serve` listens.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@contextlib.contextmanager
def connect(address: str | None) -> Iterator[Client]:
    """Open a client for a command's duration.

    Raises:
        ServerUnavailable: nobody answers; the message says how to start a daemon.
    """
    # Imported late: `kvstore serve` and `--help` do without the client.
    from kvstore.client import Client

    try:
        with Client(address) as client:
            yield client
    except ServerUnavailable as e:
        listen = f" --listen {address}" if address else ""
        raise ServerUnavailable(f"{e}; start one with `kvstore serve{listen}`") from e


def find_space(client: Client, prefix: str) -> Space:
    """Open the one space whose id starts with `prefix` (hexadecimal).

    Raises:
        InvalidRequest: no space has such an id, or several have.
    """
    wanted = prefix.lower()
    found: list[Any] = [s for s in client.spaces() if s.space.id.hex().startswith(wanted)]
    if not wanted or not found:
        raise InvalidRequest(
            "space", f"no space's id starts with {prefix!r} (see `kvstore spaces`)"
        )
    if len(found) > 1:
        raise InvalidRequest("space", f"{len(found)} spaces' ids start with {prefix!r}: write more")
    return client.open_space(spec_from(found[0]))


def spec_from(info: Any) -> Any:
    """Return the spec of a listed space."""
    from kvstore.wire import spec_from_message

    return spec_from_message(info.spec)
