"""Writing blocks: reserve a window, copy in, commit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Final

import numpy as np

from kvstore.attach import Grant
from kvstore.errors import AttachmentLost
from kvstore.flows.base import LATE_SECONDS, Deadline, FlowsBase, milliseconds, pauses
from kvstore.keys import Keys
from kvstore.outcomes import CommitOutcome, Shortage
from kvstore.proto import kvstore_pb2 as pb
from kvstore.rows import Rows
from kvstore.steps import Await, Flow, Pause, Send, Work
from kvstore.syncpoint import reach
from kvstore.wire import CHUNK_BYTES, MAX_KEYS, SlotArray, pack_chain_parents

__all__ = ["Writing"]

_FINAL: Final = {Shortage.NO_ROOM, Shortage.DRAINING, Shortage.ORPHAN, Shortage.QUOTA}
_PRESENT: Final = {CommitOutcome.COMMITTED, CommitOutcome.EXISTS, CommitOutcome.WAITING}


class Writing(FlowsBase):
    """The flow of `put`."""

    def put(self, keys: Keys, rows: Rows, timeout_s: float) -> Flow[int]:
        """Store the blocks that are not present; return the leading run present afterwards."""
        deadline = Deadline(timeout_s)
        for last_try in (False, True):
            if not (yield from self._mapped(deadline)):
                found = yield from self._present(keys)
                if found is None or found == len(keys):
                    return found or 0
                return (yield from self._put_streamed(keys, found, rows, deadline))
            try:
                done = yield from self._put_mapped(keys, rows, deadline)
            except AttachmentLost:
                if last_try or not deadline.left:
                    raise
            else:
                break
        if done == len(keys):
            return done
        hit = yield from self.lookup(keys)
        return hit.blocks

    def _present(self, keys: Keys) -> Flow[int | None]:
        """Return the leading run that is there already; None when what it hangs on is not."""
        if keys.parent is None:
            return (yield from self.lookup(keys)).blocks
        chain = Keys(keys.parent + keys.packed, keys.key_bytes)
        hit = yield from self.lookup(chain)
        return hit.blocks - 1 if hit.blocks else None

    def _stored(self, blocks: int, deadline: Deadline) -> None:
        if blocks > 0:
            self._attachment.usage.add(self._space.ref, stored_bytes=blocks * self._block_bytes)
            self._attachment.times.add("store", deadline.spent)

    def _put_mapped(self, keys: Keys, rows: Rows, deadline: Deadline) -> Flow[int]:
        """Store the blocks that are not present; return the end of what is committed in order.

        A window's bytes are copied while the next one is reserved and the one before committed.
        """
        size = self._window()
        present: int | None = None
        at = done = 0
        tries = pauses()
        grant: Grant | None = None
        pending: Future[Grant] | None = None
        committing: tuple[int, Future[bytes]] | None = None
        try:
            while at < len(keys):
                if pending is None:
                    named = keys if present is None else None
                    pending = self._reserve(keys, {done, at}, at, size, deadline, named)
                limit = deadline.left + self._timeout_s + LATE_SECONDS
                grant = yield Await(pending, limit)
                pending = None
                if present is None:
                    at = done = grant.present
                if not len(grant.slots):
                    if grant.shortage in _FINAL or done == len(keys) or not deadline.left:
                        break
                    yield Pause(next(tries))
                    continue
                if present is None:
                    present = done
                first, at = at, at + len(grant.slots)
                if at < len(keys) and grant.shortage is not Shortage.NO_ROOM:
                    pending = self._reserve(keys, {done, first, at}, at, size, deadline)
                yield Work(partial(self._copy_in, grant, rows, first))
                if committing is not None:
                    done = yield from self._settle(*committing)
                    committing = None
                    if done < first:
                        break
                reach("put.before_commit")
                committing = (first, self._commit(grant, keys[first:at]))
                grant = None
            if committing is not None:
                done = yield from self._settle(*committing)
            self._stored(done - (done if present is None else present), deadline)
            return done
        finally:
            if grant is not None:
                self._attachment.abort(grant.owner_id, grant.id, grant.slots, all_shards=True)
            if pending is not None:
                pending.add_done_callback(self._abort_when_there)

    def _reserve(
        self,
        keys: Keys,
        ends: set[int],
        at: int,
        size: int,
        deadline: Deadline,
        named: Keys | None = None,
    ) -> Future[Grant]:
        # The chain is protected by the block before the window, and while that one is not there
        # yet, by the ends of the windows before it.
        before = (keys[i - 1] if i else keys.parent for i in ends)
        return self._attachment.reserve(
            self._space,
            min(size, len(keys) - at),
            deadline_s=deadline.left,
            protect=[key for key in before if key is not None],
            keys=named,
        )

    def _copy_in(self, grant: Grant, rows: Rows, first: int) -> None:
        slots: SlotArray = grant.slots
        sources = self._spread(rows.addresses[first : first + len(slots)])
        with self._attachment.using(slots, boot_id=grant.boot_id, writer_id=grant.owner_id) as held:
            memory = [held.addresses(shard) for shard in range(len(self._shard_bytes))]
            self._copy(np.stack(memory, axis=1), sources, "put.copied_half")

    def _commit(self, grant: Grant, keys: Keys) -> Future[bytes]:
        return self._attachment.commit(
            self._space, grant.owner_id, grant.id, None, grant.slots, keys, pack_chain_parents(keys)
        )

    def _settle(self, first: int, outcomes: Future[bytes]) -> Flow[int]:
        """Wait for a commit; return the end of the leading run that it made present."""
        answer = yield Await(outcomes, self._timeout_s + LATE_SECONDS)
        good = 0
        for outcome in answer:
            if outcome not in _PRESENT:
                break
            good += 1
        return first + good

    def _abort_when_there(self, pending: Future[Grant]) -> None:
        if pending.exception() is None:
            grant = pending.result()
            self._attachment.abort(grant.owner_id, grant.id, grant.slots, all_shards=True)

    def _put_streamed(self, keys: Keys, at: int, rows: Rows, deadline: Deadline) -> Flow[int]:
        began = at
        while at < len(keys):
            part = keys[at : at + MAX_KEYS]
            messages = self._messages(part, rows, at, deadline)
            answer = yield Send(messages, self._stream_seconds(len(part), deadline))
            at += answer.blocks
            if answer.blocks < len(part):
                break
        self._stored(at - began, deadline)
        return at

    def _messages(
        self, keys: Keys, rows: Rows, at: int, deadline: Deadline
    ) -> Iterator[pb.PutRequest]:
        yield pb.PutRequest(
            header=pb.PutHeader(
                space=self._space.ref,
                keys=keys.packed,
                parent=keys.parent or b"",
                deadline_ms=milliseconds(deadline.left),
            )
        )
        for block in range(len(keys)):
            for offset in range(0, self._block_bytes, CHUNK_BYTES):
                end = min(offset + CHUNK_BYTES, self._block_bytes)
                data = bytes(rows.view(at + block, offset, end))
                yield pb.PutRequest(chunk=pb.Chunk(block=block, offset=offset, data=data))
