"""How copies are cut into pieces and chunks."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.connectors.vllm.cuda import pipe
from kvstore.connectors.vllm.cuda.routes import pieces


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(0, []), (1, [1]), (2, [2]), (7, [2, 4, 1]), (40, [2, 4, 8, 10, 10, 6])],
)
def test_a_ramp_doubles_up_to_the_most(count: int, sizes: list[int]) -> None:
    assert pipe._ramp(count, 2, 10) == sizes


def test_pieces_are_merged_only_where_both_sides_go_on_and_nothing_says_apart() -> None:
    device = np.array([0, 10, 20, 40, 50], np.uint64)
    packed = np.array([100, 110, 120, 130, 140], np.uint64)
    apart = np.array([1, 1, 2, 2, 2], np.int64)
    first, of, to, lengths = pieces(device, packed, apart, 10)
    assert first.tolist() == [0, 2, 3]
    assert of.tolist() == [0, 20, 40]
    assert to.tolist() == [100, 120, 130]
    assert lengths.tolist() == [20, 10, 20]
    first, *_ = pieces(device, packed, apart, 10, [0, 1, 4])
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert [len(column) for column in pieces(device[:0], packed[:0], apart[:0], 10)] == [0] * 4
