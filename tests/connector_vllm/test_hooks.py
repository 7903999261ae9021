"""The shell around the halves: nothing is raised into the engine, whatever is broken."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_store import DAEMONS, FakeClient, FakeDaemon
from mini_engine import MiniEngine, Shell
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvstore.connectors.vllm import KVStoreConnector, guard
from kvstore.connectors.vllm.metadata import StepMeta
from kvstore.connectors.vllm.worker_side import WorkerSide


class Broken:
    """Every method fails."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(name)

        return fail


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    guard.failures.clear()
    yield
    guard.failures.clear()


REQUEST = SimpleNamespace(request_id="r", block_hashes=[], num_tokens=1, num_prompt_tokens=1)
OUTPUT = SimpleNamespace(finished_recving={"x"}, invalid_block_ids={1})

HOOKS: list[tuple[str, tuple[Any, ...], Any]] = [
    ("on_new_request", (REQUEST,), None),
    ("get_num_new_matched_tokens", (REQUEST, 0), (0, False)),
    ("update_state_after_alloc", (REQUEST, None, 0), None),
    ("get_external_cache_hit_sources", (REQUEST, 5), {}),
    ("update_connector_output", (OUTPUT,), None),
    ("request_finished", (REQUEST, []), (False, None)),
    ("request_finished_all_groups", (REQUEST, ([],)), (False, None)),
    ("has_pending_push_work", (), False),
    ("set_xfer_handshake_metadata", ({},), None),
    ("set_xfer_handshake_metadata_pp_aware", ({},), None),
    ("register_kv_caches", ({},), None),
    ("register_cross_layers_kv_cache", (torch.zeros(1), None), None),
    ("get_handshake_metadata", (), None),
    ("handle_preemptions", (StepMeta(1),), None),
    ("handle_preemptions", ({"ids", "as in 0.26"},), None),
    ("bind_connector_metadata", (StepMeta(1),), None),
    ("start_load_kv", (None,), None),
    ("wait_for_layer_load", ("l",), None),
    ("save_kv_layer", ("l", None, None), None),
    ("wait_for_save", (), None),
    ("get_finished", (set(),), (None, None)),
    ("get_block_ids_with_load_errors", (), set()),
    ("build_connector_worker_meta", (), None),
    ("get_kv_connector_stats", (), None),
    ("shutdown", (), None),
]


@pytest.mark.parametrize("half", [None, Broken()])
@pytest.mark.parametrize(("hook", "arguments", "answer"), HOOKS)
def test_no_hook_raises(hook: str, arguments: tuple[Any, ...], answer: Any, half: Any) -> None:
    connector = Shell(half, half)
    connector._kv_cache_config = SimpleNamespace(num_blocks=4)
    connector._vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={})
    )
    assert getattr(connector, hook)(*arguments) == answer
    meta = connector.build_connector_meta(None)
    assert isinstance(meta, StepMeta)
    assert not meta.loads


def test_a_broken_half_is_counted() -> None:
    Shell(Broken(), None).get_num_new_matched_tokens(REQUEST, 0)  # type: ignore[arg-type]
    assert guard.failures["get_num_new_matched_tokens"] == 1


def test_a_promised_load_that_cannot_be_planned_is_reported_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the engine would wait for it for ever."""
    daemon = FakeDaemon()
    engine = MiniEngine(daemon)
    tokens = list(range(64))
    engine.run(engine.add(tokens, 1))
    broken = guard.guarded(lambda: None)(lambda *_: 1 / 0)
    monkeypatch.setattr(engine.scheduler, "_plan_load", broken)
    engine.run(engine.add(tokens, 1), steps=300)
    assert engine.loaded_tokens == 64  # promised once, computed in the end
    engine.close()


def test_every_abstract_hook_is_there() -> None:
    assert issubclass(KVStoreConnector, KVConnectorBase_V1)
    assert issubclass(KVStoreConnector, SupportsHMA)
    assert not KVStoreConnector.__abstractmethods__
    assert "kv_cache_config" in KVStoreConnector.__init__.__code__.co_varnames[:4]


def test_the_plugin_makes_the_name_known() -> None:
    load = EntryPoint("kvstore", "kvstore.connectors.vllm.plugin:register", "vllm.general_plugins")
    register = load.load()
    register()
    register()
    found = KVConnectorFactory.get_connector_class_by_name("KVStoreConnector")
    assert found is KVStoreConnector


def test_another_device_is_refused_in_one_line() -> None:
    DAEMONS["mini"] = FakeDaemon()
    engine = MiniEngine(DAEMONS["mini"])
    worker = WorkerSide(engine.shape, FakeClient("mini"), tensor_rank=0, pipeline_rank=0)
    worker.register({"l": SimpleNamespace(device=SimpleNamespace(type="xpu"))}, 4, "")
    info = worker.introduce()
    assert "xpu" in info.refusal
    engine.scheduler.set_workers([info])
    engine.run(engine.add(list(range(64)), 1))
    assert not engine.daemon.blocks
    engine.close()
    worker.close()


def test_a_wrong_setting_leaves_the_engine_without_a_cache() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    transfer = SimpleNamespace(kv_connector_extra_config={"tennant": "a"}, is_kv_producer=True)
    config = SimpleNamespace(kv_transfer_config=transfer)
    connector = KVStoreConnector(config, KVConnectorRole.SCHEDULER, None)
    assert connector.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    assert any("tennant" in line for line in guard._said)
    assert not guard.failures
