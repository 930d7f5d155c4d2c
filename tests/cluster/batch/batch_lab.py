"""A batch over fake replicas in one process: rows in, a ledger beside, and what an undisturbed run answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cluster.batch.ledger.ledger import Ledger
from cluster.batch.ledger.records import Job, RowDone
from cluster.batch.row_requests import Preparer
from cluster.batch.rows import COMPLETIONS, SourceRow, Task
from cluster.batch.run.backlog import BackgroundBounds, Backlog, full_bounds
from cluster.batch.run.loop import BatchLoop, RunLimits
from cluster.batch.run.run_row import Answers, RowSource, Ticker
from cluster.openai.served_model import ServedModel
from cluster.telemetry.metrics import Metrics, ReplicaSetStats
from cluster.token_source import TokenSource
from tests.cluster.cluster_lab import Lab

CREATED = 1_700_000_000


class ListSource:
    """Bodies as the rows of an input."""

    def __init__(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        self._bodies = bodies

    def rows(self) -> Iterator[SourceRow]:
        for number, body in enumerate(self._bodies):
            yield SourceRow(number, f"rows:{number + 1}", body, msgspec.json.encode(body))


class BatchLab:
    """A batch of `bodies` in `folder`; each `run` is one driver."""

    def __init__(
        self,
        folder: Path,
        model: ServedModel,
        bodies: Sequence[Mapping[str, Any]],
        max_num_seqs: int = 16,
        url: str = COMPLETIONS,
    ) -> None:
        self.source = ListSource(bodies)
        self._folder = folder
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._url = url
        self.job = Job(
            rows=len(bodies),
            input_digest="d",
            model=model.model_id,
            fingerprint="f",
            settings="{}",
            created=CREATED,
            version="1",
        )

    def open(self) -> Ledger:
        return Ledger.open(self._folder, self.job, resume=True)

    async def run(
        self,
        lab: Lab,
        ledger: Ledger,
        source: TokenSource | None = None,
        tick: float = 0.002,
        share: float | None = None,
        **limits: Any,
    ) -> None:
        room = full_bounds(lab.dispatcher, self._max_num_seqs, 64)
        backlog = Backlog(room if share is None else BackgroundBounds(room, lab.dispatcher, share)).of("")
        ticker = Ticker([ledger.flush, backlog.adjust], tick)
        metrics = Metrics().of(self._model.model_id, ReplicaSetStats)
        rows = RowSource(source or lab.dispatcher, ledger, ticker, backlog.make_room)
        answers = Answers(self._model, rows, metrics)
        preparer = Preparer(self._model, "job", 0, CREATED)
        run = BatchLoop(self.source, self._task, preparer, answers, ledger, backlog, ticker, RunLimits(**limits))
        await run.run()

    def _task(self, row: SourceRow) -> Task:
        return Task(row.number, f"row-{row.number}", self._url, dict(row.fields))

    async def results(self, lab: Lab) -> list[RowDone]:
        """Run to the end, and return what every row came to."""
        ledger = self.open()
        try:
            await self.run(lab, ledger)
            return list(ledger.results())
        finally:
            ledger.close()


async def cut_off(work: asyncio.Task[None]) -> None:
    """End a driver in the middle of its work."""
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
