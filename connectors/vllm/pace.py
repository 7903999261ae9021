"""How fast the engine computes, measured from its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstore.rates import Rates

__all__ = ["Pace"]

_WEIGHT: Final = 0.2
# Smaller steps are decode steps: their tokens per second say nothing about prefill.
_PREFILL_TOKENS: Final = 64
# A step of a quarter of the tokens still tells how fast they are computed.
_NEAR_CLASSES: Final = 2


class Pace:
    """Moving averages of a step's time, and of prefill tokens per second by the step's size.

    Attributes:
        step_seconds: of a step with work; 0 until measured.
        busy: whether the last step had work.
    """

    def __init__(self, step_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet.

        Args:
            step_tokens: most tokens of a step.
            clock: seconds.
        """
        self._clock = clock
        self._step_tokens = step_tokens
        self._begun: deque[tuple[float, int]] = deque(maxlen=16)
        self._ended = 0.0
        self._rates = Rates()
        self.step_seconds = 0.0
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
            old = self.step_seconds
            self.step_seconds = old + _WEIGHT * (seconds - old) if old else seconds
            self.computed(tokens, seconds)
        self._ended = now

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens has taken so long."""
        if tokens >= _PREFILL_TOKENS:
            self._rates.note(tokens, tokens / seconds)

    def rate(self, tokens: int) -> float:
        """Return tokens per second with which so many are computed; 0 while that is not known.

        The ends of prompts whose beginnings were loaded are small steps, and small steps are slow
        for what they compute: whole prompts are not judged by them.
        """
        return self._rates.rate(min(tokens, self._step_tokens), within=_NEAR_CLASSES)

    def worth_a_step(self, tokens: int) -> bool:
        """Return whether computing so many tokens takes longer than waiting for a step."""
        rate = self.rate(tokens)
        if not self.busy or not rate:
            return True
        return tokens / rate > self.step_seconds
