"""Loads that are reported before their bytes are there, as a GPU's copier does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_store import FakeDaemon
from mini_engine import MiniEngine

from kvstore.connectors.vllm.copier import CpuCopier, Patience, SlotRun
from kvstore.connectors.vllm.guard import Unsafe

TOKENS = list(range(48))


class EarlyCopier(CpuCopier):
    """Copies at once, reports at once, and lands when it is told to, or is waited for."""

    right = True
    idle_seen: list[bool]
    landing: list[Callable[[bool], None]]

    def load(
        self,
        blocks: Any,
        run: SlotRun,
        skip: int,
        done: Callable[[Any], None],
        landed: Callable[[bool], None] | None = None,
        *,
        idle: bool = False,
    ) -> bool:
        self.idle_seen.append(idle)
        assert self._load(blocks, run, skip, Patience()).all()
        done(np.ones(len(blocks), np.bool_))
        if landed is None:
            return False
        self.landing.append(landed)
        return True

    def settle(self) -> None:
        while self.landing:
            self.landing.pop()(self.right)


def early(engine: MiniEngine) -> list[EarlyCopier]:
    copiers = []
    for rank in engine.ranks:
        copier: Any = rank.worker._copier
        copier.__class__ = EarlyCopier
        copier.idle_seen, copier.landing = [], []
        copiers.append(copier)
    return copiers


def filled(**options: Any) -> tuple[FakeDaemon, MiniEngine]:
    daemon = FakeDaemon()
    first = MiniEngine(daemon, **options)
    first.run(first.add(TOKENS))
    first.settle()
    first.close()
    return daemon, MiniEngine(daemon, **options)


@pytest.mark.parametrize("shards", [1, 2])
def test_slots_stay_leased_until_every_rank_has_its_bytes(shards: int) -> None:
    daemon, engine = filled(shards=shards)
    copiers = early(engine)
    request = engine.add(TOKENS)
    while not copiers[0].landing:
        engine.step()
    assert copiers[0].idle_seen == [True]
    # The engine was told; the request may go on; the slots are still read.
    assert request.request_id in engine.received
    assert len(daemon.leases) == 1
    assert engine.top.has_pending_push_work()
    for copier in copiers[1:]:
        copier.settle()
    if shards > 1:
        engine.top.update_connector_output(_report(engine.ranks[1].worker.report()))
        assert len(daemon.leases) == 1
    engine.run(request)
    assert not daemon.leases
    engine.close()


def test_a_step_passes_nothing_on_before_the_loads_it_rests_on_have_landed() -> None:
    _, engine = filled()
    (copier,) = early(engine)
    request = engine.add(TOKENS)
    while not copier.landing:
        engine.step()
    # The request is computed in the next step, which waits.
    engine.step()
    assert not copier.landing
    engine.run(request)
    engine.close()


def test_slots_taken_back_after_all_stop_the_engine_instead_of_giving_a_wrong_token() -> None:
    _, engine = filled()
    (copier,) = early(engine)
    copier.right = False
    engine.add(TOKENS)
    with pytest.raises(Unsafe, match="taken back"):
        engine.run()
    engine.close()


def test_early_loads_can_be_turned_off() -> None:
    _, engine = filled()
    (copier,) = early(engine)
    engine.ranks[0].worker._early_loads = False
    copier.right = False
    engine.run(engine.add(TOKENS))
    assert copier.idle_seen
    assert engine.loaded_tokens
    assert not copier.landing
    engine.close()


def _report(report: Any) -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(
        finished_recving=(), invalid_block_ids=set(), kv_connector_worker_meta=report
    )
