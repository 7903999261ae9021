"""The `demo` command."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]

# Where `make demo` puts the weights, in a checkout.
_CHECKOUT_MODEL = Path(__file__).resolve().parents[3] / ".cache" / "smollm2-fp32"


def demo(
    model: Annotated[
        Path,
        typer.Option(
            "--model",
            metavar="DIR",
            help="A Hugging Face checkpoint; `make demo` brings SmolLM2-135M.",
            show_default=False,
        ),
    ] = _CHECKOUT_MODEL,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            exists=True,
            file_okay=False,
            writable=True,
            help="Where to put the scratch directory (about 1 GB).",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=5, max=50, metavar="N", help="Prompts per row.")] = 6,
    prompt_tokens: Annotated[
        int, typer.Option(min=256, max=8000, metavar="N", help="Tokens of each prompt.")
    ] = 1500,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON; progress on stderr.")
    ] = False,
) -> int:
    """Show a real vLLM engine loading what was computed before.

    Starts a daemon and vLLM engines of its own, sends the same prompts four times, and compares
    times and tokens, and the hit rate that the daemon shows with what the engines say. Takes about two minutes on two cores.
    """
    from kvstore.cli.child import interruptible
    from kvstore.cli.demo import report
    from kvstore.cli.demo.scenario import DemoSettings, run_demo
    from kvstore.cli.output import console, print_json, progress
    from kvstore.errors import ConfigError

    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("vllm: is not installed here; in a checkout, run `make demo`")
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"model: no checkpoint in {model}: give --model DIR; in a checkout, run `make demo`"
        )
    say = progress(to_stderr=as_json)
    with contextlib.ExitStack() as stack:
        stack.enter_context(interruptible())
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="kvstore-demo-", dir=directory, ignore_cleanup_errors=True
            )
        )
        settings = DemoSettings(
            model=model.absolute(),
            directory=Path(scratch),
            prompts=prompts,
            prompt_tokens=prompt_tokens,
        )
        result = run_demo(settings, say)
    problems = result.problems()
    if as_json:
        print_json(report.as_json(result))
    else:
        console().print(report.as_table(result))
        print(f"tokens identical: {'yes' if result.tokens_identical else 'no'}")
        for rates in result.hit_rates:
            print(rates)
        for problem in problems:
            print(f"problem: {problem}")
    return 1 if problems else 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)
