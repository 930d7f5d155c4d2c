"""Runs a batch: reads rows, keeps the replicas full, and writes down what comes, until every row has its result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from cluster.batch.errors import BatchError, TooManyErrorsError
from cluster.batch.ledger.ledger import Ledger
from cluster.batch.ledger.records import RowDone
from cluster.batch.row_requests import Prepared, Preparer, by_prefix, prefetched
from cluster.batch.rows import InputSource, SourceRow, Task
from cluster.batch.run.backlog import BatchBacklog
from cluster.batch.run.cost import Cost
from cluster.batch.run.run_row import Answers, Ticker, failed
from cluster.errors import ApiError, as_api_error
from cluster.openai.thread_pool import FairThreadPool
from cluster.tasks import first_error, is_cancelled
from engine.errors import InvalidRequestError, redacted

logger = logging.getLogger(__name__)

SYNC_SECONDS = 1.0  # between two fsyncs: what a machine that loses power may lose
ROWS_PER_TURN = 8  # that are read before others get a turn on the event loop


@dataclass(frozen=True, slots=True)
class RunLimits:
    """When to stop, and how far to look ahead.

    max_errors: failed rows that are tolerated. max_cost_tokens: of prompts and output, of the whole batch. None = any
    number. lookahead: rows among which those with equal beginnings are brought together; 1 = run them as they come.
    """

    max_errors: int | None = None
    max_cost_tokens: int | None = None
    lookahead: int = 1024

    def refuse_errors(self, ledger: Ledger) -> None:
        """Raise `TooManyErrorsError` where more rows have failed than are tolerated."""
        errors, most = ledger.totals.num_errors, self.max_errors
        if most is not None and errors > most:
            raise TooManyErrorsError(
                f"{errors} rows failed, more than --max-errors {most}; raise it and go on with --resume, or mend the "
                f"input and delete {ledger.folder} to begin anew"
            )


class BatchQuota(Protocol):
    """What the rows of one batch are charged to."""

    async def pay(self, prepared: Prepared, expected: int) -> None:
        """Return when a row may begin. expected: tokens that it is likely to take, its prompts included.

        Raises `ApiError` for a row that may never begin.
        """
        ...

    async def settle(self, expected: int, done: RowDone) -> None:
        """Take note of what a row took that had paid for `expected`."""
        ...


class BatchLoop:
    """Runs the rows of `source` that the ledger does not have. Made and used on one event loop.

    quota: what rows are charged to; None = nothing.
    """

    def __init__(
        self,
        source: InputSource,
        task_of: Callable[[SourceRow], Task],
        preparer: Preparer,
        answers: Answers,
        ledger: Ledger,
        backlog: BatchBacklog,
        ticker: Ticker,
        limits: RunLimits,
        quota: BatchQuota | None = None,
    ) -> None:
        self._source = source
        self._task_of = task_of
        self._preparer = preparer
        self._answers = answers
        self._ledger = ledger
        self._backlog = backlog
        self._ticks = ticker
        self._limits = limits
        self._quota = quota
        self._cost = Cost(limits.max_cost_tokens, ledger.totals, preparer.model.longest_sequence)
        self._thread_pool = FairThreadPool()
        self._stopped: BatchError | None = None

    async def run(self) -> None:
        """Return when every row has its result, and all are on the disk.

        Raises `LedgerError`, and `BatchError` when a limit is reached: rows that run by then are finished first.
        """
        try:
            async with asyncio.TaskGroup() as group:
                beats = [group.create_task(self._ticks.run()), group.create_task(self._sync())]
                await self._run_rows()
                for beat in beats:
                    beat.cancel()
        except asyncio.CancelledError:
            self._ledger.flush()  # who stops a batch goes on with it: nothing that came is to be computed again
            raise
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            self._backlog.close()
            self._thread_pool.close()
        self._ledger.flush()
        await asyncio.to_thread(self._ledger.sync)
        self._check_errors()
        if self._stopped is not None:
            raise self._stopped

    async def _run_rows(self) -> None:
        async with asyncio.TaskGroup() as rows, prefetched(self._prepared(), self._limits.lookahead) as ready:
            async for prepared in by_prefix(ready, self._limits.lookahead):
                if await self._must_stop(prepared):
                    return
                expected = self._backlog.expected(prepared)
                if self._quota is not None:
                    try:
                        await self._quota.pay(prepared, expected)
                    except ApiError as error:
                        self._done(prepared, failed(prepared.task.row, error))
                        continue
                await self._backlog.enter(prepared)
                rows.create_task(self._run_row(prepared, expected))

    async def _run_row(self, prepared: Prepared, expected: int) -> None:
        """Run a row that has entered; recalled, it waits in front of the others, and goes on where it was.

        expected: tokens that it has paid for.
        """
        while (done := await self._attempt(prepared)) is None:
            await self._backlog.enter(prepared, first=True)
        self._done(prepared, done)
        if self._quota is not None:
            await self._quota.settle(expected, done)

    def _done(self, prepared: Prepared, done: RowDone) -> None:
        self._ledger.note_done(done)
        self._cost.ended(prepared)

    async def _attempt(self, prepared: Prepared) -> RowDone | None:
        """Return the row's result, None if it was recalled."""
        row, output_tokens = prepared.task.row, 0
        work = asyncio.ensure_future(self._answer(prepared))
        self._backlog.may_recall(row, work.cancel)
        try:
            done = await work
            output_tokens = done.output_tokens
        except asyncio.CancelledError:
            if not work.cancelled() or is_cancelled():
                raise
            return None
        finally:
            work.cancel()
            self._backlog.leave(row, output_tokens)
        return done

    async def _answer(self, prepared: Prepared) -> RowDone:
        try:
            return await self._answers.answer(prepared)
        except BatchError:
            raise
        except Exception as error:
            return _failed_inside(prepared.task.row, error)

    async def _prepared(self) -> AsyncIterator[Prepared]:
        """Yield the rows that are to be run. What is wrong with one is its result."""
        for row in self._source.rows():
            if row.number % ROWS_PER_TURN == 0:
                await asyncio.sleep(0)
            if row.number in self._ledger.done:
                continue
            prepared = await self._ready_or_failed(row)
            if isinstance(prepared, RowDone):
                self._ledger.note_done(prepared)
            else:
                yield prepared

    async def _ready_or_failed(self, row: SourceRow) -> Prepared | RowDone:
        try:
            return await self._thread_pool.run(len(row.raw), partial(self._made_ready, row))
        except (ApiError, InvalidRequestError) as error:
            return failed(row.number, as_api_error(error))
        except BatchError:
            raise
        except Exception as error:
            return _failed_inside(row.number, error)

    def _made_ready(self, row: SourceRow) -> Prepared:
        return replace(self._preparer.prepare(self._task_of(row)), num_bytes=len(row.raw))

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            await asyncio.to_thread(self._ledger.sync)

    async def _must_stop(self, prepared: Prepared) -> bool:
        """Whether a limit is reached, so that the row must not begin."""
        self._check_errors()
        if self._stopped is None and not await self._cost.admits(prepared):
            self._stopped = self._cost.refusal(prepared)
        return self._stopped is not None

    def _check_errors(self) -> None:
        try:
            self._limits.refuse_errors(self._ledger)
        except TooManyErrorsError as error:
            self._stopped = error


def _failed_inside(row: int, error: Exception) -> RowDone:
    """Return the result of a row that met a fault of ours, which must not end the others."""
    logger.error("row %d failed inside", row, exc_info=redacted(error))
    return failed(row, ApiError("internal_error", "the row failed inside; the log has more"))
