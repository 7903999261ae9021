"""Starts real vLLM engines on the CPU, small and repeatable."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODEL = os.environ.get("KVSTORE_TEST_MODEL", str(ROOT / ".cache" / "smollm2-fp32"))

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Another number of threads is another order of additions.
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


# A busy machine delays what is not under test: an answer of the daemon, a read of the disk.
PATIENT = {"answer_seconds": 60, "disk_wait_seconds": 60}


def transfer_config(extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": PATIENT | extra,
    }


def make_engine(extra: dict[str, Any], **options: Any) -> Any:
    """Return a vllm.LLM. In this process, if VLLM_ENABLE_V1_MULTIPROCESSING is 0."""
    os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
    from vllm import LLM

    chosen: dict[str, Any] = {
        "model": MODEL,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "prefix_caching_hash_algo": "sha256_cbor",
    }
    return LLM(**chosen | options, kv_transfer_config=transfer_config(extra))


def prompt(length: int, seed: int) -> dict[str, Any]:
    """Return a prompt of random tokens; these make every position's choice sharp enough."""
    return {"prompt_token_ids": random.Random(seed).choices(range(1000, 40000), k=length)}


def generate(llm: Any, *prompts: dict[str, Any], tokens: int = 8) -> list[Any]:
    """Return vLLM's outputs, greedily sampled."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    outputs: list[Any] = llm.generate(list(prompts), sampling, use_tqdm=False)
    return outputs


def chosen(outputs: list[Any]) -> list[list[int]]:
    """Return the tokens of each output."""
    return [list(output.outputs[0].token_ids) for output in outputs]
