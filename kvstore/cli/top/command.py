"""The `top` command."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.connect import AddressOption, connect
from kvstore.cli.plain import plain
from kvstore.cli.top.view import MAX_INTERVAL_S, MIN_INTERVAL_S, View
from kvstore.errors import ConfigError
from kvstore.units import parse_seconds

if TYPE_CHECKING:
    from rich.console import Console, Group

    from kvstore.cli.top.history import History
    from kvstore.client import Client

__all__ = ["register"]

_PIPE_WIDTH = 80
_ONCE_LINES = 40


def _group(console: Console, history: History, view: View, height: int, *, keys: bool) -> Group:
    from rich.console import Group

    from kvstore.cli.top.frame import frame, to_ascii

    lines = frame(history, view, console.width, height, keys=keys)
    if console.options.ascii_only:
        lines = [to_ascii(line) for line in lines]
    return Group(*lines)


def _show_once(client: Client, console: Console, view: View) -> None:
    """Print what two answers, one interval apart, tell."""
    from kvstore.cli.top.history import History

    history = History()
    history.add(plain(client.stats()))
    time.sleep(view.interval_s)
    history.add(plain(client.stats()))
    console.print(_group(console, history, view, _ONCE_LINES, keys=False))


def _watch(client: Client, console: Console, view: View) -> None:
    from rich.live import Live

    from kvstore.cli.top.history import WINDOW_SECONDS, History
    from kvstore.cli.top.keyboard import keyboard

    history = History(max(WINDOW_SECONDS, view.interval_s))
    history.add(plain(client.stats()))
    # The keyboard outside: its mode ends after the screen is the shell's again.
    with keyboard() as board, Live(console=console, screen=True, auto_refresh=False) as live:
        due = time.monotonic() + view.interval_s
        while not view.done:
            group = _group(console, history, view, console.height, keys=True)
            live.update(group, refresh=True)
            typed = board.wait(due - time.monotonic())
            view.press(typed)
            if typed:
                due = min(due, time.monotonic() + view.interval_s)
            if time.monotonic() >= due:
                due = time.monotonic() + view.interval_s
                if not view.paused:
                    history.add(plain(client.stats()))


def top(
    address: AddressOption = None,
    interval: Annotated[
        str, typer.Option("--interval", "-i", metavar="DURATION", help="Time between two looks.")
    ] = "1s",
    once: Annotated[
        bool,
        typer.Option("--once", help="Print one frame, measured over one interval, and end."),
    ] = False,
) -> None:
    """Watch a daemon: tiers, hit rates, spaces, prefixes, queues.

    "Now" is the last five seconds, or one interval if that is longer. Keys: q quits, p or space
    stands still and goes on, v shows prefixes (what prompts begin with) instead of spaces, s sorts
    by something else, r turns the order round, + and - look more or less often.
    """
    seconds = parse_seconds(interval)
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise ConfigError(f"interval: {interval} is not between 100ms and 1h")
    if not once and not sys.stdout.isatty():
        raise ConfigError("top: the output is not a terminal; --once prints one frame")
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)
    view = View(interval_s=seconds)
    with connect(address) as client:
        if once:
            _show_once(client, console, view)
        else:
            _watch(client, console, view)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("top")(top)
