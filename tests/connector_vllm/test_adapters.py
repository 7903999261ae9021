"""Engines with LoRA adapters: each has a space of its own."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_store import FakeDaemon
from mini_engine import BLOCK, MiniEngine

from kvstore.connectors.vllm import views
from kvstore.connectors.vllm.settings import Settings

B = BLOCK * 2


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(250), k=length)


def adapter(directory: Path, number: int) -> Any:
    path = directory / str(number)
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(bytes([number]) * 99)
    return SimpleNamespace(lora_name=f"a{number}", lora_int_id=number, lora_path=str(path))


def test_what_an_adapter_needs_no_longer_is_given_back_while_others_compute(tmp_path: Path) -> None:
    """Slots that are reserved hold nothing: the pool would be as good as smaller."""
    settings = Settings(step_wait_seconds=0.0, idle_credit_bytes=0)
    engine = MiniEngine(FakeDaemon(slots=256), blocks=128, settings=settings)
    engine.add(prompt(B, 0), 400)
    for number in range(1, 5):
        engine.finish(engine.add(prompt(6 * B + 1, number), lora=adapter(tmp_path, number)))
    for _ in range(50):
        engine.step()
    base, *rest = engine.scheduler._views.all()[::-1]
    assert len(rest) == 4
    assert base.credits is not None
    assert base.credits.available
    assert not any(view.credits is not None and view.credits.available for view in rest)
    engine.close()


def test_the_view_that_is_not_used_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "_MOST_VIEWS", 3)
    engine = MiniEngine(FakeDaemon())
    for number in range(1, 6):
        engine.run(engine.add(prompt(B, 0)))
        engine.run(engine.add(prompt(B, number), lora=adapter(tmp_path, number)))
    kept = [view.spec.weights_version for view in engine.scheduler._views.all()]
    assert kept[-2] == "1"
    assert len(kept) == 3
    engine.close()


def test_an_adapter_whose_files_change_is_neither_loaded_nor_stored(tmp_path: Path) -> None:
    daemon = FakeDaemon()
    first = MiniEngine(daemon)
    first.run(first.add(prompt(4 * B, 1), lora=adapter(tmp_path, 1)))
    first.settle()
    (tmp_path / "1" / "adapter_model.safetensors").write_bytes(b"other" * 99)
    planned = first.planned
    for seed in (1, 2):
        first.run(first.add(prompt(4 * B, seed), lora=_as_it_is(tmp_path)))
    assert (first.loaded_tokens, first.planned) == (0, planned)
    first.close()
    # Started afterwards, an engine knows only what is there now.
    second = MiniEngine(daemon)
    second.run(second.add(prompt(4 * B, 1), lora=_as_it_is(tmp_path)))
    assert not second.loaded_tokens
    assert second.planned
    second.close()


def _as_it_is(directory: Path) -> Any:
    return SimpleNamespace(lora_name="a1", lora_int_id=1, lora_path=str(directory / "1"))
