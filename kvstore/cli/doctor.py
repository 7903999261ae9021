"""`kvstore doctor`: what is wrong with this machine, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvstore.address import Address, default_address, parse_address
from kvstore.cli.connect import AddressOption, JsonOption, connect, listens
from kvstore.cli.output import console, make_table, print_json
from kvstore.cli.plain import plain
from kvstore.errors import ConfigError, DeadlineExceeded, ServerUnavailable

if TYPE_CHECKING:
    from rich.console import Console

    from kvstore.config import ServeConfig

__all__ = ["register"]

_COLUMNS: Final = 80
_STYLES: Final = {"ok": "green", "warning": "yellow", "error": "bold red"}
# Small enough for any machine: the pool of settings that cannot be, so that the rest is examined.
_SOME_POOL: Final = "16MiB"

_Findings = list[dict[str, Any]]


def _option(name: str, text: str, metavar: str) -> Any:
    return typer.Option(name, help=text, metavar=metavar)


def _finding(subject: str, level: str, text: str, advice: str = "") -> dict[str, Any]:
    return {"subject": subject, "level": level, "text": text, "advice": advice}


def _ask(address: Address) -> _Findings | None:
    """Return what the daemon says, None when it says nothing."""
    try:
        with connect(str(address)) as client:
            return [plain(finding) for finding in client.doctor()]
    except (ServerUnavailable, DeadlineExceeded):
        return None


def _silent(address: Address, *, named: bool) -> dict[str, Any]:
    """Say what it means that no daemon answered; an error where one was named."""
    try:
        there = listens(address)
    except PermissionError:
        advice = (
            "be the user that runs it (sudo -u NAME); below is this machine as this user sees it"
        )
        return _finding("daemon", "error", f"at {address}: permission denied", advice)
    if there:
        advice = "it is stopped or stuck: see its log, and restart it; below is this machine"
        return _finding("daemon", "error", f"at {address}: listens, but does not answer", advice)
    advice = "start one with `kvstore serve`; below is what it would find here"
    return _finding("daemon", "error" if named else "warning", f"none at {address}", advice)


def _settings(flags: dict[str, Any], file: Path | None) -> tuple[ServeConfig, _Findings]:
    """Return the settings that `kvstore serve` would run with.

    Raises:
        ConfigError: they are wrong in a way that leaves nothing to examine.
    """
    from kvstore.config import load_config

    try:
        return load_config(flags, file), []
    except ConfigError as e:
        # What a machine cannot carry is a finding like others; a typo is not.
        if not str(e).startswith("host_pool: auto "):
            raise
        found = [_finding("settings", "error", str(e), "give --host-pool a size, or free memory")]
        return load_config({**flags, "host_pool": _SOME_POOL}, file), found


def _look(flags: dict[str, Any], file: Path | None) -> _Findings:
    """Examine this machine from this process."""
    from kvstore.doctor import Examination, Setup

    config, found = _settings(flags, file)
    setup = Setup(
        state=config.state,
        host_pool_bytes=config.host_pool,
        disk=config.disk,
        disk_capacity_bytes=config.disk_capacity,
        io_threads=config.io_threads,
    )
    found += [
        _finding(one.subject, one.level.value, one.text, one.advice)
        for one in Examination(setup).run()
    ]
    return found


def _print_table(found: _Findings, out: Console) -> None:
    from rich.text import Text

    table = make_table("", ["", "subject"])
    table.add_column("seen, and what to do", overflow="fold")
    for one in found:
        seen = Text(one["text"])
        if one["advice"]:
            seen.append(f"\n→ {one['advice']}", style="bold" if one["level"] != "ok" else "dim")
        table.add_row(Text(one["level"], style=_STYLES.get(one["level"], "")), one["subject"], seen)
    out.print(table, width=min(_COLUMNS, out.width))


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s' * (number != 1)}"


def doctor(
    address: AddressOption = None,
    as_json: JsonOption = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Ask no daemon; look from this process.")
    ] = False,
    state: Annotated[str | None, _option("--state", "As for serve; offline.", "DIR")] = None,
    host_pool: Annotated[
        str | None, _option("--host-pool", "As for serve; offline.", "SIZE")
    ] = None,
    disk: Annotated[str | None, _option("--disk", "As for serve; offline.", "DIR")] = None,
    disk_capacity: Annotated[
        str | None, _option("--disk-capacity", "As for serve; offline.", "SIZE")
    ] = None,
    io_threads: Annotated[
        int | None, _option("--io-threads", "As for serve; offline.", "N")
    ] = None,
    config: Annotated[Path | None, _option("--config", "As for serve; offline.", "FILE")] = None,
) -> int:
    """Check the machine: directories, memory, limits, libraries.

    Asks the daemon, which looks with the settings that it runs with. Without a daemon, with
    --offline, or with a setting to try, it looks from here. Ends with 1 when there is an error.
    """
    flags = {
        "state": state,
        "host_pool": host_pool,
        "disk": disk,
        "disk_capacity": disk_capacity,
        "io_threads": io_threads,
    }
    here = offline or config is not None or any(value is not None for value in flags.values())
    if here and address is not None:
        raise ConfigError("address: not together with --offline or settings to try")
    daemon: str | None = None
    if here:
        found = _look(flags, config)
    else:
        where = parse_address(address) if address is not None else default_address()
        answer = _ask(where)
        found = (
            [_silent(where, named=address is not None), *_look(flags, config)]
            if answer is None
            else answer
        )
        daemon = None if answer is None else str(where)
    errors, warnings = (
        sum(one["level"] == level for one in found) for level in ("error", "warning")
    )
    if as_json:
        print_json({"daemon": daemon, "errors": errors, "warnings": warnings, "findings": found})
    else:
        out = console()
        who = f"the daemon at {daemon}" if daemon is not None else "this process"
        out.print(f"as seen by {who}:", markup=False, soft_wrap=True)
        _print_table(found, out)
        print(f"{_counted(errors, 'error')}, {_counted(warnings, 'warning')}")
    return 1 if errors else 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)
