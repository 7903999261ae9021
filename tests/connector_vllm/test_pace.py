"""How fast an engine takes itself for."""

from __future__ import annotations

import pytest

from kvstore.connectors.vllm.pace import Pace


class Engine:
    """Computes steps in as long as they take."""

    def __init__(self, *, step_seconds: float, tokens_per_second: float) -> None:
        self.now = 100.0
        self.pace = Pace(8192, lambda: self.now)
        self._step, self._rate = step_seconds, tokens_per_second

    def steps(self, *tokens: int) -> None:
        for count in tokens:
            self.pace.begin(count)
            self.now += self._step + count / self._rate
            self.pace.end()
            self.now += 0.01


def test_small_steps_do_not_speak_for_whole_prompts() -> None:
    engine = Engine(step_seconds=0.03, tokens_per_second=36_000)
    # Hits: the ends of prompts and decoding.
    engine.steps(16, 1, 130, 1, 63)
    assert (
        engine.pace.rate(130) == engine.pace.rate(63) == pytest.approx(130 / (0.03 + 130 / 36_000))
    )
    assert engine.pace.rate(10_000) == 0.0
    engine.steps(8192, *[100] * 50)
    # A prompt larger than a step is computed in the largest ones.
    whole = pytest.approx(8192 / (0.03 + 8192 / 36_000))
    assert engine.pace.rate(10_000) == whole
    assert engine.pace.rate(100_000) == whole
    assert engine.pace.rate(100) < 4_000


def test_an_engine_follows_what_it_is_now() -> None:
    engine = Engine(step_seconds=0.0, tokens_per_second=36_000)
    engine.steps(*[8192, 1] * 20)
    engine._rate = 9_000
    engine.steps(*[8192, 1] * 200)
    assert engine.pace.rate(8192) == pytest.approx(9_000, rel=0.05)
    engine._rate = 36_000
    engine.steps(*[8192] * 20)
    assert engine.pace.rate(8192) == pytest.approx(36_000, rel=0.05)


def test_a_step_that_others_take_is_not_waited_for_when_computing_is_shorter() -> None:
    engine = Engine(step_seconds=0.0, tokens_per_second=1_000)
    assert engine.pace.worth_a_step(1)
    engine.steps(1000, 1000)
    engine.pace.begin(1000)
    assert not engine.pace.worth_a_step(900)
    assert engine.pace.worth_a_step(1100)
