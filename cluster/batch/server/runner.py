"""Runs the batches that clients left with the server: one at a time for each model, behind clients' requests.

Several runners may look at one store: who holds a batch's ledger runs it, and whoever comes after a dead one goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from cluster.batch.errors import BusyError, FencedError
from cluster.batch.server.objects import BatchRecord
from cluster.batch.server.store import Store

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks for new batches
MAX_AT_ONCE = 64  # batches that are looked after
PAUSE_SECONDS = 10.0  # until a batch is tried again that failed for a reason of ours

RunOne = Callable[[str], Coroutine[Any, Any, None]]


class Runner:
    """Keeps a task for every batch that has not ended. run_one: sees a batch to its end, given its id."""

    def __init__(self, store: Store, run_one: RunOne, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._run_one = run_one
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        self._wake = asyncio.Event()

    def wake(self, _: BatchRecord | None = None) -> None:
        """Look for new batches now."""
        self._wake.set()

    @property
    def running(self) -> Mapping[str, asyncio.Task[None]]:
        """Batches that are looked after here."""
        return self._tasks

    async def run(self) -> None:
        """Go on until cancelled; batches are then left as they are, for whoever comes next."""
        try:
            while True:
                await self._look()
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), LOOK_SECONDS)
                except TimeoutError:
                    continue
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _look(self) -> None:
        try:
            unended = await asyncio.to_thread(lambda: [one.id for one in self._store.batches.unended()])
        except OSError as error:
            logger.warning("batches cannot be listed: %s", error)
            return
        now = self._clock()
        for batch_id in unended:
            if len(self._tasks) >= MAX_AT_ONCE:
                return
            if batch_id not in self._tasks and self._not_before.get(batch_id, 0.0) <= now:
                self._tasks[batch_id] = asyncio.create_task(self._see_to_its_end(batch_id))

    async def _see_to_its_end(self, batch_id: str) -> None:
        try:
            await self._run_one(batch_id)
            self._not_before.pop(batch_id, None)
        except (BusyError, FencedError) as error:
            logger.info("batch %s is another runner's: %s", batch_id, error)
            self._not_before[batch_id] = self._clock() + LOOK_SECONDS
        except Exception:
            # A full disk, a fault of ours: others go on, and this one is tried again.
            logger.exception("batch %s has to wait", batch_id)
            self._not_before[batch_id] = self._clock() + PAUSE_SECONDS
        finally:
            del self._tasks[batch_id]
