"""The switch inside a running engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_store import FakeDaemon
from mini_engine import MiniEngine

from kvstore.connectors.vllm.control import Switch, set_enabled


def test_requests_that_arrive_while_it_is_off_are_neither_looked_up_nor_stored() -> None:
    daemon = FakeDaemon()
    engine = MiniEngine(daemon)
    on = True
    engine.scheduler._enabled = lambda: on
    engine.run(engine.add(list(range(32))))
    engine.settle()
    stored = len(daemon.blocks)
    assert stored
    on = False
    engine.run(engine.add(list(range(32))), engine.add(list(range(100, 132))))
    assert engine.loaded_tokens == 0
    assert len(daemon.blocks) == stored
    on = True
    engine.run(engine.add(list(range(32))))
    assert engine.loaded_tokens > 0
    engine.close()


def test_the_switch_is_found_from_the_engine_and_from_each_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    transfer = SimpleNamespace(engine_id="1b2/c")
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer))
    )
    ranks = [Switch("1b2/c"), Switch("1b2/c_dp1")]
    assert [rank.on() for rank in ranks] == [True, True]
    for _ in range(2):
        set_enabled(llm, False)
        assert [rank.on() for rank in ranks] == [False, False]
    assert Switch("another").on()
    for _ in range(2):
        set_enabled(llm.llm_engine.vllm_config, True)
        assert [rank.on() for rank in ranks] == [True, True]
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="without a KV connector"):
        set_enabled(SimpleNamespace(kv_transfer_config=None), False)
