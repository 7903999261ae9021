"""What a step must not leave out although a store of it cannot begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_store import FakeDaemon
from mini_engine import MiniEngine

from kvstore.connectors.vllm.guard import Unsafe


def test_stores_are_waited_for_though_a_late_one_cannot_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hook's failure is swallowed and the engine writes: stores would take what it writes."""
    engine = MiniEngine(FakeDaemon(), delayed_stores=True)
    worker = engine.ranks[0].worker
    assert worker is not None
    reused: list[Any] = []
    monkeypatch.setattr(worker._copier, "reuse", reused.append)
    monkeypatch.setattr(worker, "_store", lambda store: 1 / 0)
    monkeypatch.setattr(worker, "_delayed", [object()])
    blocks = np.array([3], np.int32)
    meta: Any = SimpleNamespace(step=1000, idle=False, handed_out=blocks)
    with pytest.raises(ZeroDivisionError):
        worker.prepare(meta)
    assert reused == [blocks]
    monkeypatch.undo()
    engine.close()


def test_loads_reported_early_are_settled_though_a_store_cannot_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = MiniEngine(FakeDaemon())
    worker = engine.ranks[0].worker
    assert worker is not None

    def settle() -> None:
        worker._unsafe = True

    monkeypatch.setattr(worker._copier, "settle", settle)
    monkeypatch.setattr(worker, "_store", lambda store: 1 / 0)
    monkeypatch.setattr(worker, "_unsettled", True)
    meta: Any = SimpleNamespace(step=1000, idle=False, stores=[object()])
    monkeypatch.setattr(worker, "_meta", meta)
    with pytest.raises(Unsafe):
        worker.finish()
    worker._unsafe = False
    monkeypatch.undo()
    engine.close()
