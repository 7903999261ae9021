"""A vLLM engine in a process of its own, asked for one prompt at a time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.cli.child import Child
from kvstore.cli.demo.corpus import text
from kvstore.units import format_seconds

__all__ = ["ALLOCATOR", "Answer", "EngineChild", "Narrate"]

_START_TIMEOUT_S: Final = 300.0
_REQUEST_TIMEOUT_S: Final = 120.0

Narrate = Callable[[str], None]

# An engine on a CPU takes and gives back hundreds of megabytes in every step. Whether glibc keeps
# them depends on what happens to lie at the end of its heap: of two processes that do the same, one
# faults in 130,000 pages a step, and is 40 % slower, for as long as it lives. Both sides of a
# comparison keep what they were given.
ALLOCATOR: Final[Mapping[str, str]] = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request came to.

    Attributes:
        ttft_s: seconds from handing it to the engine to its first token.
        cached_tokens: tokens of the prompt that were not computed.
        tokens: generated.
        page_faults: of the engine's process until the first token, those without I/O.
    """

    ttft_s: float
    cached_tokens: int
    tokens: list[int]
    page_faults: int


class EngineChild:
    """An engine's process."""

    def __init__(
        self,
        name: str,
        *,
        model: Path,
        directory: Path,
        target: str,
        max_model_len: int,
        block_tokens: int,
        say: Narrate,
        step_tokens: int | None = None,
    ) -> None:
        """Start it and wait until it takes prompts.

        Args:
            name: for messages and its log.
            model: directory of the checkpoint.
            directory: takes its log.
            target: the daemon's address; empty: an engine without kvstore.
            max_model_len: most tokens of a request.
            block_tokens: the engine's block size.
            say: takes lines about what is going on.
            step_tokens: most tokens that it computes in a step; None: vLLM's default.

        Raises:
            ChildError: it does not come up.
        """
        say(f"starting {name}: vLLM with {model.name} …")
        begin = time.monotonic()
        cores = len(os.sched_getaffinity(0))
        self._child = Child(
            name,
            [sys.executable, "-m", "kvstore.cli.demo.runner"],
            directory / f"{name.replace(' ', '-')}.log",
            {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                # With `auto` the thread count, and with it rounding, depends on the connector.
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                **ALLOCATOR,
            },
        )
        try:
            self._child.ask(
                {
                    "model": str(model),
                    "target": target,
                    "max_model_len": max_model_len,
                    "block_size": block_tokens,
                    "step_tokens": step_tokens,
                },
                _START_TIMEOUT_S,
            )
        except BaseException:
            self.stop()
            raise
        say(f"  ready after {format_seconds(time.monotonic() - begin)}")

    def stop(self) -> None:
        """End it as an engine ends that is killed: nothing is saved, nothing is said."""
        self._child.kill()

    def encode(self, number: int, tokens: int) -> list[int]:
        """Return the first tokens of a text of the corpus."""
        request = {"text": text(number, tokens), "tokens": tokens}
        prompt: list[int] = self._child.ask(request, _REQUEST_TIMEOUT_S)["prompt"]
        return prompt

    def generate(
        self, prompt: list[int], max_tokens: int, ahead: Sequence[list[int]] = ()
    ) -> Answer:
        """Run one request alone, or right behind others: `ahead`."""
        request = {"prompt": prompt, "max_tokens": max_tokens, "ahead": list(ahead)}
        return Answer(**self._child.ask(request, _REQUEST_TIMEOUT_S))
