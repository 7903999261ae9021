"""Keys: the chained prefix hashes that name blocks.

``key[0] = H(tag ‖ salt)`` is the root and names no block; ``key[i] = H(key[i-1] ‖ tokens[i])``
with the block's tokens as little-endian unsigned 32-bit integers. A key therefore covers every
token before it, the salt, and nothing else: what else must agree is the space's business
(`kvstore.space`). The result is the same in every process, whatever PYTHONHASHSEED is.

``xxh3-128`` (default) is fast and not collision-resistant against an adversary: tenants that do
not trust each other use ``sha256``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NewType, overload

import numpy as np
import xxhash

from kvstore.errors import InvalidRequest

__all__ = ["HASH_ALGORITHMS", "KEY_BYTES", "Key", "Keys", "chain_keys", "root_key"]

# A NewType so that a packed run of keys is never passed where one key is meant.
Key = NewType("Key", bytes)

_TAG: Final = b"kvstore.chain.v1\x00"


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


HASH_ALGORITHMS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "xxh3-128": xxhash.xxh3_128_digest,
    "sha256": _sha256,
}
KEY_BYTES: Final = {"xxh3-128": 16, "sha256": 32}


class Keys(Sequence[bytes]):
    """A run of keys in chain order, packed, that remembers the key before its first one.

    Slicing keeps the chain: ``chain[64:128].parent == chain[63]``, so that a long chain can be
    stored or read a piece at a time without naming parents by hand.

    Attributes:
        packed: the keys' bytes, one after the other.
        key_bytes: length of one key, 16 or 32.
        parent: the key before the first one; None when the first one starts a chain.
        root: the first one is known to start a chain, so that nothing that hangs on something is
            taken for it.
    """

    __slots__ = ("key_bytes", "packed", "parent", "root")

    def __init__(
        self, packed: bytes, key_bytes: int, parent: bytes | None = None, *, root: bool = False
    ) -> None:
        """Wrap packed keys.

        Raises:
            InvalidRequest: the length is not a whole number of keys, or a size is not allowed.
        """
        if key_bytes not in (16, 32):
            raise InvalidRequest("key_bytes", f"must be 16 or 32, not {key_bytes}")
        if len(packed) % key_bytes:
            raise InvalidRequest(
                "keys", f"{len(packed)} bytes are not a whole number of {key_bytes}-byte keys"
            )
        if parent is not None and len(parent) != key_bytes:
            raise InvalidRequest("parent", f"has {len(parent)} bytes, keys have {key_bytes}")
        self.packed = packed
        self.key_bytes = key_bytes
        self.parent = parent
        self.root = root and parent is None

    @classmethod
    def of(cls, keys: Keys | Iterable[bytes], key_bytes: int) -> Keys:
        """Return ``keys`` as Keys, checking that each has ``key_bytes`` bytes.

        Raises:
            InvalidRequest: a key has another length.
        """
        if isinstance(keys, Keys):
            if keys.key_bytes != key_bytes:
                raise InvalidRequest(
                    "keys", f"have {keys.key_bytes} bytes, the space's have {key_bytes}"
                )
            return keys
        if isinstance(keys, bytes | bytearray | memoryview):
            raise InvalidRequest("keys", "pass a sequence of keys or Keys(packed, key_bytes)")
        listed = list(keys)
        for i, key in enumerate(listed):
            if len(key) != key_bytes:
                raise InvalidRequest(
                    "keys", f"key {i} has {len(key)} bytes, the space's have {key_bytes}"
                )
        return cls(b"".join(listed), key_bytes)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.packed) // self.key_bytes

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Keys: ...
    def __getitem__(self, index: int | slice) -> bytes | Keys:
        """Return one key, or a contiguous run that remembers its parent."""
        size = self.key_bytes
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise InvalidRequest("keys", "a run of keys is contiguous: slice with step 1")
            parent = self.parent if start == 0 else self[start - 1]
            packed = self.packed[start * size : max(start, stop) * size]
            return Keys(packed, size, parent, root=self.root and start == 0)
        count = len(self)
        if index < 0:
            index += count
        if not 0 <= index < count:
            raise IndexError(index)
        return self.packed[index * size : (index + 1) * size]

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over single keys."""
        size, packed = self.key_bytes, self.packed
        for at in range(0, len(packed), size):
            yield packed[at : at + size]

    def __eq__(self, other: object) -> bool:
        """Compare the keys themselves; the parent follows from them."""
        if isinstance(other, Keys):
            return self.packed == other.packed and self.key_bytes == other.key_bytes
        if isinstance(other, Sequence) and not isinstance(other, bytes | str):
            return list(self) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        """Hash the packed bytes."""
        return hash(self.packed)

    def __repr__(self) -> str:
        """Show the count and the ends."""
        ends = f" {self[0].hex()[:8]}…{self[-1].hex()[:8]}" if len(self) else ""
        return f"<Keys {len(self)}×{self.key_bytes}B{ends}>"


def root_key(salt: bytes = b"", algorithm: str = "xxh3-128") -> bytes:
    """Return ``H(tag ‖ salt)``, the value that a chain's first key is hashed over.

    Raises:
        InvalidRequest: the algorithm is unknown.
    """
    if algorithm not in HASH_ALGORITHMS:
        known = ", ".join(HASH_ALGORITHMS)
        raise InvalidRequest("algorithm", f"{algorithm!r} is not one of {known}")
    return HASH_ALGORITHMS[algorithm](_TAG + salt)


def _token_array(tokens: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return tokens as little-endian uint32, refusing what does not fit."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise InvalidRequest("tokens", f"must be one-dimensional, not {array.ndim}")
    if array.size == 0:
        return array.astype("<u4")
    if array.dtype.kind not in "iu":
        raise InvalidRequest("tokens", f"must be integers, not {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) >= 1 << 32:
        raise InvalidRequest("tokens", "must be within 0 … 2**32 - 1")
    return array.astype("<u4")


def chain_keys(
    tokens: Sequence[int] | np.ndarray[Any, Any],
    block_tokens: int,
    salt: bytes = b"",
    algorithm: str = "xxh3-128",
) -> Keys:
    """Return one key per FULL block of ``block_tokens`` tokens.

    Args:
        tokens: token ids, each within 0 … 2**32 - 1; any integer dtype, shape (n,).
        block_tokens: tokens per block, at least 1.
        salt: separates chains of equal tokens (LoRA, images, user).
        algorithm: ``xxh3-128`` (16-byte keys) or ``sha256`` (32-byte keys).

    Returns:
        ``n // block_tokens`` keys; a shorter tail has none.

    Raises:
        InvalidRequest: an argument is out of range.
    """
    if block_tokens < 1:
        raise InvalidRequest("block_tokens", f"must be at least 1, not {block_tokens}")
    key = root_key(salt, algorithm)
    digest = HASH_ALGORITHMS[algorithm]
    data = _token_array(tokens).tobytes()
    stride = 4 * block_tokens
    out = bytearray()
    for at in range(0, len(data) - stride + 1, stride):
        key = digest(key + data[at : at + stride])
        out += key
    return Keys(bytes(out), KEY_BYTES[algorithm], root=True)
