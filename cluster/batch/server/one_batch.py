"""One batch on the server, from its input to its output files, through whatever its runner dies of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cluster.batch.answers import Answers, failed
from cluster.batch.backlog import Backlog, Bounds
from cluster.batch.check import Checked, check_input
from cluster.batch.errors import InputError
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.ledger.ledger import Ledger
from cluster.batch.ledger.records import Job
from cluster.batch.openai_rows import OpenAIRows
from cluster.batch.output.spec import OutputSpec, Style
from cluster.batch.output.write import Finished, write_output
from cluster.batch.prepare import Preparer
from cluster.batch.row_tokens import LoggedSource, RowSource
from cluster.batch.rows import SourceRow, Task
from cluster.batch.run import BatchRun, RunLimits
from cluster.batch.server import changes
from cluster.batch.server.objects import BatchRecord, BatchUsage, LineError, RequestCounts
from cluster.batch.server.store import Store
from cluster.batch.sources.found import InputFile
from cluster.batch.sources.source import FileSource
from cluster.batch.ticks import Ticks
from cluster.errors import ApiError
from cluster.metrics import ModelMetrics
from cluster.openai.served_model import ServedModel

WATCH_SECONDS = 1.0  # between two looks at wishes and time, and two notes of how far it is
LEDGER = "ledger"


@dataclass(frozen=True, slots=True)
class BatchModel:
    """A model as batches use it. turn: held while rows run, so that batches of a model run one after the other.

    fingerprint: of the model, for the job. seed: of rows that bring none.
    """

    model: ServedModel
    source: LoggedSource
    bounds: Bounds
    metrics: ModelMetrics
    turn: AbstractAsyncContextManager[None]
    fingerprint: str
    seed: int


ModelOf = Callable[[str | None], BatchModel]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A batch whose input is valid, and whose ledger is ours."""

    source: FileSource
    tasks: OfEndpoint
    ledger: Ledger
    model: BatchModel


class OfEndpoint(OpenAIRows):
    """Rows of one endpoint: others are told so."""

    def __init__(self, model: str, endpoint: str) -> None:
        super().__init__(model)
        self._endpoint = endpoint

    def task(self, row: SourceRow) -> Task:
        """See `TaskMaker.task`."""
        task = super().task(row)
        if task.problem or task.url == self._endpoint:
            return task
        problem = f"url must be {self._endpoint}, the endpoint of the batch, not {task.url}"
        return Task(task.row, task.custom_id, task.url, task.body, problem, "url")


