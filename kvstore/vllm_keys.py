"""The keys that vLLM has for a prompt, computed without vLLM.

vLLM hashes an engine block's tokens together with the hash before it; kvstore's connector names a
block by the hash of the last engine block in it. Everything that the keys depend on is in the
space: ``hash_algorithm`` is ``vllm-<function>/<engine block's tokens>``, ``root_seed`` the hash
that chains start from. What a request adds (an adapter, images, a cache salt) is not: these keys
are those of plain text.

Source: vllm/v1/core/kv_cache_utils.py, `hash_block_tokens`, and vllm/utils/hashing.py.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from kvstore.errors import InvalidRequest
from kvstore.keys import Keys
from kvstore.space import SpaceSpec

__all__ = ["has_vllm_keys", "vllm_keys"]

_ALGORITHM: Final = re.compile(r"vllm-(\w+)/([1-9][0-9]*)")
# CBOR (RFC 8949): major types of unsigned integers, bytes, arrays; the simple value.
_UNSIGNED, _BYTES, _ARRAY = 0x00, 0x40, 0x80
_NULL: Final = b"\xf6"


def _head(major: int, value: int) -> bytes:
    """Return an item's first bytes, as short as they can be: the canonical form."""
    if value < 24:
        return bytes((major | value,))
    extra, size = next(it for it in ((24, 1), (25, 2), (26, 4)) if value < 1 << (8 * it[1]))
    return bytes((major | extra,)) + value.to_bytes(size, "big")


def _cbor(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Encode ``(parent, tokens, None)``."""
    parts = [_head(_ARRAY, 3), _head(_BYTES, len(parent)), parent, _head(_ARRAY, len(tokens))]
    parts += [_head(_UNSIGNED, token) for token in tokens]
    parts.append(_NULL)
    return b"".join(parts)


def _pickle(parent: bytes, tokens: Sequence[int]) -> bytes:
    return pickle.dumps((parent, tuple(tokens), None), protocol=pickle.HIGHEST_PROTOCOL)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_FUNCTIONS: Final[
    dict[str, tuple[Callable[[bytes, Sequence[int]], bytes], Callable[[bytes], bytes]]]
] = {
    "sha256_cbor": (_cbor, _sha256),
    "sha256": (_pickle, _sha256),
    "xxhash_cbor": (_cbor, xxhash.xxh3_128_digest),
    "xxhash": (_pickle, xxhash.xxh3_128_digest),
}


def _parsed(spec: SpaceSpec) -> tuple[str, int, bytes] | None:
    """Return a space's function, its engine block's tokens, and the root; None: not vLLM's."""
    match = _ALGORITHM.fullmatch(spec.hash_algorithm)
    if match is None or match[1] not in _FUNCTIONS or spec.block_tokens % int(match[2]):
        return None
    try:
        root = bytes.fromhex(spec.root_seed)
    except ValueError:
        return None
    return (match[1], int(match[2]), root) if len(root) == spec.key_bytes else None


def has_vllm_keys(spec: SpaceSpec) -> bool:
    """Return whether a space's keys are vLLM's, and known how to be computed."""
    return _parsed(spec) is not None


def vllm_keys(tokens: Sequence[int], spec: SpaceSpec) -> Keys:
    """Return a key per whole block of a prompt.

    Args:
        tokens: the prompt's.
        spec: of a space that `has_vllm_keys`.

    Raises:
        InvalidRequest: the space has other keys, or a number is no token id.
    """
    parsed = _parsed(spec)
    if parsed is None:
        raise InvalidRequest("hash_algorithm", f"{spec.hash_algorithm!r}: not vLLM's, or not known")
    if tokens and not 0 <= min(tokens) <= max(tokens) < 1 << 32:
        raise InvalidRequest("tokens", "must be within 0 … 2**32 - 1")
    function, unit, parent = parsed
    encode, digest = _FUNCTIONS[function]
    per_block = spec.block_tokens // unit
    keys = []
    whole = len(tokens) // spec.block_tokens * per_block
    for at in range(whole):
        parent = digest(encode(parent, tokens[at * unit : (at + 1) * unit]))
        if (at + 1) % per_block == 0:
            keys.append(parent)
    return Keys(b"".join(keys), spec.key_bytes, root=True)
