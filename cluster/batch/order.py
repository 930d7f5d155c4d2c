"""In which order rows run: those whose prompts begin alike one after the other, within a bounded look-ahead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.batch.prepare import Prepared

FIRST_WINDOW = 32  # rows: the first ones start before many are read
# Of prompts and of whole rows, in a window and read ahead of it: some 10 MB each, a few times 8 MiB of large rows.
WINDOW_TOKENS = 250_000
WINDOW_BYTES = 8 << 20


class _Load:
    """What rows take that are held."""

    def __init__(self) -> None:
        self._tokens = 0
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._tokens >= WINDOW_TOKENS or self._bytes >= WINDOW_BYTES

    def add(self, row: Prepared) -> None:
        self._tokens += row.num_prompt_tokens
        self._bytes += row.num_bytes

    def remove(self, row: Prepared) -> None:
        self._tokens -= row.num_prompt_tokens
        self._bytes -= row.num_bytes


async def by_prefix(rows: AsyncIterator[Prepared], lookahead: int) -> AsyncIterator[Prepared]:
    """Yield all rows; of each window of up to `lookahead` rows those with equal beginnings together.

    So that a shared prefix is computed once and still in the cache when it is needed again. lookahead 1 = as they
    come.
    """
    window: list[Prepared] = []
    load, size = _Load(), min(FIRST_WINDOW, lookahead)
    async for row in rows:
        window.append(row)
        load.add(row)
        if len(window) >= size or load.is_full:
            for one in _sorted(window):
                yield one
            window, load, size = [], _Load(), min(2 * size, lookahead)
    for one in _sorted(window):
        yield one


def _sorted(window: list[Prepared]) -> list[Prepared]:
    return sorted(window, key=lambda one: (one.requests[0].cache_salt, one.requests[0].prompt_token_ids))


@asynccontextmanager
async def prefetched(rows: AsyncIterator[Prepared], size: int) -> AsyncIterator[AsyncIterator[Prepared]]:
    """Read up to `size` rows ahead of who walks them, until the end of the block."""
    ready: deque[Prepared | None] = deque()
    changed = asyncio.Condition()
    load = _Load()

    def has_room() -> bool:
        return len(ready) < size and not load.is_full

    async def fill() -> None:
        async for row in rows:
            async with changed:
                await changed.wait_for(has_room)
                ready.append(row)
                load.add(row)
                changed.notify_all()
        async with changed:
            ready.append(None)
            changed.notify_all()

    async def drain() -> AsyncIterator[Prepared]:
        while True:
            async with changed:
                await changed.wait_for(lambda: ready)
                row = ready.popleft()
                if row is None:
                    return
                load.remove(row)
                changed.notify_all()
            yield row

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(fill())
        yield drain()
        reader.cancel()
