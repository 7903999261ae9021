"""Prompts that the engine has in its own prefix cache cost nothing."""

from __future__ import annotations

from typing import Any

import pytest
from fake_store import FakeDaemon
from mini_engine import MiniEngine

TOKENS = list(range(64))


@pytest.mark.parametrize("loaded", [False, True])
def test_the_answer_is_not_waited_for_and_nothing_is_stored_again(
    loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = FakeDaemon()
    engine = MiniEngine(daemon, local=True)
    engine.run(engine.add(TOKENS))
    engine.settle()
    if loaded:
        # What another engine has stored.
        engine.close()
        engine = MiniEngine(daemon, local=True)
        engine.run(engine.add(TOKENS))
        assert engine.loaded_tokens
    planned, waited = engine.planned, []
    arrived = engine.scheduler._arrived

    def wait(*arguments: Any) -> Any:
        waited.append(arguments)
        return arrived(*arguments)

    monkeypatch.setattr(engine.scheduler, "_arrived", wait)
    again = engine.add([*TOKENS, 1, 2, 3])
    engine.run(again)
    assert not waited
    assert engine.planned == planned
    # A prompt that goes on is asked for as ever.
    engine.run(engine.add([*TOKENS, *range(200, 232)]))
    assert waited
    assert not daemon.leases
    engine.close()
