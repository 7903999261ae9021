"""`kvstore verify`: check what is on disk, while the daemon serves."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore.cli.connect import AddressOption, JsonOption, connect
from kvstore.cli.output import print_json
from kvstore.cli.plain import plain
from kvstore.errors import InvalidRequest, ServerUnavailable
from kvstore.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["register"]

_SHOWN: Final = 20


def parse_fraction(text: str) -> float:
    """Return what ``10%`` or ``0.1`` means.

    Raises:
        InvalidRequest: it is not above 0 and at most 1.
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise InvalidRequest("fraction", f"{text!r}: write a part such as 0.1 or 10%, at most 100%")
    return value


def parse_rate(text: str) -> int:
    """Return the bytes per second that ``100MiB/s`` or ``100MiB`` means.

    Raises:
        ConfigError: it is no size.
        InvalidRequest: it is 0.
    """
    rate = parse_bytes(text.removesuffix("/s"))
    if rate <= 0:
        raise InvalidRequest("rate", f"{text!r}: at least one byte per second")
    return rate


@contextlib.contextmanager
def _bar(shown: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show progress on a terminal; into a pipe or a file nothing is shown before the end."""
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(
        *columns, TextColumn("blocks"), Remaining(), console=Console(stderr=True), transient=True
    ) as progress:
        task = progress.add_task("verifying", total=None)

        def show(state: dict[str, Any]) -> None:
            seen = state["checked"] + state["gone"]
            bad = state["damaged"] + state["unreadable"]
            text = f"verifying, {bad:,} bad" if bad else "verifying"
            progress.update(task, completed=seen, total=state["total"] or None, description=text)

        yield show


def _print(result: dict[str, Any]) -> None:
    gone = f"; {result['gone']:,} left the disk meanwhile" if result["gone"] else ""
    rate = result["bytes"] / max(result["seconds"], 1e-9)
    print(
        f"checked {result['checked']:,} of {result['total']:,} blocks{gone}: "
        f"{format_bytes(result['bytes'])} in {format_seconds(result['seconds'])} "
        f"({format_bytes(rate)}/s)"
    )
    for fault in result["faults"][:_SHOWN]:
        kept = ", whole in host: written again" if fault["kept"] else ""
        print(
            f"  {fault['problem']}: {fault['key']} of space {fault['space_id'][:8]}, "
            f"segment {fault['segment']} slot {fault['slot']}{kept}"
        )
    if len(result["faults"]) > _SHOWN:
        print(f"  … and {len(result['faults']) - _SHOWN:,} more (--json lists all)")
    if result["damaged"]:
        print(
            f"{result['damaged']:,} damaged: {result['dropped']:,} copies dropped with what hung "
            f"on them, {result['lost']:,} blocks lost"
        )
    if result["unreadable"]:
        print(f"{result['unreadable']:,} unreadable: they stay; see the disk's state in `stats`")
    if result["done"] and not result["damaged"] and not result["unreadable"]:
        print("no damage found")


def verify(
    address: AddressOption = None,
    as_json: JsonOption = False,
    fraction: Annotated[
        str,
        typer.Option(
            "--fraction", metavar="PART", help="Check a random part of the blocks: 0.1 or 10%."
        ),
    ] = "100%",
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="SIZE/s", help="Read no faster, e.g. 100MiB/s."),
    ] = None,
) -> int:
    """Check the blocks on disk against their digests, while serving.

    Damaged blocks are dropped, or written again where memory holds them. Ends with 1 when there
    are any. Breaking it off ends the check.
    """
    part = parse_fraction(fraction)
    bytes_per_second = 0 if rate is None else parse_rate(rate)
    begun = time.monotonic()
    faults: list[dict[str, Any]] = []
    state: dict[str, Any] = {"done": False}
    # A break-off on either side must still tell what was found: damaged blocks are gone by then.
    broken: BaseException | None = None
    with connect(address) as client, _bar(sys.stderr.isatty() and not as_json) as show:
        try:
            for message in client.verify(part, bytes_per_second):
                state = plain(message)
                faults += state.pop("faults")
                show(state)
        except (KeyboardInterrupt, ServerUnavailable) as error:
            if "total" not in state:
                raise
            broken = error
    result = {**state, "seconds": time.monotonic() - begun, "faults": faults}
    if as_json:
        print_json(result)
    elif "total" in result:
        _print(result)
    if broken is not None:
        raise broken
    if not result["done"]:
        raise ServerUnavailable("the verification was broken off: the daemon stops")
    return 1 if result["damaged"] or result["unreadable"] else 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(verify)
