"""How fast an engine takes itself for."""

from __future__ import annotations

import pytest

from kvstore.connectors.vllm.pace import Pace


class Engine:
    """Computes steps in as long as they take."""

    def __init__(self, *, step_seconds: float, tokens_per_second: float) -> None:
        self.now = 100.0
        self.pace = Pace(lambda: self.now)
        self._step, self._rate = step_seconds, tokens_per_second

    def steps(self, *tokens: int) -> float:
        """Compute steps; return the rate that is known then."""
        for count in tokens:
            self.pace.begin(count)
            self.now += self._step + count / self._rate
            self.pace.end()
            self.now += 0.01
        return self.pace.tokens_per_second


def test_what_a_step_costs_whatever_it_computes_is_not_taken_for_the_tokens() -> None:
    engine = Engine(step_seconds=0.02, tokens_per_second=36_000)
    # Hits: the ends of prompts and decoding. By itself the largest says 5,200 tokens a second.
    assert engine.steps(16, 1, 130, 1, 20, 1) == pytest.approx(36_000)
    assert engine.steps(8192, 1808, 1, 1) == pytest.approx(36_000)


def test_steps_of_one_size_are_taken_for_what_they_cost() -> None:
    engine = Engine(step_seconds=0.02, tokens_per_second=10_000)
    assert engine.steps(1, 1, 2, 1, 16) == 0
    engine = Engine(step_seconds=0.02, tokens_per_second=10_000)
    assert engine.steps(1000, 1000, 1000) == pytest.approx(1000 / 0.12)


def test_an_engine_follows_what_it_is_now() -> None:
    engine = Engine(step_seconds=0.02, tokens_per_second=36_000)
    engine.steps(*[8192, 1] * 20)
    engine._rate = 9_000
    assert engine.steps(*[8192, 1] * 60) == pytest.approx(9_000, rel=0.05)


def test_an_engine_that_has_only_loaded_takes_itself_for_fast_on_a_gpu() -> None:
    engine = Engine(step_seconds=0.02, tokens_per_second=2_000)
    engine.steps(1, 1, 1)
    assert engine.pace.rate(on_gpu=False) == 0
    assert engine.pace.rate(on_gpu=True) > 10_000
    engine.steps(500, 1)
    assert engine.pace.rate(on_gpu=True) == pytest.approx(2_000)
