"""Engines with one connector or another: their settings, their environment, their helpers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.cli.child import Child, ChildDaemon

ENGINE = Path(__file__).with_name("engine.py")

_GIB = 1 << 30

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
# Small, but with weights under which every token depends on the whole prefix: see `random_model`.
SMALL: dict[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(slots=True)
class Mode:
    """One way to run the engine.

    Attributes:
        name: what to call it.
        connector: none, native, native_fs, lmcache, lmcache_disk, pegaflow or ours.
        serve: further options of our daemon; only for ours.
        extra: further connector settings; only for ours.
        files: where a peer may keep files.
        checked: whether `checked` watches; only for ours.
    """

    name: str
    connector: str
    serve: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    files: Path = Path("/nonexistent")
    checked: bool = False


class Host:
    """Host memory and files that outlive an engine: our daemon, a peer's server, directories."""

    def __init__(self, mode: Mode, directory: Path, pool_bytes: int) -> None:
        """Start the daemon or the server that the mode needs."""
        self.mode = mode
        self.directory = directory / mode.name
        self.directory.mkdir(parents=True, exist_ok=True)
        self._pool = pool_bytes
        self.daemon: ChildDaemon | None = None
        self._server: Child | None = None
        if mode.connector == "ours":
            self.start_daemon()
        if mode.connector == "pegaflow":
            command = [sys.executable, "-m", "pegaflow._server", "--devices", "0"]
            command += ["--pool-size", f"{pool_bytes // _GIB}gb"]
            self._server = Child("pegaflow", command, self.directory / "server.log")

    @property
    def account(self) -> Path:
        """Where `checked` writes what it has found."""
        return self.directory / "checked.json"

    def start_daemon(self) -> None:
        """Start our daemon, on what an earlier one has left."""
        options = ["--host-pool", str(self._pool), *self.mode.serve]
        self.daemon = ChildDaemon(self.directory, options)

    def transfer(self) -> dict[str, Any] | None:
        """Return the KV transfer configuration."""
        both = {"kv_role": "kv_both"}
        match self.mode.connector:
            case "none":
                return None
            case "native":
                extra: dict[str, Any] = {"cpu_bytes_to_use": self._pool}
                name = "OffloadingConnector"
            case "native_fs":
                files = self.mode.files
                files.mkdir(parents=True, exist_ok=True)
                extra = {
                    "cpu_bytes_to_use": self._pool,
                    "spec_name": "TieringOffloadingSpec",
                    "secondary_tiers": [{"type": "fs", "root_dir": str(files)}],
                }
                name = "OffloadingConnector"
            case "lmcache" | "lmcache_disk":
                return {"kv_connector": "LMCacheConnectorV1", **both}
            case "pegaflow":
                return {
                    "kv_connector": "PegaKVConnector",
                    "kv_connector_module_path": "pegaflow.connector",
                    **both,
                }
            case _:
                assert self.daemon is not None
                extra = {"target": self.daemon.address, **self.mode.extra}
                name, module = "KVStoreConnector", "kvstore.connectors.vllm"
                if self.mode.checked:
                    name, module = "CheckedConnector", "checked"
                return {
                    "kv_connector": name,
                    "kv_connector_module_path": module,
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": extra,
                    **both,
                }
        return {"kv_connector": name, "kv_connector_extra_config": extra, **both}

    def environment(self) -> dict[str, str]:
        """Return the variables that the engine needs."""
        common = {
            "PYTHONHASHSEED": "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if self.mode.checked:
            common["KVSTORE_CHECKED"] = str(self.account)
            paths = [str(ENGINE.parent), os.environ.get("PYTHONPATH", "")]
            common["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if self.mode.connector.startswith("lmcache"):
            common |= {
                "LMCACHE_CHUNK_SIZE": "256",
                "LMCACHE_USE_EXPERIMENTAL": "True",
                "LMCACHE_LOCAL_CPU": "True",
                "LMCACHE_MAX_LOCAL_CPU_SIZE": str(self._pool / _GIB),
            }
        if self.mode.connector == "lmcache_disk":
            files = self.mode.files
            files.mkdir(parents=True, exist_ok=True)
            common |= {
                "LMCACHE_LOCAL_DISK": f"file://{files}/",
                "LMCACHE_MAX_LOCAL_DISK_SIZE": str(3 * self._pool / _GIB),
            }
        return common

    def close(self) -> None:
        """Stop what it has started, and remove its files."""
        if self.daemon is not None:
            self.daemon.stop()
        if self._server is not None:
            self._server.stop(timeout_s=10)
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.mode.files, ignore_errors=True)


def start(
    host: Host, model: Path, engine: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[Child, dict[str, Any]]:
    """Start an engine's process; it begins to load when it is sent the settings returned."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    settings = {
        "vocabulary": vocabulary,
        "transfer": host.transfer(),
        "engine": {"model": str(model), **engine},
    }
    child = Child(
        host.mode.name,
        [sys.executable, str(ENGINE)],
        host.directory.parent / f"{host.mode.name}.log",
        {**host.environment(), **environment},
    )
    return child, settings


def write_config(model: Path, config: Mapping[str, Any]) -> None:
    """Write a model that has no weights: they are made up when it is loaded."""
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))


def random_model(model: Path, config: Mapping[str, Any], deviation: float = 0.05) -> None:
    """Write a model with random weights.

    vLLM's own dummy weights are so small that attention adds nothing to the result: whatever is
    loaded, the tokens are the same. These are large enough for every token to depend on the
    whole prefix.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    write_config(model, config)
    torch.manual_seed(1)
    values = {key: value for key, value in config.items() if key != "architectures"}
    made = LlamaForCausalLM(LlamaConfig(**values, initializer_range=deviation))
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in made.state_dict().items()
    }
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def gpu_used_mib() -> int:
    """Return how much memory of the first GPU is in use."""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[0])


def kill(child: Child) -> None:
    """End an engine at once, its workers included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, 9)
    child.kill()
