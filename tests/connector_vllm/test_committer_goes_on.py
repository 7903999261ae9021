"""The thread that commits outlives whatever one store's end meets."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore.connectors.vllm.committer import Committer


def test_a_store_whose_end_fails_does_not_end_those_after_it() -> None:
    aborted: list[int] = []

    def abort(owner_id: int, grant_id: int, *, slots: Any) -> None:
        aborted.append(grant_id)
        if grant_id == 1:
            raise RuntimeError("the channel is gone")

    ended: list[int] = []
    over = threading.Event()

    def done(store: Any, outcomes: bytes) -> None:
        ended.append(store.job_id)
        assert outcomes == b"\0"
        if store.job_id == 2:
            raise RuntimeError("nobody knows it")
        if store.job_id == 3:
            over.set()

    client: Any = SimpleNamespace(attachment=SimpleNamespace(abort=abort))
    committer = Committer(client, 0, done)
    for number in (1, 2, 3):
        store: Any = SimpleNamespace(
            job_id=number, owner_id=7, grants=np.array([number]), slots=np.zeros(1, np.int64)
        )
        committer.submit(store, copied=False)
    assert over.wait(60)
    committer.close()
    assert aborted == ended == [1, 2, 3]
