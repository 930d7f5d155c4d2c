"""In which order rows run: those whose prompts begin alike one after the other, within a bounded look-ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.batch.prepare import Prepared

FIRST_WINDOW = 32  # rows: the first ones start before many are read
WINDOW_TOKENS = 4_000_000  # of prompts: bounds the memory of long ones


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
    queue: asyncio.Queue[Prepared | None] = asyncio.Queue(size)

    async def fill() -> None:
        async for row in rows:
            await queue.put(row)
        await queue.put(None)

    async def drain() -> AsyncIterator[Prepared]:
        while (row := await queue.get()) is not None:
            yield row

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(fill())
        yield drain()
        reader.cancel()
