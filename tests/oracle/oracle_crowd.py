"""Client processes that are going to be killed or stopped while they hold leases and grants."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
from oracle_daemon import forking
from oracle_model import SPECS

from kvstore import Client, Keys
from kvstore.memory import copy_batch

__all__ = ["Victim"]

_SECONDS = 60.0


def _hold(address: str, space: int, keys: Keys, count: int, write: bool, told: Any) -> None:
    """Hold a lease on `keys` and `count` slots, half written, until killed."""
    client = Client(address, name="victim", timeout_s=_SECONDS)
    opened = client.open_space(SPECS[space])
    assert client.attachment.wait_active(_SECONDS)
    lease = opened.acquire(keys, deadline_s=0.05).result(_SECONDS)
    grant = opened.reserve(count, protect=keys[:1]).result(_SECONDS)
    if write and len(grant.slots):
        junk = np.full(1 << 16, 0xBD, np.uint8)
        with client.attachment.using(
            grant.slots, boot_id=grant.boot_id, writer_id=grant.owner_id
        ) as held:
            sources = np.full(len(grant.slots), junk.ctypes.data, np.uint64)
            copy_batch(held.addresses(0), sources, junk.size)
    told.send((lease.blocks, len(grant.slots)))
    while True:
        signal.pause()


class Victim:
    """A process that holds what it was given, until it is ended.

    Attributes:
        leased, granted: blocks of its lease at first, slots of its grant.
    """

    def __init__(self, address: str, space: int, keys: Keys, count: int, *, write: bool) -> None:
        """Start it; returns when it holds them."""
        context = forking()
        ours, theirs = context.Pipe(duplex=False)
        arguments = (address, space, keys, count, write, theirs)
        self._process = context.Process(target=_hold, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        assert ours.poll(2 * _SECONDS), "the victim got no answer"
        self.leased, self.granted = ours.recv()
        ours.close()

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    def stop(self) -> None:
        """Freeze it: it holds on, and says nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, frozen or not."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(_SECONDS)
