"""In which order rows run: those whose prompts begin alike one after the other, within a bounded look-ahead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.batch.prepare import Prepared

FIRST_WINDOW = 32  # rows: the first ones start before many are read
WINDOW_TOKENS = 250_000  # of prompts, in a window and read ahead of it: some 10 MB each


async def by_prefix(rows: AsyncIterator[Prepared], lookahead: int) -> AsyncIterator[Prepared]:
    """Yield all rows; of each window of up to `lookahead` rows those with equal beginnings together.

    So that a shared prefix is computed once and still in the cache when it is needed again. lookahead 1 = as they
    come.
    """
    window: list[Prepared] = []
    tokens, size = 0, min(FIRST_WINDOW, lookahead)
    async for row in rows:
        window.append(row)
        tokens += row.num_prompt_tokens
        if len(window) >= size or tokens >= WINDOW_TOKENS:
            for one in _sorted(window):
                yield one
            window, tokens, size = [], 0, min(2 * size, lookahead)
    for one in _sorted(window):
        yield one


def _sorted(window: list[Prepared]) -> list[Prepared]:
    return sorted(window, key=lambda one: (one.requests[0].cache_salt, one.requests[0].prompt_token_ids))


@asynccontextmanager
async def prefetched(rows: AsyncIterator[Prepared], size: int) -> AsyncIterator[AsyncIterator[Prepared]]:
    """Read up to `size` rows ahead of who walks them, until the end of the block."""
    ready: deque[Prepared | None] = deque()
    changed = asyncio.Condition()
    tokens = 0

    def has_room() -> bool:
        return len(ready) < size and tokens < WINDOW_TOKENS

    async def fill() -> None:
        nonlocal tokens
        async for row in rows:
            async with changed:
                await changed.wait_for(has_room)
                ready.append(row)
                tokens += row.num_prompt_tokens
                changed.notify_all()
        async with changed:
            ready.append(None)
            changed.notify_all()

    async def drain() -> AsyncIterator[Prepared]:
        nonlocal tokens
        while True:
            async with changed:
                await changed.wait_for(lambda: ready)
                row = ready.popleft()
                tokens -= 0 if row is None else row.num_prompt_tokens
                changed.notify_all()
            if row is None:
                return
            yield row

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(fill())
        yield drain()
        reader.cancel()
