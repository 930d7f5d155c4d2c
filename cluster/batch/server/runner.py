"""Runs the batches that clients left with the server: one at a time for each model, behind clients' requests.

Several runners may look at one store: who holds a batch's ledger runs it, and whoever comes after a dead one goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cluster.batch.errors import BusyError, FencedError
from cluster.batch.server.errors import StoreError
from cluster.batch.server.objects import BatchRecord
from cluster.batch.server.store import Store
from cluster.batch.server.windows import Windows

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks for new batches
# Batches of a model that are looked after, batches of which the model is not known yet, and batches behind these that
# are only to be ended.
MAX_AT_ONCE = 64
PAUSE_SECONDS = 10.0  # until a batch is tried again that failed for a reason of ours

RunOne = Callable[[str], Coroutine[Any, Any, None]]


class Runner:
    """Keeps a task for every batch that has not ended. run_one: sees a batch to its end, given its id.

    windows: that `run_one` goes by. clock: of pauses.
    """

    def __init__(
        self,
        store: Store,
        run_one: RunOne,
        windows: Windows,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._run_one = run_one
        self._clock = clock
        self._windows = windows
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()  # of these, those that stood behind others, and are only to be ended
        self._not_before: dict[str, float] = {}
        self._told: set[str] = set()  # damages that the log has
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
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):  # wait_for loses a cancellation that meets a wake
                        await self._wake.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _look(self) -> None:
        try:
            self._end_due(self._begin(await asyncio.to_thread(self._unended)))
        except Exception:
            # Whatever a library for URLs raises: batches that run go on, and it is tried again.
            logger.exception("batches cannot be listed")

    def _unended(self) -> list[BatchRecord]:
        unended = list(self._store.batches.unended(self._tell))
        self._windows.look(unended)
        return unended

    def _begin(self, unended: Sequence[BatchRecord]) -> list[BatchRecord]:
        """Begin with the first batches of each model; return those that stand behind as many as there may be."""
        model_of = {one.id: one.model for one in unended}
        self._let_go(model_of)
        running = Counter(model_of.get(one) for one in self._tasks if one not in self._ending)
        now, behind = self._clock(), []
        for one in unended:
            if one.id in self._tasks or self._not_before.get(one.id, 0.0) > now:
                continue
            if running[one.model] < MAX_AT_ONCE:
                running[one.model] += 1
                self._look_after(one.id)
            else:
                behind.append(one)
        return behind

    def _end_due(self, behind: Sequence[BatchRecord]) -> None:
        """Of batches whose turn is far, end those that are cancelled, or whose time is over."""
        due = [one.id for one in behind if one.status == "cancelling" or self._windows.is_over(one)]
        for batch_id in due[: MAX_AT_ONCE - len(self._ending)]:
            self._ending.add(batch_id)
            self._look_after(batch_id)

    def _look_after(self, batch_id: str) -> None:
        def ended(_: asyncio.Task[None]) -> None:  # also of one that was cancelled before it began
            del self._tasks[batch_id]
            self._ending.discard(batch_id)

        self._tasks[batch_id] = asyncio.create_task(self._see_to_its_end(batch_id))
        self._tasks[batch_id].add_done_callback(ended)

    def _let_go(self, model_of: Mapping[str, str | None]) -> None:
        """Leave batches for later that turned out to be of a model that has enough of them, the latest first."""
        kept: Counter[str] = Counter()
        for batch_id, task in self._tasks.items():
            if batch_id not in self._ending and (model := model_of.get(batch_id)):
                kept[model] += 1
                if kept[model] > MAX_AT_ONCE:
                    task.cancel()

    def _tell(self, damaged: StoreError) -> None:
        if str(damaged) not in self._told:
            self._told.add(str(damaged))
            logger.error("a batch is left out: %s", damaged)

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
