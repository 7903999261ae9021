"""Helpers beside the tests are imported by name; worlds are closed when a test is over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cuda_world import Make, World

from kvstore.connectors.vllm.cuda import pipe
from kvstore.connectors.vllm.cuda.routes import Route


@pytest.fixture
def make() -> Iterator[Make]:
    worlds: list[World] = []

    def one(route: Route, seed: int = 0, **options: Any) -> World:
        worlds.append(World(route, seed, **options))
        return worlds[-1]

    yield one
    for world in worlds:
        world.close()


@pytest.fixture(autouse=True)
def small_first_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "_FIRST_CHUNK_BYTES", 1)
    monkeypatch.setattr(pipe, "_FIRST_BATCH", 2)
