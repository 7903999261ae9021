"""How fast the engine computes, measured from its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["Pace"]

_WEIGHT: Final = 0.2
# Smaller steps are decode steps: their tokens per second say nothing about prefill.
_PREFILL_TOKENS: Final = 64


class Pace:
    """Moving averages of a step's time and of prefill tokens per second.

    Attributes:
        step_seconds: of a step with work; 0 until measured.
        tokens_per_second: of prefill; 0 until measured.
        busy: whether the last step had work.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet."""
        self._clock = clock
        self._begun: deque[tuple[float, int]] = deque(maxlen=16)
        self._ended = 0.0
        self.step_seconds = 0.0
        self.tokens_per_second = 0.0
        self.busy = False

    def begin(self, tokens: int) -> None:
        """A step of so many tokens has been scheduled."""
        self.busy = tokens > 0
        if tokens:
            self._begun.append((self._clock(), tokens))
        else:
            # Steps without work may end without notice; nothing else is in flight then.
            self._begun.clear()

    def end(self) -> None:
        """The oldest step's output has arrived. Steps may overlap (async scheduling)."""
        now = self._clock()
        if self._begun:
            begun, tokens = self._begun.popleft()
            seconds = max(now - max(begun, self._ended), 1e-6)
            self.step_seconds = self._mean(self.step_seconds, seconds)
            if tokens >= _PREFILL_TOKENS:
                self.tokens_per_second = self._mean(self.tokens_per_second, tokens / seconds)
        self._ended = now

    @staticmethod
    def _mean(old: float, new: float) -> float:
        return new if old == 0 else old + _WEIGHT * (new - old)

    def worth_a_step(self, tokens: int) -> bool:
        """Return whether computing so many tokens takes longer than waiting for a step."""
        if not self.busy or not self.tokens_per_second:
            return True
        return tokens / self.tokens_per_second > self.step_seconds
