"""What watches every block's bytes: it must see what is wrong, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

BLOCKS, VALUES = 6, 8


def _account(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {"steps": 0}
    return found


def test_bytes_that_differ_from_the_first_of_their_key_are_seen(
    scripts: Any, tmp_path: Path, until: Callable[..., None]
) -> None:
    module = scripts("oracle")
    cache = [torch.rand(BLOCKS, VALUES, dtype=torch.float32) for _ in range(3)]
    out = tmp_path / "account.json"
    oracle = module.Oracle(cache, 4, out)

    def used(*blocks: tuple[int, bytes, str]) -> list[Any]:
        return [
            module.Used("r", index, block, key, made)
            for index, (block, key, made) in enumerate(blocks)
        ]

    oracle.look(1, used((0, b"a", "P"), (1, b"b", "P")))
    for part in cache:
        part[4], part[5] = part[0], part[1]
    # The same bytes in other blocks are right.
    oracle.look(2, used((4, b"a", "L"), (5, b"b", "D")))
    cache[1][5, 3] += 0.5
    oracle.look(3, used((4, b"a", "L"), (5, b"b", "L")))
    # The same again is one finding; two more keys fill the room, a fifth is not looked at.
    oracle.look(4, used((5, b"b", "L"), (2, b"c", "P"), (3, b"d", "P"), (0, b"e", "P")))
    until(lambda: _account(out)["steps"] == 4)
    found = _account(out)
    assert (found["comparisons"], found["distinct"]) == (9, 4)
    # What was loaded with other bytes than those computed is nobody's.
    assert (found["versions"], found["loaded"], found["foreign"]) == (0, 2, 1)
    assert found["blocks"] == {"P:L": 2, "P:D": 1}
    assert found["differing"] == found["roots"] == {"P:L": 1}
    example, foreign = found["examples"]
    assert foreign["foreign"]["block"] == 5
    assert (example["block"], example["index"], example["root"]) == (5, 1, True)
    assert example["differing_values"] == [0, 1, 0]
    assert example["largest_difference"] == [0.0, 0.5, 0.0]


def test_what_follows_a_block_that_differs_is_no_root(
    scripts: Any, tmp_path: Path, until: Callable[..., None]
) -> None:
    module = scripts("oracle")
    cache = [torch.zeros(BLOCKS, VALUES, dtype=torch.bfloat16)]
    out = tmp_path / "account.json"
    oracle = module.Oracle(cache, 8, out)
    first = [module.Used("one", i, i, bytes([i]), "P") for i in range(3)]
    oracle.look(1, first)
    cache[0][4:] = 1.0
    other = [
        module.Used("two", i, block, bytes([i]), "PD") for i, block in ((0, 0), (1, 4), (2, 5))
    ]
    oracle.look(2, other)
    until(lambda: _account(out)["steps"] == 2)
    found = _account(out)
    assert found["differing"] == {"P:DP": 2} or found["differing"] == {"P:PD": 2}
    assert list(found["roots"].values()) == [1]
    assert (found["versions"], found["loaded"]) == (2, 0)
