"""Slots as the engine has them → the contract's packed records."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from kvstore.wire import SLOT_DTYPE

if TYPE_CHECKING:
    from kvstore.engine.events import GenerationSlots

__all__ = ["pack_generation_slots"]


def pack_generation_slots(granted: GenerationSlots) -> bytes:
    """Return slots with their generations as the contract's 16-byte records."""
    slots = granted.slots
    packed = np.empty(len(slots), SLOT_DTYPE)
    flat = np.fromiter(itertools.chain.from_iterable(slots), np.uint32, 2 * len(slots))
    packed["group"] = flat[0::2]
    packed["index"] = flat[1::2]
    packed["generation"] = granted.generations
    return packed.tobytes()
