"""Which batches of a model run: of each tenant one at a time, in the order of their making, beside others' ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Turns:
    """Used on one event loop. Batches are named by their ids, which are in the order of their making."""

    def __init__(self) -> None:
        self._running: dict[str, str] = {}  # tenant -> its batch
        self._waiting: dict[str, dict[str, asyncio.Future[None]]] = {}

    def running(self, tenant: str) -> str | None:
        """Return the batch of a tenant whose turn it is, None where it has none."""
        return self._running.get(tenant)

    @asynccontextmanager
    async def turn(self, tenant: str, batch_id: str) -> AsyncGenerator[None, None]:
        """Wait until it is a batch's turn, which is its own until the end of the block."""
        if tenant in self._running:
            await self._called(tenant, batch_id)
        else:
            self._running[tenant] = batch_id
        try:
            yield
        finally:
            self._call_next(tenant)

    async def _called(self, tenant: str, batch_id: str) -> None:
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, {})[batch_id] = called
        try:
            await called
        except BaseException:
            if called.cancelled():
                self._waiting.get(tenant, {}).pop(batch_id, None)
            else:
                self._call_next(tenant)  # it was called just as it was told to stop
            raise

    def _call_next(self, tenant: str) -> None:
        del self._running[tenant]
        waiting = {one: called for one, called in self._waiting.get(tenant, {}).items() if not called.done()}
        if not waiting:
            self._waiting.pop(tenant, None)
            return
        self._running[tenant] = first = min(waiting)
        self._waiting[tenant].pop(first).set_result(None)
