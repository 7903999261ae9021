"""How much is read before somebody's blocks, as things are now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.prefetch.batch import batch_bytes, passing_bytes
from kvstore.prefetch.move import MoveState
from kvstore.prefetch.queue import FRONT_PICKS
from kvstore.prefetch.wanted import Wanted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.index import Block
    from kvstore.prefetch.estimate import PathEstimate
    from kvstore.prefetch.move import Move, WaiterJob
    from kvstore.prefetch.queue import Job, JobQueue

__all__ = ["bytes_ahead"]


def bytes_ahead(
    queue: JobQueue[Move],
    moves: Mapping[Block, Move],
    bytes_: int,
    path: PathEstimate,
    blocks: Sequence[Block],
    priority: int,
    job: WaiterJob | None,
) -> int:
    """Return how many bytes are read before some blocks; those in flight not counted.

    Args:
        queue: jobs.
        moves: of blocks that are asked for.
        bytes_: of all of these.
        path: that they come by.
        blocks: of one shape.
        priority: at which they are, or would be, asked for.
        job: for which they are, if they are.

    Returns:
        less than nothing when some of the blocks are themselves in flight.
    """
    size = blocks[0].space.shape.block_bytes if blocks else 0
    own, moving = size * len(blocks), 0
    shared: list[Move] = []
    wanted = Wanted(queue, priority)
    for block in blocks:
        move = moves.get(block)
        if job is None:
            wanted.add(move, size)
        if move is None:
            continue
        if move.state is MoveState.MOVING:
            moving += size
        else:
            shared.append(move)
    before, behind = queue.around(priority, own, wanted.brought, job, wanted.shared)
    queued = bytes_ - path.in_flight - size * len(shared)
    ahead = max(0, min(queued, _apart(before, shared)))
    passing = _apart([other for other in behind if not other.told], shared)
    if passing > 0:
        # Every fourth batch is somebody's who stands behind.
        part = passing_bytes(path, max(size, 1)) / batch_bytes(path, max(size, 1))
        ahead += min(passing, int((ahead + own - moving) * part / FRONT_PICKS))
    return ahead - moving


def _apart(jobs: Sequence[Job[Move]], shared: Sequence[Move]) -> int:
    """Return how many bytes some jobs have still to begin, apart from some moves."""
    left = sum(job.left - job.moving for job in jobs)
    if left:
        some = set(jobs)
        for move in shared:
            left -= len(move.jobs.keys() & some) * move.block.space.shape.block_bytes
    return left
