"""Runs the batches that clients left with the server: of each tenant one at a time for each model, behind clients.

Several runners may look at one store: the holder of a batch's ledger runs it; the next one takes over when it dies.
A sweeper removes what killed processes left, and files whose time is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from cluster.batch.errors import BatchError, BusyError, FencedError, StoreError
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.server.ids import BATCH_IDS
from cluster.batch.server.lease import sweep_signs
from cluster.batch.server.limits import CompletionWindows
from cluster.batch.server.objects import BatchRecord, LineError
from cluster.batch.server.store import Store

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks for new batches
# Batches of a model that are looked after, unless more tenants have one; batches of which the model is not known yet;
# and batches behind these that are only to be ended.
MAX_AT_ONCE = 64
# Seconds after which a tenant without a key has none any more: a new key is not seen everywhere at the same time.
REVOKED_SECONDS = 180.0
PAUSE_SECONDS = 10.0  # until a batch is tried again that failed for a reason of ours

RunOne = Callable[[str], Coroutine[Any, Any, None]]
SWEEP_SECONDS = 3600.0


class Runner:
    """Keeps a task for every batch that has not ended. run_one: sees a batch to its end, given its id.

    windows: that `run_one` goes by. clock: of pauses. has_key: whether a tenant has a valid key, given its name; the
    batches of one that has none for `REVOKED_SECONDS` are cancelled.
    """

    def __init__(
        self,
        store: Store,
        run_one: RunOne,
        windows: CompletionWindows,
        clock: Callable[[], float] = time.monotonic,
        has_key: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._store = store
        self._run_one = run_one
        self._clock = clock
        self._windows = windows
        self._has_key = has_key
        self._keyless: dict[str, float] = {}  # tenants without a key, and since when they are seen so
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()  # of these, those that stood behind others, and are only to be ended
        self._not_before: dict[str, float] = {}
        self._reported: set[str] = set()  # damages that the log has
        self._wake = asyncio.Event()

    def wake(self, _: BatchRecord | None = None) -> None:
        """Look for new batches now."""
        self._wake.set()

    @property
    def running(self) -> Mapping[str, asyncio.Task[None]]:
        """Batches that are looked after here."""
        return self._tasks

    async def run(self) -> None:
        """Go on until cancelled; batches are then left as they are, for the next runner."""
        try:
            while True:
                await self._scan()
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):  # wait_for loses a cancellation that meets a wake
                        await self._wake.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _scan(self) -> None:
        try:
            self._end_due(self._begin(await asyncio.to_thread(self._unended)))
        except Exception:
            # Whatever a library for URLs raises: batches that run go on, and it is tried again.
            logger.exception("batches cannot be listed")

    def _unended(self) -> list[BatchRecord]:
        unended = list(self._store.batches.unended(self._report))
        self._windows.observe(unended)
        self._revoke(unended)
        return unended

    def _revoke(self, unended: Sequence[BatchRecord]) -> None:
        """Have the batches of tenants cancelled that have had no key for long enough."""
        now = self._clock()
        keyless = {tenant for tenant in {one.tenant for one in unended} if not self._has_key(tenant)}
        self._keyless = {tenant: self._keyless.get(tenant, now) for tenant in keyless}
        for one in unended:
            if now - self._keyless.get(one.tenant, now) >= REVOKED_SECONDS and one.status != "cancelling":
                logger.warning("batch %s is cancelled: tenant %s has no valid key any more", one.id, one.tenant)
                message = f"tenant {one.tenant} has no valid API key any more; what was done by then is kept"
                why = LineError(code="key_revoked", message=message)
                self._store.batches.ask_cancel(one.id, int(time.time()), why)

    def _begin(self, unended: Sequence[BatchRecord]) -> list[BatchRecord]:
        """Begin with the first batches of each model; return those that stand behind as many as there may be."""
        now, by_model = self._clock(), defaultdict[str | None, list[BatchRecord]](list)
        for one in unended:
            if one.id in self._tasks or self._not_before.get(one.id, 0.0) <= now:
                by_model[one.model].append(one)
        behind = []
        for model, batches in by_model.items():
            first, rest = by_turns(batches)
            for one in first:
                if one.id not in self._tasks:
                    self._supervise(one.id)
            for one in rest:
                if one.id not in self._tasks:
                    behind.append(one)
                elif model is not None and one.id not in self._ending:
                    self._tasks[one.id].cancel()  # left for later: its model, which has enough, is known by now
        return behind

    def _end_due(self, behind: Sequence[BatchRecord]) -> None:
        """Of batches whose turn is far, end those that are cancelled, or whose time is over."""
        due = [one.id for one in behind if one.status == "cancelling" or self._windows.is_over(one)]
        for batch_id in due[: MAX_AT_ONCE - len(self._ending)]:
            self._ending.add(batch_id)
            self._supervise(batch_id)

    def _supervise(self, batch_id: str) -> None:
        def ended(_: asyncio.Task[None]) -> None:  # also of one that was cancelled before it began
            del self._tasks[batch_id]
            self._ending.discard(batch_id)

        self._tasks[batch_id] = asyncio.create_task(self._see_to_its_end(batch_id))
        self._tasks[batch_id].add_done_callback(ended)

    def _report(self, damaged: StoreError) -> None:
        if str(damaged) not in self._reported:
            self._reported.add(str(damaged))
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


def by_turns(batches: Sequence[BatchRecord]) -> tuple[list[BatchRecord], list[BatchRecord]]:
    """Divide the batches of one model into those that are looked after, and those behind them.

    The tenants by turns, each in the order in which it made them: first the first one of every tenant, whatever their
    number, so that no tenant waits for the end of another tenant's batch. batches: the oldest first.
    """
    number: Counter[str] = Counter()
    turns: list[tuple[int, BatchRecord]] = []
    for one in batches:
        turns.append((number[one.tenant], one))
        number[one.tenant] += 1
    ordered = [one for _, one in sorted(turns, key=itemgetter(0))]
    most = max(MAX_AT_ONCE, len(number))
    return ordered[:most], ordered[most:]


class Sweeper:
    """folder: of ledgers. time_of_day: seconds since 1970."""

    def __init__(self, store: Store, folder: Path, time_of_day: Callable[[], float] = time.time) -> None:
        self._store = store
        self._folder = folder
        self._signs: dict[str, bytes | None] = {}  # of runners, as they were found the last time
        self._time_of_day = time_of_day
        self._expired: set[str] = set()  # files whose time was over the last time

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.sweep)
            except Exception:
                # Whatever a disk or a library for URLs raises: it is tried again.
                logger.exception("what killed processes left cannot be removed now")
            await asyncio.sleep(SWEEP_SECONDS)

    def sweep(self) -> None:
        """Remove what is not written, shown or needed any more: drafts, signs of runners, files, ledgers."""
        self._store.sweep()
        sweep_signs(self._store.root, self._signs)
        for folder in self._folder.iterdir() if self._folder.exists() else ():
            if BATCH_IDS.fits(folder.name):
                self._sweep(folder)
        self._sweep_files()

    def _sweep_files(self) -> None:
        """Those that were over the last time, too: a time of day that is wrong for a moment must delete nothing."""
        expired = self._store.files.expired(self._time_of_day())
        for one in expired:
            if one.id in self._expired:
                self._store.delete_expired(one)
        self._expired = {one.id for one in expired}

    def _sweep(self, folder: Path) -> None:
        try:
            if not self._is_needed(folder.name):
                Epoch(folder).remove_folder()
        except BusyError:
            return  # the runner that ended it is about to
        except (BatchError, OSError) as error:
            logger.warning("the ledger %s stays until the next sweep, others go: %s", folder, error)

    def _is_needed(self, batch_id: str) -> bool:
        record = self._store.batches.read(batch_id)
        return record is not None and not record.ended


class TenantTurns:
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
                self._call_next(tenant)  # it was called just as it was asked to stop
            raise

    def _call_next(self, tenant: str) -> None:
        del self._running[tenant]
        waiting = {one: called for one, called in self._waiting.get(tenant, {}).items() if not called.done()}
        if not waiting:
            self._waiting.pop(tenant, None)
            return
        self._running[tenant] = first = min(waiting)
        self._waiting[tenant].pop(first).set_result(None)
