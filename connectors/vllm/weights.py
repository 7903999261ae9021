"""A name for the weights that an engine runs, so that other weights never share its blocks.

Sampled, not read: the files' names and sizes, the head of each (where safetensors keep the shapes
of their tensors), and pages spread over the rest. A fine-tune changes nearly every page, so a
sample tells it from its base; a few megabytes are read whatever the model's size.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

__all__ = ["adapter_identity", "model_identity"]

_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_HEAD_BYTES: Final = 64 << 10
_PAGE_BYTES: Final = 4096
_PAGES: Final = 64
# Differ between processes that run the same weights.
_IGNORED: Final = {"transformers_version", "_name_or_path", "_commit_hash", "architectures"}


def _sample(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for page in range(_PAGES):
            file.seek(size * page // _PAGES)
            digest.update(file.read(_PAGE_BYTES))


def _sampled(directory: Path) -> str:
    """Return a digest of the weights in a directory; "" when there are none."""
    files = sorted(p for p in directory.iterdir() if p.suffix in _SUFFIXES and p.is_file())
    digest = hashlib.sha256()
    for path in files:
        _sample(digest, path)
    return digest.hexdigest()[:32] if files else ""


def _checkpoint(model: str, revision: str | None) -> Path | None:
    """Return where the model's files are on this machine, without fetching anything."""
    local = Path(model)
    if local.exists():
        return local
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # not the name of a repository
        return None
    return Path(found).parent if isinstance(found, str | os.PathLike) else None


def model_identity(model_config: Any, load_config: Any) -> tuple[str, str]:
    """Return the model's name and what names its weights and configuration.

    The second is "" when the weights cannot be found on this machine.
    """
    model = str(model_config.model)
    path = _checkpoint(model, getattr(model_config, "revision", None))
    name = path.name if path is not None and Path(model).exists() else model
    load_format = str(getattr(load_config, "load_format", "auto"))
    if load_format.endswith("dummy"):
        weights = f"dummy-{getattr(model_config, 'seed', 0)}"
    elif path is None:
        return name, ""
    elif path.is_file():
        digest = hashlib.sha256()
        _sample(digest, path)
        weights = digest.hexdigest()[:32]
    else:
        weights = _sampled(path)
    if not weights:
        return name, ""
    return name, f"{weights}-{_configuration(model_config)}"


def _configuration(model_config: Any) -> str:
    """Return a digest of what changes KV values besides weights: rope, window, quantization."""
    config = getattr(model_config, "hf_config", None)
    fields = config.to_dict() if config is not None else {}
    kept = {key: value for key, value in fields.items() if key not in _IGNORED}
    kept["kvstore.dtype"] = str(getattr(model_config, "dtype", ""))
    kept["kvstore.quantization"] = str(getattr(model_config, "quantization", None))
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def adapter_identity(lora_request: Any) -> str:
    """Return what names a LoRA adapter; vLLM's hashes cover its name only.

    Two engines may have given one name to different adapters, so its files are sampled too.
    """
    if lora_request is None:
        return ""
    name = str(getattr(lora_request, "lora_name", ""))
    path = Path(str(getattr(lora_request, "lora_path", "")))
    files = _sampled(path) if path.is_dir() else f"at {path}"
    return f"lora {name} {files}"
