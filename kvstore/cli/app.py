"""The command line's top level: which commands there are, and how errors end.

Exit codes: 0 done, 1 it failed, 2 the command line is wrong, 130 interrupted. An error is one
line on stderr.

A command imports what it runs inside its function: `kvstore serve` must not pay for the client,
nor `kvstore stats` for the server.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from kvstore import __version__, log_lines
from kvstore.cli import admin, blocks, doctor, explain, limits, replay, serve, stats, verify
from kvstore.cli.bench import command as bench
from kvstore.cli.demo import command as demo
from kvstore.cli.examples import add_examples, top_examples
from kvstore.cli.top import command as top
from kvstore.errors import KVStoreError

__all__ = ["app", "main"]

# What the parser raises for a wrong command line; typer has no public name for it.
_USAGE_ERROR: Final[type[Exception]] = typer.BadParameter.__mro__[1]


class _Command(TyperCommand):
    """A command whose help names its arguments without their Python types."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                # Since typer 0.25 or so, `KEY <list[str]>`.
                parameter.__dict__["display_type_rich"] = lambda ctx: None


def _use_plain_help(app: typer.Typer) -> None:
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        assert group.typer_instance is not None
        _use_plain_help(group.typer_instance)


app = typer.Typer(
    name="kvstore",
    help="A hierarchical KV-cache store for LLM inference.",
    epilog=top_examples(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _register in (
    serve.register,
    stats.register,
    top.register,
    blocks.register,
    limits.register,
    admin.register,
    verify.register,
    doctor.register,
    replay.register,
    explain.register,
    demo.register,
    bench.register,
):
    _register(app)
add_examples(app)
_use_plain_help(app)


# What a disk meets that takes our output.
_FULL = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC})


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvstore {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A hierarchical KV-cache store for LLM inference."""


def _logs_as_json(arguments: list[str]) -> bool:
    """Whether a command line that could not be read asks for a daemon that logs as JSON."""
    joined = " ".join(arguments).replace("--log-format=", "--log-format ")
    return arguments[:1] == ["serve"] and "--log-format json" in joined


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line; None takes the process's own.

    Returns:
        The exit code.
    """
    try:
        result = app(arguments, prog_name="kvstore", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KVStoreError as e:
        print(f"kvstore: {e}".replace("\n", " "), file=sys.stderr)
        return 1
    except UnicodeEncodeError as e:
        # Of arguments that are no text; file names may be such, names of anything else may not.
        print(f"kvstore: {e.object[:100]!r} is not UTF-8", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`kvstore stats | head`): what is left of it, and
        # the flush at exit, go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        if e.filename is not None or e.errno not in _FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"kvstore: standard output: {e.strerror}", file=sys.stderr)
        return 1
    except _USAGE_ERROR as e:
        problem = e.format_message() if hasattr(e, "format_message") else str(e)
        if type(e).__name__ == "NoArgsIsHelpError":  # nothing was said: what it says is the help
            print(problem, file=sys.stderr)
            return 2
        text = f"{problem} (try --help)".replace("\n", " ")
        as_json = _logs_as_json(sys.argv[1:] if arguments is None else arguments)
        print(log_lines.line("error", text) if as_json else f"kvstore: {text}", file=sys.stderr)
        return 2
    return result if isinstance(result, int) else 0
