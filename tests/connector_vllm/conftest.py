"""These tests need vLLM's Python package; those marked `vllm` also run its engine."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("vllm") is None:
    # Said aloud: pytest shows warnings in its summary.
    warnings.warn("tests/connector_vllm is left out: vllm is not installed", stacklevel=1)
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        # Importing vLLM and PyTorch warns about their own use of deprecated things.
        warnings.simplefilter("ignore")
        import kvstore.connectors.vllm.connector  # noqa: F401
