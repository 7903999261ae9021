"""The measuring scripts as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "gpu"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that imports a script as its neighbours do."""
    monkeypatch.syspath_prepend(str(_SCRIPTS))
    known = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - known:
        if name in {path.stem for path in _SCRIPTS.glob("*.py")}:
            del sys.modules[name]
