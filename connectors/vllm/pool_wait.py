"""Memory that is there before an engine on a GPU serves.

Making shared memory and pinning it for a GPU disturb an engine: both keep kernel and driver busy, and
every launch waits while a range is being pinned. So neither is done while prompts are computed, as far
as that can be helped:

1. When the KV cache is registered the worker knows what a stored block looks like, and asks the daemon
   for memory of that shape (`MakeRoom`). The engine has 10 to 30 s of other things to do then. The
   space is opened much later, by the scheduler's half; its blocks find the memory made.
2. Slabs are pinned as they are announced, several at once.
3. The engine asks for the worker's handshake when it is about to serve. `wait` comes back when all is
   made, announced and pinned, or when its time is up. What is left then is pinned slowly (`cuda.pins`),
   and made by a daemon that gives way.

All workers ask for the same; it is made once. Whatever fails costs time at worst: a daemon that is not
there, or goes away meanwhile, is not waited for, and a pool that gets no memory is taken as it is. The
stages of a pipeline hold different numbers of layers: each works out the others' from what vLLM says of
the model (`EngineShape.shard_bytes`), and does not ask where its own KV cache is not what follows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvstore.connectors.vllm.guard import log_once
from kvstore.connectors.vllm.store import Attachment
from kvstore.errors import InvalidRequest, KVStoreError, NotImplementedByServer
from kvstore.units import format_bytes

if TYPE_CHECKING:
    from kvstore.connectors.vllm.cuda.pins import SlabPins

__all__ = ["PoolWait"]

# Should it take longer to attach, the daemon is asked when the engine is about to serve.
_ATTACH_SECONDS: Final = 5.0
# How often the daemon is asked how far it is.
_ASK_AGAIN_SECONDS: Final = 0.05
# How long announcements and pins are waited for before the daemon is asked again: groups may go.
_LOOK_AGAIN_SECONDS: Final = 0.5
# Ranges that are being pinned when the time is up take a few hundredths of it as a rule.
_SETTLE_SECONDS: Final = 2.0


class PoolWait:
    """Has memory made and pinned for one worker, and waits for it."""

    def __init__(
        self,
        attachment: Attachment,
        shard_bytes: Sequence[int],
        pins: SlabPins,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Ask for nothing yet.

        Args:
            attachment: of this process.
            shard_bytes: of a stored block; empty: not known.
            pins: pins this process's slabs.
            seconds: how long to wait at most; 0: memory is made when it is needed.
            clock: seconds.
            pause: waits some seconds.
        """
        self._attachment = attachment
        self._shard_bytes = tuple(shard_bytes) if seconds > 0 else ()
        self._pins = pins
        self._seconds = seconds
        self._clock = clock
        self._pause = pause
        # What the daemon said last, if it did.
        self._room: Any = None

    def ask(self) -> None:
        """Have the daemon begin, should it be there; on a thread of its own."""
        if self._shard_bytes:
            threading.Thread(target=self._ask, name="kvstore-ask", daemon=True).start()

    def _ask(self) -> None:
        # Whose memory cannot be mapped from here need make none for this.
        if self._attachment.wait_active(_ATTACH_SECONDS):
            self._attachment.make_room(self._shard_bytes)

    def wait(self) -> None:
        """Wait until memory is made and pinned; from then on the engine serves."""
        began = self._clock()
        if self._seconds > 0 and self._attachment.alive:
            whole = self._wait(began + self._seconds)
            self._tell(self._clock() - began, whole=whole)
        self._pins.serving()
        self._pins.settled(_SETTLE_SECONDS)

    def _wait(self, until: float) -> bool:
        """Return whether everything is there that can be."""
        attachment = self._attachment
        while attachment.alive:
            left = max(0.0, until - self._clock())
            groups: Sequence[int] = ()
            known = over = True
            if self._shard_bytes:
                try:
                    room = attachment.make_room(self._shard_bytes).result(left)
                except (InvalidRequest, NotImplementedByServer) as error:
                    # It is too small for a block, or older than this: what it has is pinned all the same.
                    log_once(logging.DEBUG, "memory is not made ahead of need: %s", error)
                except (KVStoreError, TimeoutError):
                    known = False
                else:
                    self._room = room
                    groups, over = room.groups, room.made_bytes >= room.expected_bytes
            if known:
                patience = min(left, _LOOK_AGAIN_SECONDS)
                # Of an attachment that has ended nothing is left to fill.
                if attachment.wait_filled(patience, groups) and over and attachment.alive:
                    return True
            if self._clock() >= until:
                return False
            self._pause(min(left, _ASK_AGAIN_SECONDS))
        return False

    def _tell(self, seconds: float, *, whole: bool) -> None:
        made, room = "", self._room
        if room is not None:
            made = f"{format_bytes(room.made_bytes)} made, "
            if room.made_bytes < room.expected_bytes:
                made = (
                    f"{format_bytes(room.made_bytes)} of {format_bytes(room.expected_bytes)} made, "
                )
        pinned = f"{format_bytes(self._pins.pinned_bytes)} pinned by this worker"
        level, rest = logging.INFO, ""
        if not whole:
            level, rest = logging.WARNING, "; the daemon went away"
            if self._attachment.alive:
                rest = "; until the rest is, too, loads and stores are slower"
        log_once(level, "waited %.1f s for host memory: %s%s%s", seconds, made, pinned, rest)
