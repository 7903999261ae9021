"""Reaching a daemon from a command, and the options that all such commands share."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.cli.plain import plain
from kvstore.errors import InvalidRequest, ServerUnavailable
from kvstore.space import SpaceSpec

if TYPE_CHECKING:
    from kvstore.address import Address
    from kvstore.client import Client, Space

__all__ = ["AddressOption", "JsonOption", "connect", "find_space", "listens"]

_CONNECT_SECONDS: Final = 1.0

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


def listens(address: Address) -> bool:
    """Tell whether a process has the address, be it one that does not answer.

    Raises:
        PermissionError: nobody can tell: the socket, or its directory, is another user's.
    """
    try:
        if not address.local:
            socket.create_connection((address.host, address.port), _CONNECT_SECONDS).close()
            return True
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_CONNECT_SECONDS)
            probe.connect(address.path)
    except PermissionError:
        raise
    except OSError:
        return False
    return True


def another_users(address: Address) -> str:
    """Return what keeps this user from a daemon, and what to do."""
    return (
        f"{address}: permission denied: a daemon's socket is for its own user; be that user "
        "(sudo -u NAME), or give it a --listen HOST:PORT too"
    )


@contextlib.contextmanager
def connect(address: str | None) -> Iterator[Client]:
    """Open a client for a command's duration.

    Raises:
        ServerUnavailable: nobody answers; the message says how to start a daemon.
    """
    # Imported late: `kvstore serve` and `--help` do without the client.
    from kvstore.client import Client

    with Client(address, name=f"kvstore command:{os.getpid()}") as client:
        try:
            yield client
        except ServerUnavailable as e:
            try:
                there = listens(client.link.address)
            except PermissionError:
                raise ServerUnavailable(another_users(client.link.address)) from e
            if there:
                raise ServerUnavailable(
                    f"the daemon at {client.link.address} listens, but does not answer: it is "
                    "stopped, stuck, or has just been started again (see `kvstore doctor`)"
                ) from e
            listen = f" --listen {address}" if address else ""
            raise ServerUnavailable(
                f"no daemon answers at {client.link.address}; "
                f"start one with `kvstore serve{listen}`"
            ) from e


def find_space(client: Client, prefix: str) -> Space:
    """Open the one space whose id starts with `prefix` (hexadecimal).

    Raises:
        InvalidRequest: no space has such an id, or several have.
    """
    wanted = prefix.lower()
    found = [info for info in client.spaces() if info.space.id.hex().startswith(wanted)]
    if not wanted or not found:
        raise InvalidRequest(
            "space", f"no space's id starts with {prefix!r} (see `kvstore spaces`)"
        )
    if len(found) > 1:
        raise InvalidRequest("space", f"{len(found)} spaces' ids start with {prefix!r}: write more")
    return client.open_space(SpaceSpec(**plain(found[0].spec)))
