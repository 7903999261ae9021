"""What holds for every command there is: help, examples, and how it fails."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main

from kvstore.cli.app import app, main
from kvstore.cli.examples import EXAMPLES

ROOT: Final = typer.main.get_command(app)
# Of each command that needs more than an address: the rest of a command line that would be right.
NEEDED: Final = {
    "pin": "--space 3f2a 00",
    "unpin": "--space 3f2a --all",
    "evict": "--space 3f2a --all",
    "prefetch": "--space 3f2a 00",
    "resize": "1GiB --tier host",
    "quota set": "--space 3f2a --host 1GiB",
    "quota clear": "--space 3f2a",
    "ttl set": "7d --space 3f2a",
    "ttl clear": "--space 3f2a",
    "top": "--once",
    "explain": "--request chat-1",
}
# Of each command that takes no address: a target that is not there.
NOWHERE: Final = {
    "serve": "--state /proc/nowhere --host-pool 16MiB",
    "replay": "/nowhere/trace.jsonl",
    "demo": "--model /nowhere/model",
    "bench": "--dir /nowhere",
    "bench gpu": "--dir /nowhere",
    "bench prefetch": "--dir /nowhere",
}


def commands(group: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield names and objects of the program itself, its groups and commands."""
    yield " ".join(path), group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


ALL: Final = dict(commands())


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def parse(line: str) -> None:
    """Parse a command line as the program does, and run nothing."""
    program, *words = shlex.split(line)
    assert program == "kvstore"
    path = max(
        (name.split() for name in ALL if words[: len(name.split())] == name.split()), key=len
    )
    assert path, line
    ALL[" ".join(path)].make_context(path[-1], words[len(path) :])


@pytest.mark.parametrize("name", ALL)
def test_help_is_there_and_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = ALL[name]
    code, shown, errors = run(*name.split(), "--help")
    assert (code, errors) == (0, "")
    assert not re.search(r"<\w+(\[\w+\])?>", shown), "a type of Python"
    assert max(map(len, shown.splitlines())) <= 80
    # Summaries in a list of commands are whole sentences.
    assert "..." not in shown.replace("[KEY]...", "").replace("[ARGS]...", "")
    assert command.help.split("\n")[0].endswith("."), "the first line is one sentence"
    for parameter in command.params:
        if parameter.name == "help":
            continue
        assert getattr(parameter, "help", None), parameter.name


def test_nothing_at_all_shows_the_help_in_its_lines() -> None:
    _, shown, _ = run("--help")
    code, out, errors = run()
    assert code in (0, 2)
    assert (out + errors).split() == shown.split()
    assert (out + errors).count("\n") == shown.count("\n")


@pytest.mark.parametrize("name", ALL)
def test_examples_are_shown_and_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, shown, _ = run(*name.split(), "--help")
    assert EXAMPLES[name]
    for line in EXAMPLES[name]:
        assert f"    {line}\n" in shown
        assert line.startswith(f"kvstore {name}".rstrip())
        parse(line)


def test_every_example_is_of_a_command() -> None:
    assert set(EXAMPLES) == set(ALL)


def takes_address(command: Any) -> bool:
    return any("--address" in parameter.opts for parameter in command.params)


def test_every_command_has_a_way_to_fail_here() -> None:
    with_address = {name for name, command in ALL.items() if takes_address(command)}
    assert set(NEEDED) <= with_address
    assert with_address | set(NOWHERE) == set(ALL) - {""}


@pytest.mark.parametrize("name", [name for name, command in ALL.items() if takes_address(command)])
def test_no_daemon_is_one_line(name: str, tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/nobody.sock"
    code, shown, errors = run(*name.split(), *NEEDED.get(name, "").split(), "--address", address)
    assert code == 1
    if name == "doctor":
        # It looks at the machine all the same, and the daemon that is not there heads its table.
        assert errors == ""
        assert "error" in shown
        assert "none at" in shown
        assert "Traceback" not in shown
        return
    assert shown == ""
    assert errors == (
        f"kvstore: no daemon answers at {address}; "
        f"start one with `kvstore serve --listen {address}`\n"
    )


@pytest.mark.parametrize("name", ["stats", "doctor"])
def test_the_socket_of_another_user_is_not_called_nobodys(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    code, shown, errors = run(name, "--address", f"unix://{tmp_path}/theirs.sock")
    assert code == 1
    assert "permission" in " ".join((shown + errors).split())
    assert "sudo -u" in shown + errors
    assert "kvstore serve`" not in shown + errors


@pytest.mark.parametrize("name", [name for name, command in ALL.items() if takes_address(command)])
def test_an_address_that_is_none_is_one_line(name: str) -> None:
    code, shown, errors = run(*name.split(), *NEEDED.get(name, "").split(), "--address", "moon")
    assert (code, shown) == (1, "")
    assert errors == "kvstore: address: 'moon' is neither unix:///path nor host:port\n"


@pytest.mark.parametrize("name", NOWHERE)
def test_a_target_that_is_not_there_is_one_line(name: str) -> None:
    # In a process of its own: `serve` sets up logging and limits for good.
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", *name.split(), *NOWHERE[name].split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    # A directory is looked at as the command line is read: that is a wrong command line.
    assert done.returncode == (2 if "--dir" in NOWHERE[name] else 1)
    assert done.stdout == ""
    assert done.stderr.startswith("kvstore: ")
    assert done.stderr.count("\n") == 1
    if name == "demo" and importlib.util.find_spec("vllm") is None:
        assert done.stderr.startswith("kvstore: vllm: is not installed here")
        return
    assert "nowhere" in done.stderr
