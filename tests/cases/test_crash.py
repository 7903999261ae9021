"""Stories of what ended a process: lengths that nobody had tried."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from told_blocks import bytes_of, spec_of

from kvstore import Client, chain_keys

B = 4


@pytest.mark.parametrize("mapped", [True, False])
def test_lengths_around_a_block(daemon: Any, mapped: bool) -> None:
    """Prompts of 0, 1, B-1, B, B+1 and k*B tokens; then the same again, all of it cached."""
    with Client(daemon.address, map_memory=mapped) as client:
        space = client.open_space(spec_of())
        for turn in range(2):
            for length in (0, 1, B - 1, B, B + 1, 3 * B - 1, 3 * B, 3 * B + 1, 16 * B):
                tokens = list(range(1000 * length, 1000 * length + length))
                keys, blocks = chain_keys(tokens, B), bytes_of(tokens)
                assert len(keys) == length // B
                assert space.lookup(keys).blocks == turn * len(keys)
                assert space.put(keys, blocks) == len(keys)
                assert space.lookup(keys).blocks == len(keys)
                assert np.array_equal(space.get(keys), blocks)
