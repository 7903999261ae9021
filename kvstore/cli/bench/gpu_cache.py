"""KV caches as engines lay them out, without an engine."""

from __future__ import annotations

import functools
import operator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.cli.bench.gpu_machine import Machine
from kvstore.cli.bench.gpu_plan import LAYERS, Case, Layout

__all__ = ["FakeCache"]

_POISON: Final = 0xA5


class FakeCache:
    """An engine's KV cache with room for the blocks of a case twice: to store from, to load into.

    Attributes:
        tensors: by layer, as engines register them.
        engine_blocks: blocks in it.
        sources: engine blocks to store from, in no order, shape (blocks, group_blocks).
        targets: engine blocks to load into, in no order, shape (blocks * group_blocks,).
    """

    def __init__(self, machine: Machine, case: Case) -> None:
        """Allocate it and fill it with random bytes."""
        count = case.blocks * case.group_blocks
        self._machine = machine
        piece = case.shard_bytes // case.group_blocks // LAYERS
        self.engine_blocks = 2 * count
        if case.layout is Layout.BLOCKS:
            whole = machine.cache(self.engine_blocks, LAYERS, piece)
            self.tensors = {f"layer {i}": whole[:, i] for i in range(LAYERS)}
            self._wholes = [whole]
        else:
            self._wholes = [machine.cache(self.engine_blocks, piece) for _ in range(LAYERS)]
            self.tensors = {f"layer {i}": whole for i, whole in enumerate(self._wholes)}
        for whole in self._wholes:
            machine.random(whole)
        machine.synchronize()
        order = np.random.default_rng(3).permutation(self.engine_blocks).astype(np.int32)
        self.sources: NDArray[np.int32] = order[:count].reshape(case.blocks, case.group_blocks)
        self.targets: NDArray[np.int32] = order[count:].copy()

    def _index(self, blocks: NDArray[np.int32]) -> Any:
        import torch

        return torch.as_tensor(blocks.astype(np.int64), device=self._wholes[0].device)

    def refresh(self) -> None:
        """Fill the sources with new random bytes."""
        index = self._index(self.sources.ravel())
        for whole in self._wholes:
            fresh = whole[index]
            self._machine.random(fresh)
            whole[index] = fresh
        self._machine.synchronize()

    def poison(self) -> None:
        """Overwrite the targets, so that what is not written cannot pass for right."""
        index = self._index(self.targets)
        for whole in self._wholes:
            whole[index] = _POISON
        self._machine.synchronize()

    def wrong_blocks(self) -> int:
        """Return in how many engine blocks sources and targets differ."""
        sources, targets = self._index(self.sources.ravel()), self._index(self.targets)
        wrong = [(whole[sources] != whole[targets]).flatten(1).any(1) for whole in self._wholes]
        return int(functools.reduce(operator.or_, wrong).sum())
