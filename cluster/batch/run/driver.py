"""One driver: replicas, dispatcher and ledger around the rows, from the first to the last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cluster.batch.ledger.ledger import Ledger
from cluster.batch.row_requests import Preparer
from cluster.batch.rows import InputSource, SourceRow, Task
from cluster.batch.run.backlog import BackgroundBounds, Backlog, full_bounds
from cluster.batch.run.cost import Cost
from cluster.batch.run.loop import BatchLoop, RunLimits
from cluster.batch.run.run_row import TICK, Answers, RowSource, Ticker
from cluster.config import ClusterConfig
from cluster.errors import ApiError
from cluster.openai.served_model import ServedModel
from cluster.router.dispatcher import Dispatcher
from cluster.router.dispatcher_config import DispatcherConfig
from cluster.telemetry.metrics import Metrics, ReplicaSetStats
from engine.errors import InvalidRequestError

FOREVER = 7 * 86_400.0  # seconds: rows wait for replicas as long as the batch waits
LOOK_SECONDS = 0.5  # between two looks at the figures
Replicas = Callable[[Dispatcher], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is.

    done, errors: rows, of `rows`. prompt_tokens, output_tokens: of the rows that are done. drawn, prefilled, cached:
    tokens of this driver: of output; of prompts, and those that were found in a prefix cache. running: sequences.
    seconds: since this driver had its first replica.
    """

    rows: int
    done: int
    errors: int
    prompt_tokens: int
    output_tokens: int
    drawn: int
    prefilled: int
    cached: int
    running: int
    replicas: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What a driver works on.

    share: of the replicas' sequences, 0 to 1, that rows may take while clients' requests run; None = there are none.
    """

    config: ClusterConfig
    model: ServedModel
    source: InputSource
    task_of: Callable[[SourceRow], Task]
    preparer: Preparer
    ledger: Ledger
    limits: RunLimits
    share: float | None = None


def refuse_cost(work: BatchWork) -> None:
    """Look at the first row that is left: cheap, and done before replicas are there.

    Raises `BatchError` where it alone may take more tokens than are left, so that the batch cannot come to its end.
    """
    left = next((row for row in work.source.rows() if row.number not in work.ledger.done), None)
    if left is None or work.limits.max_cost_tokens is None:
        return
    cost = Cost(work.limits.max_cost_tokens, work.ledger.totals, work.model.longest_sequence)
    try:
        prepared = work.preparer.prepare(work.task_of(left))
    except (ApiError, InvalidRequestError):
        return  # the run reports it at no cost
    if cost.is_beyond(prepared):
        raise cost.refusal(prepared)


async def drive(work: BatchWork, replicas: Replicas, on_progress: Callable[[BatchProgress], None]) -> None:
    """Run all rows that are not done.

    replicas: keeps a dispatcher linked to replicas until it is cancelled. on_progress: called twice a second, and at
    the end. Raises `BatchError`; what was done by then is in the ledger.
    """
    async with _dispatcher(work.config) as dispatcher:
        began = _Stopwatch()

        async def watch() -> None:
            while True:
                on_progress(progress_of(work.ledger, dispatcher, began.seconds))
                await asyncio.sleep(LOOK_SECONDS)

        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(replicas(dispatcher)), group.create_task(watch())]
            work.ledger.agree_on(await _first_replica(dispatcher))
            began.start()
            await _run(work, dispatcher).run()
            for task in beside:
                task.cancel()
        on_progress(progress_of(work.ledger, dispatcher, began.seconds))


def _run(work: BatchWork, dispatcher: Dispatcher) -> BatchLoop:
    ledger, config = work.ledger, work.config
    room = full_bounds(dispatcher, config.max_num_seqs, config.engine.token_budget)
    backlog = Backlog(room if work.share is None else BackgroundBounds(room, dispatcher, work.share)).of("")
    ticker = Ticker([ledger.flush, backlog.adjust])
    tokens = RowSource(dispatcher, ledger, ticker, backlog.make_room)
    answers = Answers(work.model, tokens, Metrics().of(work.model.model_id, ReplicaSetStats))
    return BatchLoop(work.source, work.task_of, work.preparer, answers, ledger, backlog, ticker, work.limits)


async def _first_replica(dispatcher: Dispatcher) -> str:
    """Wait for replicas of one model, and return its fingerprint."""
    while (fingerprint := dispatcher.fingerprint if dispatcher.ready else None) is None:
        await asyncio.sleep(TICK)
    return fingerprint


def progress_of(ledger: Ledger, dispatcher: Dispatcher, seconds: float) -> BatchProgress:
    """Return how far the batch is. seconds: as in `BatchProgress`."""
    totals, counters, views = ledger.totals, dispatcher.counters, dispatcher.replicas()
    return BatchProgress(
        rows=ledger.job.rows,
        done=ledger.done.count,
        errors=totals.num_errors,
        prompt_tokens=totals.prompt_tokens,
        output_tokens=totals.output_tokens,
        drawn=counters.tokens,
        prefilled=counters.prefilled,
        cached=counters.cached_tokens,
        running=sum([view.load.num_running for view in views]),
        replicas=sum([view.ready for view in views]),
        seconds=seconds,
    )


class _Stopwatch:
    """Counts from its start on."""

    def __init__(self) -> None:
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds so far, 0 before the start."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def start(self) -> None:
        """Begin to count."""
        self._began = time.monotonic()


def patient_config(config: ClusterConfig) -> DispatcherConfig:
    """Return a dispatcher's times for rows, which wait for replicas as long as it takes."""
    return DispatcherConfig(
        stall_timeout=config.stall_timeout,
        progress_timeout=2 * config.step_timeout,
        admission_wait=FOREVER,
        no_replica_timeout=FOREVER,
        routing_policy=config.routing_policy,
    )


@asynccontextmanager
async def _dispatcher(config: ClusterConfig) -> AsyncGenerator[Dispatcher, None]:
    dispatcher = Dispatcher(patient_config(config))
    try:
        yield dispatcher
    finally:
        await dispatcher.close()
