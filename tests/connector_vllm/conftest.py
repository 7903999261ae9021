"""These tests need vLLM's Python package; those marked `vllm` also run its engine."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

_THERE = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if _THERE else ["test_*.py"]

if _THERE:
    with warnings.catch_warnings():
        # Importing vLLM and PyTorch warns about their own use of deprecated things.
        warnings.simplefilter("ignore")
        import kvstore.connectors.vllm.connector  # noqa: F401


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Nothing is left out silently."""
    if not _THERE:
        terminalreporter.write_line("tests/connector_vllm was left out: vllm is not installed")
