"""Turns the connector off and on inside a running engine, for comparisons in one process's life.

A file named after the engine says "off". It holds for requests that arrive from then on: they are
neither looked up nor stored. What was stored before stays.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any, Final

__all__ = ["Switch", "set_enabled"]

# vLLM tells the ranks of one engine apart so.
_RANK: Final = re.compile(r"_dp\d+$")


class Switch:
    """The file of one engine."""

    def __init__(self, engine_id: str) -> None:
        """Know the file's name."""
        name = re.sub(r"[^\w-]", "_", _RANK.sub("", engine_id))
        self.path = Path(tempfile.gettempdir()) / f"kvstore-{os.getuid()}-off-{name}"
        self._path = str(self.path)

    def on(self) -> bool:
        """Return whether the connector is to be used. Takes 2 µs."""
        return not os.path.lexists(self._path)

    def set(self, on: bool) -> None:
        """Turn the connector on or off."""
        if on:
            self.path.unlink(missing_ok=True)
        else:
            self.path.touch(mode=0o600)


def set_enabled(llm: Any, on: bool) -> None:
    """Turn an engine's connector on or off, for requests that arrive from now on.

    Args:
        llm: vLLM's `LLM` or `LLMEngine`, or its configuration.
        on: whether to use the connector.

    Raises:
        ValueError: the engine runs without a connector.
    """
    engine = getattr(llm, "llm_engine", llm)
    config = getattr(engine, "vllm_config", engine)
    transfer = getattr(config, "kv_transfer_config", None)
    if transfer is None or not transfer.engine_id:
        raise ValueError("llm: runs without a KV connector")
    Switch(str(transfer.engine_id)).set(on)
