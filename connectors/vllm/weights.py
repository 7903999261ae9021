"""A name for the weights that an engine runs, so that other weights never share its blocks.

Sampled, not read: the files' names and sizes, the head of each (where safetensors keep the shapes
of their tensors), a page of every tensor, and pages spread over the rest. Training changes nearly every
page of the tensors that it changes, so a sample tells a fine-tune from its base, though it changed one
small tensor; some megabytes are read whatever the model's size. Other rows in an embedding, for a
few tokens, can go unnoticed: for those there is `weights_version`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvstore.connectors.vllm.guard import log_once

__all__ = ["Adapters", "draft_identity", "model_identity"]

_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_HEAD_BYTES: Final = 64 << 10
_PAGE_BYTES: Final = 4096
_PAGES: Final = 64
# A longer list of tensors is not one.
_MOST_HEADER_BYTES: Final = 100 << 20
# Differ between processes that run the same weights.
_IGNORED: Final = {"transformers_version", "_name_or_path", "_commit_hash", "architectures"}
# Named in the configuration of models whose KV depends on the longest context that vLLM was
# started for: long or short factors for all positions, tuned temperatures.
_DEPEND_ON_LENGTH: Final = (
    '"longrope"',
    '"long_factor"',
    '"rope_type": "dynamic"',
    '"type": "dynamic"',
    '"llama4',
)
# How images and the like become what a model reads; hashes of blocks name the images alone.
_PROCESSORS: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# Scales what an adapter adds.
_ADAPTER_CONFIG: Final = "adapter_config.json"
# Adapters that are remembered; one takes some 500 bytes.
_MOST_ADAPTERS: Final = 1 << 16


def _sample(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for page in range(_PAGES):
            file.seek(size * page // _PAGES)
            digest.update(file.read(_PAGE_BYTES))
        for middle in _middles(file, path) if path.suffix == ".safetensors" else ():
            file.seek(middle)
            digest.update(file.read(_PAGE_BYTES))


def _middles(file: BinaryIO, path: Path) -> list[int]:
    """Return where the middle of each tensor is in a safetensors file; none if it is no such file."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > _MOST_HEADER_BYTES:
        return []
    try:
        tensors = json.loads(file.read(length))
        tensors.pop("__metadata__", None)
        return sorted(8 + length + sum(t["data_offsets"]) // 2 for t in tensors.values())
    except (ValueError, LookupError, TypeError, AttributeError):
        log_once(logging.WARNING, "%s does not begin like a safetensors file", path)
        return []


def _sampled(directory: Path, *others: str) -> str:
    """Return a digest of the weights in a directory, and of other files; "" without weights."""
    files = sorted(p for p in directory.iterdir() if p.suffix in _SUFFIXES and p.is_file())
    digest = hashlib.sha256()
    for path in files:
        _sample(digest, path)
    for path in (directory / name for name in others):
        if path.is_file():
            _sample(digest, path)
    return digest.hexdigest()[:32] if files else ""


def _checkpoint(model: str, revision: str | None, file: str = "config.json") -> Path | None:
    """Return where the model's files are on this machine, without fetching anything."""
    local = Path(model).expanduser()
    if local.exists():
        return local
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, file, revision=revision)
    except ValueError:  # not the name of a repository
        return None
    return Path(found).parent if isinstance(found, str | os.PathLike) else None


def model_identity(
    model_config: Any, load_config: Any, weights_version: str = ""
) -> tuple[str, str]:
    """Return the model's name and what names its weights and configuration.

    Args:
        model_config: vLLM's.
        load_config: likewise.
        weights_version: names the weights; "" samples the checkpoint's files.

    Returns:
        The second is "" when the weights have no name and cannot be found on this machine.
    """
    model = str(model_config.model)
    path = _checkpoint(model, getattr(model_config, "revision", None))
    name = path.name if path is not None and Path(model).exists() else model
    load_format = str(getattr(load_config, "load_format", "auto"))
    if weights_version:
        weights = weights_version
    elif load_format.endswith("dummy"):
        weights = f"dummy-{getattr(model_config, 'seed', 0)}"
    elif path is None:
        return name, ""
    elif path.is_file():
        digest = hashlib.sha256()
        _sample(digest, path)
        weights = digest.hexdigest()[:32]
    else:
        weights = _sampled(path, *_PROCESSORS)
    if not weights:
        return name, ""
    return name, f"{weights}-{_configuration(model_config)}"


