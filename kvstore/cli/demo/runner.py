"""The engine's process: a real vLLM engine driven by JSON lines.

Runs as ``python -m kvstore.cli.demo.runner``. The first line on standard input configures it,
each further line is a request, each answer is one line on standard output. The engine's own
output goes to standard error. End of input ends the process.

Requests:
    {"text": str, "tokens": int}                 → {"prompt": [int, …]}
    {"prompt": [int, …], "max_tokens": int}      → {"ttft_s", "tokens", "cached_tokens",
                                                     "page_faults"}

A request may name `"ahead"`, prompts that are handed to the engine just before it.

The time to the first token runs from handing the prompt to the engine to the step that returns
the first token, in the engine's own process: no HTTP, no tokenizer.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

__all__ = ["main"]


def _transfer_config(target: str) -> dict[str, Any] | None:
    """Return the connector's configuration; None for an engine without kvstore."""
    if not target:
        return None
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # A first prompt may come before the daemon has answered: it is to be counted nevertheless.
        "kv_connector_extra_config": {"target": target, "answer_seconds": 10},
    }


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class _Engine:
    """One vLLM engine, with the kvstore connector if there is a target."""

    def __init__(self, settings: dict[str, Any]) -> None:
        # Imported here: it takes seconds, and standard output must be redirected before.
        from vllm import LLM, SamplingParams

        self._sampling: Callable[..., Any] = SamplingParams
        self._llm: Any = LLM(
            model=settings["model"],
            dtype="float32",  # bf16 rounds by batch shape, and cold and warm differ in shape
            enforce_eager=True,
            max_model_len=settings["max_model_len"],
            max_num_seqs=4,
            max_num_batched_tokens=settings.get("step_tokens"),
            block_size=settings["block_size"],
            enable_prefix_caching=False,  # "warm" must mean kvstore
            prefix_caching_hash_algo="sha256_cbor",
            kv_transfer_config=_transfer_config(settings["target"]),
        )
        self._count = 0

    def encode(self, text: str, tokens: int) -> dict[str, Any]:
        """Return the first `tokens` token ids of `text`."""
        prompt = self._llm.get_tokenizer().encode(text)
        if len(prompt) < tokens:
            raise ValueError(f"the text has {len(prompt)} tokens, {tokens} are needed")
        return {"prompt": list(prompt[:tokens])}

    def generate(
        self, prompt: list[int], max_tokens: int, ahead: Sequence[list[int]] = ()
    ) -> dict[str, Any]:
        """Run one request, alone or behind others, greedily."""
        engine = self._llm.llm_engine
        self._count += 1
        name = f"demo-{self._count}"
        parameters = self._sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        faults = _page_faults()
        begin = time.perf_counter()
        for i, other in enumerate(ahead):
            engine.add_request(f"{name}-ahead-{i}", {"prompt_token_ids": other}, parameters)
        engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        ttft_s, last = None, None
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not output.request_id.startswith(name) or "-ahead-" in output.request_id:
                    continue
                if ttft_s is None and output.outputs and output.outputs[0].token_ids:
                    ttft_s = time.perf_counter() - begin
                    faults = _page_faults() - faults
                last = output
        if ttft_s is None or last is None:
            raise RuntimeError("the engine finished without a token")
        return {
            "ttft_s": ttft_s,
            "tokens": list(last.outputs[0].token_ids),
            "cached_tokens": last.num_cached_tokens or 0,
            "page_faults": faults,
        }


def _serve(answers: IO[str]) -> None:
    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    settings = sys.stdin.readline()
    if not settings:
        return
    engine = _Engine(json.loads(settings))
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "text" in request:
                answer(engine.encode(**request))
            else:
                answer(engine.generate(**request))
        except (ValueError, RuntimeError, TypeError, KeyError) as e:
            answer({"error": f"{type(e).__name__}: {e}"})


def main() -> None:
    """Serve requests until standard input ends."""
    # vLLM prints to standard output: keep the real one for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _serve(answers)
    # An engine's orderly shutdown takes seconds and has nothing to save.
    os._exit(0)


if __name__ == "__main__":
    main()
