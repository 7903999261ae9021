"""Traces made up: conversations that come back, in Mooncake's format, as long as one likes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Final

__all__ = ["synthetic_lines"]

_BLOCK_TOKENS: Final = 512
_REQUESTS_PER_SECOND: Final = 4.0
# A conversation ends with this chance after every turn.
_END: Final = 0.25
_SYSTEM_PROMPTS: Final = 8
_NEW_BLOCKS: Final = 6.0


def synthetic_lines(requests: int, seed: int = 0, chats: int = 400) -> Iterator[str]:
    """Yield the lines of a trace.

    Conversations start from one of a few system prompts and grow by some blocks each turn. Equal
    arguments give equal traces. Memory does not depend on the number of requests.

    Args:
        requests: how many.
        seed: other seeds give other traces.
        chats: conversations at the same time.
    """
    rng = random.Random(seed)
    next_id = 0

    def fresh(count: int) -> list[int]:
        nonlocal next_id
        next_id += count
        return list(range(next_id - count, next_id))

    prompts = [fresh(rng.randint(1, 4)) for _ in range(_SYSTEM_PROMPTS)]
    open_chats = [rng.choice(prompts) for _ in range(chats)]
    at = 0.0
    for _ in range(requests):
        at += rng.expovariate(_REQUESTS_PER_SECOND)
        chat = rng.randrange(chats)
        ids = open_chats[chat] + fresh(1 + int(rng.expovariate(1 / _NEW_BLOCKS)))
        tokens = len(ids) * _BLOCK_TOKENS - rng.randrange(_BLOCK_TOKENS)
        fields = {
            "timestamp": int(at * 1e3),
            "input_length": tokens,
            "output_length": rng.randint(16, 1024),
            "hash_ids": ids,
        }
        yield json.dumps(fields)
        # A partial block is another block once more has been said.
        grown = ids if tokens % _BLOCK_TOKENS == 0 else ids[:-1]
        open_chats[chat] = rng.choice(prompts) if rng.random() < _END else grown
