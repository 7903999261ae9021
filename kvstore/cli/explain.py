"""`kvstore explain`: why a request missed, or why prompts share less than they could."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvstore.cli.connect import AddressOption, JsonOption
from kvstore.cli.output import console, count, make_table, print_json, shorten
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from kvstore.explain import Finding, Group, Kind, Report

__all__ = ["register"]

_COLUMNS: Final = 80
_CONTEXT: Final = 24
_VALUE: Final = 44
# What may be meant as the start of a space's id.
_SPACE: Final = re.compile(r"[0-9a-fA-F]{1,64}", re.ASCII)
_SPACES: Final = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"})


def _shown(text: str) -> str:
    """Return text for one line of a terminal."""
    return "".join(c if c.isprintable() else "�" for c in text.translate(_SPACES))


def _value(text: str) -> str:
    """Return a value; white space alone would not be seen."""
    if not text:
        return "(nothing)"
    return _shown(text).replace(" ", "·") if text.isspace() else _shown(text)


def _finding_text(finding: Finding) -> Text:
    from rich.text import Text

    place = finding.start
    text = Text(f"{place.field}, character {place.field_offset:,} (line {finding.line})\n", "dim")
    text.append(_shown(finding.before[-_CONTEXT:]))
    first, *others = finding.variants
    text.append(_value(first.text[:_VALUE]), "bold red")
    text.append(_shown(finding.after[:_CONTEXT]))
    for variant in others:
        text.append(f"\n  line {variant.line}: ", "dim").append(
            _value(variant.text[:_VALUE]), "red"
        )
    return text.append(f"\n→ {finding.advice}", "green")


def _group_text(group: Group) -> Text:
    from rich.text import Text

    text = Text(_shown(group.prefix[:_CONTEXT]))
    if len(group.prefix) > _CONTEXT:
        text.append(f" … {_shown(group.before[-_CONTEXT:])}")
    for variant in group.variants:
        text.append(f"\n  line {variant.line}: ", "dim").append(
            _value(variant.text[:_VALUE]), "red"
        )
    return text


def _print(report: Report, path: Path, top: int, estimated: bool, out: Console) -> None:
    how = "estimated at" if estimated else "measured"
    print(
        f"{shorten(path.name, 24)}: {report.prompts:,} prompts, "
        f"{count(report.tokens(report.chars))} tokens "
        f"({how} {report.chars_per_token:.3g} chars a token)"
    )
    now, after = report.computed_chars, report.computed_chars_after
    print(
        f"a perfect prefix cache reuses {report.reused_percent(now):.1f} % now, "
        f"{report.reused_percent(after):.1f} % with these out of the way"
    )
    if report.findings:
        rows = [
            (f.kind, f.prompts, f"{count(report.tokens(f.chars_won))} won", _finding_text(f))
            for f in report.findings[:top]
        ]
        _print_table("what varies", "where, and what to do", rows, out)
        if len(report.findings) > top:
            print(f"… and {len(report.findings) - top:,} more (--top, --json)")
    else:
        print("nothing varies before text that is the same: nothing to move")
    if report.groups:
        rows = [
            (g.kind, g.prompts, f"{count(report.tokens(g.shared_chars))} shared", _group_text(g))
            for g in report.groups[:top]
        ]
        _print_table(
            "ends by", "prefixes in common: how they begin … and where they end", rows, out
        )


def _print_table(
    left: str, right: str, rows: list[tuple[Kind, int, str, Text]], out: Console
) -> None:
    table = make_table("", [left])
    table.add_column(right, overflow="fold")
    for kind, prompts, tokens, text in rows:
        name = kind.value.replace("_", " ")
        about = f"{name}\n{count(prompts)} prompts\n{tokens}"
        table.add_row(about, text, end_section=True)
    out.print(table, width=min(_COLUMNS, out.width))


def explain(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPTS|SPACE",
            help='A file of JSON lines: {"prompt": "…"} or {"messages": […], "tools": […]}; with '
            "--keys or --tokens, a space's id or its start (`kvstore spaces`).",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="KEY,…",
            help="Explain these keys: hexadecimal, in chain order.",
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Explain a prompt: a file of token ids between spaces or commas.",
        ),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Explain one of the last 1,024 loads: the engine's request id.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Rows to show.")] = 10,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A tokenizer.json, or a model's directory, to measure characters a token with; "
            "without it 4 are assumed.",
        ),
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain why a request missed, or why prompts share little.

    With --keys, --tokens or --request it asks the daemon how far the hit goes and why it ends
    there: never seen, evicted (from where, when, what for), stored in another space (and which
    field differs), in flight, too late, not worth waiting, damaged, shorter than a block.

    With a file of prompts it groups them by shared prefix, shows where they part, and what parts
    them while the text behind it is the same: timestamps, ids, reordered JSON, white space. Tells
    how many tokens moving it would save. Needs no daemon.
    """
    if sum(given is not None for given in (keys, tokens, request)) > 1:
        raise typer.BadParameter("give one of --keys, --tokens and --request")
    if (target is None) == (request is None):
        raise typer.BadParameter(
            "give a file of prompts, or a space with --keys or --tokens, or --request"
        )
    if keys is not None or tokens is not None or request is not None:
        from kvstore.cli.explain_online import explain_run

        explain_run(target, keys, tokens, request, address, as_json)
        return
    assert target is not None
    prompts = Path(target)
    if not prompts.exists() and _SPACE.fullmatch(target):
        raise InvalidRequest(
            "prompts", f"no file {target}; of a space, --tokens or --keys are explained"
        )
    from kvstore.explain import (
        CHARS_PER_TOKEN,
        analyse,
        measured_chars_per_token,
        read_prompts,
    )

    read = read_prompts(prompts)
    ratio = CHARS_PER_TOKEN
    if tokenizer is not None:
        ratio = measured_chars_per_token(read, tokenizer)
    report = analyse(read, ratio)
    if as_json:
        print_json(
            {"file": str(prompts), "tokens_estimated": tokenizer is None, **report.as_json()}
        )
    else:
        _print(report, prompts, top, tokenizer is None, console())


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain)