def draft_identity(vllm_config: Any) -> str:
    """Return what names the weights of a draft model, whose KV lies in the same blocks; "" for none.

    Also "" where they are the model's own, or cannot be found: `weights_version` tells those apart.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    model = getattr(draft, "model", None)
    if not model or str(model) == str(vllm_config.model_config.model):
        return ""
    return model_identity(draft, getattr(vllm_config, "load_config", None))[1]


def _configuration(model_config: Any) -> str:
    """Return a digest of what changes KV values besides weights: rope, quantization, image sizes."""
    config = getattr(model_config, "hf_config", None)
    fields = config.to_dict() if config is not None else {}
    kept = {key: value for key, value in fields.items() if key not in _IGNORED}
    kept["kvstore.dtype"] = str(getattr(model_config, "dtype", ""))
    kept["kvstore.quantization"] = str(getattr(model_config, "quantization", None))
    inputs = getattr(model_config, "multimodal_config", None)
    for option in ("mm_processor_kwargs", "video_pruning_rate"):
        kept[f"kvstore.{option}"] = getattr(inputs, option, None)
    text = json.dumps(kept, sort_keys=True, default=str)
    if any(word in text for word in _DEPEND_ON_LENGTH):
        # What was asked for, too: the model is built before a length that fits is found.
        lengths = [
            getattr(model_config, name, None)
            for name in ("max_model_len", "original_max_model_len")
        ]
        text = f"{text} {lengths}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Adapters:
    """Names the LoRA adapters of one engine; vLLM's hashes cover name and path only.

    Two engines may have given one name to different adapters, so the files are sampled: once, because
    the engine reads them once. When they change afterwards, it may go on with what it has read, or
    read them again after it had to drop the adapter: then nobody knows what its KV is of.
    """

    def __init__(self) -> None:
        """Know none."""
        # By number, name and path: what names it, and what its files looked like then.
        self._known: dict[tuple[int, str, str], tuple[str, tuple[Any, ...]]] = {}

    def identity(self, lora_request: Any) -> str | None:
        """Return what names an adapter, "" for none; None when its blocks must not be shared."""
        if lora_request is None:
            return ""
        name = str(getattr(lora_request, "lora_name", ""))
        path = str(getattr(lora_request, "lora_path", ""))
        directory = _checkpoint(path, None, _ADAPTER_CONFIG)
        looks = _looks(directory)
        key = (int(getattr(lora_request, "lora_int_id", 0)), name, path)
        known = self._known.get(key)
        files = _sampled(directory, _ADAPTER_CONFIG) if looks and not known and directory else ""
        if files:
            known = self._known[key] = f"lora {name} {files}", looks
            if len(self._known) > _MOST_ADAPTERS:
                del self._known[next(iter(self._known))]
        if getattr(lora_request, "load_inplace", False):
            why = "it is loaded in place"
        elif known is None or not looks:
            why = f"no weights are found at {path}"
        elif known[1] != looks:
            why = f"files in {path} have changed since it was first used; use another path"
        else:
            return known[0]
        log_once(
            logging.WARNING, "the blocks of adapter %s are neither loaded nor stored: %s", name, why
        )
        return None


def _looks(directory: Path | None) -> tuple[Any, ...]:
    """Return what changes when an adapter's files are written; () without any."""
    if directory is None:
        return ()
    try:
        with os.scandir(directory) as entries:
            wanted = (*_SUFFIXES, _ADAPTER_CONFIG)
            found = [(e.name, e.stat()) for e in entries if e.name.endswith(wanted)]
    except OSError:
        return ()
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found))