class OneBatch:
    """Sees one batch to its end. folder: for ledgers, on a disk that the next runner sees as well.

    model_of: finds a model by the name that rows use; raises `ApiError` where there is none.
    """

    def __init__(self, store: Store, folder: Path, model_of: ModelOf, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._folder = folder
        self._model_of = model_of
        self._clock = clock

    async def run(self, batch_id: str) -> None:
        """Run a batch to its end. Raises `BusyError` when it is another runner's, `LedgerError`, `OSError`."""
        folder = self._folder / batch_id
        epoch = await asyncio.to_thread(_claimed, folder)
        with closing(epoch):
            record = await asyncio.to_thread(self._store.batches.read, batch_id)
            if record is None or record.ended:
                await asyncio.to_thread(epoch.remove_folder)
                return
            opened = await asyncio.to_thread(self._opened, record, epoch)
            if opened is None:
                return
            with closing(opened.ledger):
                await self._run(record, opened)

    def _opened(self, record: BatchRecord, epoch: Epoch) -> _Opened | None:
        """Check the input and open the ledger; None if the batch has failed over it."""
        stored = self._store.files.get(record.input_file_id, record.tenant)
        try:
            if stored is None:
                raise InputError("the input file is not there any more; upload it again")
            source = FileSource([InputFile(self._store.files.place(stored), stored.filename, ".jsonl", "")])
            model = self._model_of(_named_model(source))
            tasks = OfEndpoint(model.model.model_id, record.endpoint)
            checked = check_input(source, tasks, epoch.folder)
        except (InputError, ApiError) as error:
            code = error.code if isinstance(error, ApiError) else "invalid_input"
            fault = LineError(code=code, message=str(error))
            self._store.batches.write(changes.failed(record, self._now(), [fault]))
            epoch.remove_folder()
            return None
        ledger = Ledger.within(epoch, _job(record, checked, model))
        return _Opened(source, tasks, ledger, model)

    async def _run(self, record: BatchRecord, opened: _Opened) -> None:
        ledger, batches = opened.ledger, self._store.batches
        if record.status == "validating":
            record = changes.begun(record, self._now(), ledger.job.rows, opened.model.model.model_id)
            await asyncio.to_thread(batches.write, record)
        if record.status != "finalizing" and ledger.done.count < ledger.job.rows:
            record = await self._answered(record, opened)
        await asyncio.to_thread(self._finish, record, opened)

    async def _answered(self, record: BatchRecord, opened: _Opened) -> BatchRecord:
        """Run the rows until all are done, the client wants no more, or the time is over."""
        rows = asyncio.create_task(self._rows(opened))
        try:
            while True:
                done, _ = await asyncio.wait([rows], timeout=WATCH_SECONDS)
                if done:
                    rows.result()
                    return record
                record = changes.counted(record, _counts(opened.ledger))
                asked = await asyncio.to_thread(self._store.batches.cancel_asked_at, record.id)
                if asked is not None and record.status != "cancelling":
                    record = changes.cancelling(record, asked)
                await asyncio.to_thread(self._store.batches.write, record)
                if asked is not None or self._clock() >= record.expires_at:
                    return record
        finally:
            rows.cancel()
            await asyncio.gather(rows, return_exceptions=True)

    async def _rows(self, opened: _Opened) -> None:
        model, ledger = opened.model, opened.ledger
        async with model.turn:
            backlog = Backlog(model.bounds)
            ticks = Ticks([ledger.flush, backlog.look])
            answers = Answers(model.model, RowSource(model.source, ledger, ticks, backlog.make_room), model.metrics)
            preparer = Preparer(model.model, ledger.job.digest, model.seed, ledger.job.created)
            await BatchRun(
                opened.source, opened.tasks.task, preparer, answers, ledger, backlog, ticks, RunLimits()
            ).run()

    def _finish(self, record: BatchRecord, opened: _Opened) -> None:
        """Give every row its one result, write the output files, and end the batch."""
        ledger, now = opened.ledger, self._now()
        whole = ledger.done.count == ledger.job.rows
        if not whole:
            code = "batch_cancelled" if record.status == "cancelling" else "batch_expired"
            _end_rest(ledger, code)
        if whole and record.status == "in_progress":
            record = changes.finalizing(record, now, _counts(ledger))
            self._store.batches.write(record)
        outcome = self._outcome(record, opened)
        end = {"finalizing": changes.completed, "cancelling": changes.cancelled}.get(record.status, changes.expired)
        ledger.check()
        self._store.batches.write(end(record, self._now(), outcome))
        ledger.remove()

    def _outcome(self, record: BatchRecord, opened: _Opened) -> changes.Outcome:
        ledger = opened.ledger
        target = ledger.folder / "output.jsonl"
        batch = Finished(ledger.job, opened.source, opened.tasks, ledger.results())
        manifest = write_output(OutputSpec(str(target), Style.OPENAI), batch, ledger.folder, ledger.check)
        errors = None if manifest.error_file is None else target.with_name(manifest.error_file.name)
        totals = ledger.totals
        return changes.Outcome(
            _counts(ledger),
            self._kept(record, target, "output") if target.stat().st_size else None,
            None if errors is None else self._kept(record, errors, "error"),
            BatchUsage(input_tokens=totals.prompt_tokens, output_tokens=totals.output_tokens),
        )

    def _kept(self, record: BatchRecord, path: Path, kind: str) -> str:
        """Keep a file for the client; return its id."""
        draft = self._store.files.draft()
        try:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    draft.write(chunk)
            name = f"{record.id}_{kind}.jsonl"
            return self._store.files.add(draft, record.tenant, name, "batch_output").id
        finally:
            draft.discard()

    def _now(self) -> int:
        return int(self._clock())


def _claimed(folder: Path) -> Epoch:
    folder.mkdir(parents=True, exist_ok=True)
    return Epoch(folder)


def _named_model(source: FileSource) -> str | None:
    """Return the model that the first row names: a batch has one."""
    for row in source.rows():
        if row.fields is not None:
            body = row.fields.get("body")
            name = body.get("model") if isinstance(body, dict) else None
            return name if isinstance(name, str) else None
    return None


def _job(record: BatchRecord, checked: Checked, model: BatchModel) -> Job:
    return Job(
        rows=checked.rows,
        input_digest=checked.digest,
        model=model.model.model_id,
        fingerprint=model.fingerprint,
        settings=record.id,  # two batches of one input draw apart
        created=record.created_at,
        version=version("squadron"),
    )


def _counts(ledger: Ledger) -> RequestCounts:
    errors = ledger.totals.num_errors
    return RequestCounts(ledger.job.rows, ledger.done.count - errors, errors)


def _end_rest(ledger: Ledger, code: str) -> None:
    """Give the rows that did not run to their end the error that says why."""
    message = "the batch was cancelled" if code == "batch_cancelled" else "the batch's 24 hours were over"
    for row in range(ledger.job.rows):
        if row not in ledger.done:
            ledger.note_done(failed(row, ApiError(code, f"{message} before the row was done", status=503)))
    ledger.flush()
