"""How fast the engine computes, measured from its steps.

A step takes some time whatever it computes, and more for each token. Only the latter is saved by loading
a prefix, so it is what counts: a step of a hundred tokens says 4,000 tokens a second of a GPU that
computes 36,000 in a second. Both are found by a line through recent steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["Pace"]

_WEIGHT: Final = 0.2
# What a step says fades with each later one.
_DECAY: Final = 0.95
# Of an engine on a GPU that has computed nothing yet: an 8B model on one fast GPU.
_ASSUMED_TOKENS_PER_SECOND: Final = 40_000.0
# Standard deviation of steps' tokens below which no line is drawn.
_LEAST_SPREAD: Final = 32.0
# Then steps of so many tokens are taken for what they cost in all.
_PREFILL_TOKENS: Final = 64


class Pace:
    """A moving average of a step's time, and prefill tokens per second.

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
        # Sums over steps: their number, tokens, seconds, tokens squared, tokens times seconds.
        self._sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)
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
            self._learn(tokens, seconds)
        self._ended = now

    def _learn(self, tokens: int, seconds: float) -> None:
        step = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(_DECAY * old + new for old, new in zip(self._sums, step, strict=True))
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        if spread > (n * _LEAST_SPREAD) ** 2:
            slope = (n * xy - x * y) / spread
            if slope > 0:
                self.tokens_per_second = 1 / slope
        elif tokens >= _PREFILL_TOKENS:
            self.tokens_per_second = self._mean(self.tokens_per_second, tokens / seconds)

    @staticmethod
    def _mean(old: float, new: float) -> float:
        return new if old == 0 else old + _WEIGHT * (new - old)

    def rate(self, *, on_gpu: bool) -> float:
        """Return prefill tokens per second; 0 if nothing is known.

        An engine that has loaded everything so far does not know. On a GPU it takes itself for fast:
        if that is wrong, one prompt is computed that could have come from disk, and then it knows.
        The other way round it would wait for a slow disk for ever.
        """
        return self.tokens_per_second or (_ASSUMED_TOKENS_PER_SECOND if on_gpu else 0.0)

    def worth_a_step(self, tokens: int) -> bool:
        """Return whether computing so many tokens takes longer than waiting for a step."""
        if not self.busy or not self.tokens_per_second:
            return True
        return tokens / self.tokens_per_second > self.step_seconds
