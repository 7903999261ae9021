"""A runtime of which a single call fails."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fake_cuda import COMPUTE, FakeCuda

from kvstore.cudart import CudaError

# What is called while copies are under way, when a copier is made, and when it is closed.
UNDER_WAY = (
    "set_device",
    "relax_capture",
    "stream_wait_event",
    "stream_synchronize",
    "event_create",
    "event_record",
    "event_synchronize",
    "launch",
)
MADE = ("malloc", "host_alloc", "stream_create", "event_create", "launch")
GIVEN_BACK = ("free", "host_free", "stream_destroy", "event_destroy", "stream_synchronize")


@dataclass
class Failing:
    """Lets one call fail, counted from `arm` on. It does nothing then."""

    cuda: FakeCuda
    names: tuple[str, ...]
    left: int = -1
    failed: str = ""
    guard: Any = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for name in self.names:
            setattr(self.cuda, name, self._wrap(name, getattr(self.cuda, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def maybe(*arguments: Any, **options: Any) -> Any:
            if name == "launch" and arguments[0] == COMPUTE:
                return call(*arguments, **options)  # the engine's own work
            with self.guard:
                fail, self.left = not self.left, self.left - 1
                if fail:
                    self.failed = name
            if fail:
                raise CudaError(700, f"{name}: made to fail (700)")
            return call(*arguments, **options)

        return maybe

    def arm(self, nth: int) -> None:
        self.left, self.failed = nth, ""

    def disarm(self) -> str:
        """Return what has failed."""
        self.left = -1
        return self.failed
