"""The import contract covers every module, so that a new one cannot escape it."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The package itself offers the client; `python -m kvstore` is the command line.
OUTSIDE_THE_TABLE = {"__init__", "__main__"}


def test_every_module_has_a_row() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    rows = {module for contract in contracts for module in contract["source_modules"]}
    modules = {
        f"kvstore.{path.stem}"
        for path in (ROOT / "kvstore").iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists())
        and path.stem not in OUTSIDE_THE_TABLE
    }
    assert modules == rows - {"kvstore"}


def test_every_row_forbids_every_module_it_may_not_import() -> None:
    """A module is either forbidden to a row or allowed on purpose: new ones are forbidden."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    first_row = next(c for c in contracts if c["name"].startswith("first row"))
    everything = {m for c in contracts for m in c["source_modules"]} - {"kvstore"}
    inside = set(first_row["source_modules"])
    assert everything - inside <= set(first_row["forbidden_modules"])
