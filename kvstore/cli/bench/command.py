"""The `bench` command."""

from __future__ import annotations

import typer

__all__ = ["register"]


def bench() -> int:
    return 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench")(bench)
