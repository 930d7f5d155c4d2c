"""One batch on the server, from its input to its output files, through whatever its runner dies of."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cluster.admission.keys import Tenant
from cluster.admission.tenants import tenant_salt
from cluster.batch.errors import InputError, StoreError, UnreachableError
from cluster.batch.io.check import Checked, check_input
from cluster.batch.io.paths import InputFile
from cluster.batch.io.reading import MAX_LINE_BYTES
from cluster.batch.io.source import FileSource
from cluster.batch.ledger.epoch import JOB_FILE, Epoch, make_private
from cluster.batch.ledger.ledger import Ledger, read_replicas
from cluster.batch.ledger.records import Job, difference
from cluster.batch.row_requests import Preparer
from cluster.batch.row_tasks import OpenAIRows
from cluster.batch.rows import SourceRow, Task
from cluster.batch.run.backlog import Backlog
from cluster.batch.run.loop import BatchLoop, RunLimits
from cluster.batch.run.run_row import Answers, RowSource, Ticker, TokenLogSource
from cluster.batch.server.batch_runner import TenantTurns
from cluster.batch.server.finalizer import Finalizer, Opened, counts_of
from cluster.batch.server.lease import Lease, ledger_site
from cluster.batch.server.limits import CompletionWindows, RowQuota, RowQuotas
from cluster.batch.server.objects import BatchRecord, RequestCounts
from cluster.batch.server.store import Store
from cluster.errors import ApiError
from cluster.openai.served_model import ServedModel
from cluster.openai.validation import MAX_PRIORITY
from cluster.private_files import make_folder
from cluster.telemetry.metrics import ModelMetrics
from engine.loader.fingerprint import weights_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

CHECKS_AT_ONCE = 2  # inputs, of different tenants
WATCH_SECONDS = 1.0  # between two looks at wishes and time, and two notes of how far it is


@dataclass(frozen=True, slots=True)
class BatchModel:
    """A model as batches use it. backlog: the rows of all of them. turns: of the batches of each tenant.

    fingerprint: of the weights, for the job. seed: of rows that bring none. answer_settings: what decides answers
    beside the weights, as JSON has it.
    """

    model: ServedModel
    source: TokenLogSource
    backlog: Backlog
    metrics: ModelMetrics
    turns: TenantTurns
    fingerprint: str
    seed: int
    answer_settings: Mapping[str, Any]


ModelOf = Callable[[str | None], BatchModel]


class EndpointRows(OpenAIRows):
    """Rows of one endpoint; rows of others are refused."""

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
    """Sees one batch to its end. folder: for ledgers.

    model_of: finds a model by the name that rows use; raises `ApiError` where there is none. tenant_of: the tenant of
    a name, whose cache its rows use. max_line_bytes: that a row may have. windows: of the runner. private: whether
    the folder lies on this machine alone: runners elsewhere do not see it, and other users here must not open it.
    quotas: that rows are charged to; None = no tenant has one.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        model_of: ModelOf,
        tenant_of: Callable[[str], Tenant] = Tenant,
        max_line_bytes: int = MAX_LINE_BYTES,
        windows: CompletionWindows | None = None,
        private: bool = False,
        time_of_day: Callable[[], float] = time.time,
        quotas: RowQuotas | None = None,
    ) -> None:
        self._store = store
        self._folder = folder
        self._model_of = model_of
        self._tenant_of = tenant_of
        self._max_line_bytes = max_line_bytes
        self._private = private
        self._quotas = quotas or RowQuotas()
        self._checks = TenantTurns()
        self._checkers = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._lease: Lease | None = None
        self._finalizer = Finalizer(store, windows or CompletionWindows(store.root), time_of_day)

    async def run(self, batch_id: str) -> None:
        """Run a batch to its end. Raises `BusyError` when it is another runner's, `BatchError`, `OSError`."""
        epoch = await asyncio.to_thread(self._claimed, batch_id)
        with closing(epoch), ExitStack() as stack:
            epoch.keep_beating()
            lease = self._lease = self._lease or Lease(self._store.root, self._site())
            await asyncio.to_thread(stack.enter_context, lease.held())
            record = await self._taken(batch_id, lease)
            if record is None or record.ended:
                await asyncio.to_thread(epoch.remove_folder)
            elif record.outcome is not None:
                await asyncio.to_thread(self._finalizer.as_decided, record, epoch)
            elif self._finalizer.is_due(record):
                await self._in_turn(record, partial(self._end_as_it_is, record, epoch))
            elif found := await self._in_turn(record, partial(self._opened, record, epoch)):
                with closing(found[0].ledger):
                    await self._run(record, *found, lease)

    async def _in_turn(self, record: BatchRecord, act: Callable[[], T]) -> T:
        """Do what may read a whole input, in a thread: one tenant's inputs must not take all threads from others."""
        async with self._checks.turn(record.tenant, record.id), self._checkers:
            return await asyncio.to_thread(act)

    def _claimed(self, batch_id: str) -> Epoch:
        if self._private:
            make_private(self._folder)
        folder = self._folder / batch_id
        make_folder(self._folder)
        make_folder(folder)
        return Epoch(folder)

    def _site(self) -> str:
        """Where no other machine sees the ledgers, whose they are has to be written beside them."""
        return ledger_site(self._folder) if self._private else ""

    async def _taken(self, batch_id: str, lease: Lease) -> BatchRecord | None:
        """Return a batch that no other runner changes from now on, None where there is none (any more)."""
        batches = self._store.batches
        record = await asyncio.to_thread(batches.read, batch_id)
        if record is None or record.ended or record.runner == lease.name:
            return record
        if record.runner:
            await lease.outlive(record.runner)
        return await asyncio.to_thread(batches.change, record, lambda one: one.taken(lease.name))

    def _opened(self, record: BatchRecord, epoch: Epoch) -> tuple[Opened, BatchModel] | None:
        """Check the input and open the ledger; None if the batch has failed over it."""
        try:
            source = self._source(record)
            model = self._model_of(_named_model(source))
            tasks = EndpointRows(model.model.model_id, record.endpoint)
            checked = check_input(source, tasks, epoch.folder)
        except UnreachableError:
            raise  # trouble of ours: the batch is tried again
        except (InputError, ApiError) as error:
            self._finalizer.fail(record, error, epoch)
            return None
        job = _job(record, checked, model)
        return Opened(source, tasks, _ledger(epoch, job, model.source.fingerprint)), model

    def _end_as_it_is(self, record: BatchRecord, epoch: Epoch) -> None:
        """End a batch that is due with the answers that it has. That takes no model: it may be gone."""
        tasks = EndpointRows(record.model or "", record.endpoint)
        try:
            source = self._source(record)
            job = _stored_job(epoch.folder) or _job(record, check_input(source, tasks, epoch.folder))
            with closing(_ledger(epoch, job)) as ledger:
                self._finalizer.finish(record, Opened(source, tasks, ledger))
        except UnreachableError:
            raise
        except (InputError, StoreError) as error:
            logger.warning("batch %s ends without files: %s", record.id, error)
            self._finalizer.without_files(record, epoch)

    def _source(self, record: BatchRecord) -> FileSource:
        stored = self._store.files.get(record.input_file_id, record.tenant)
        if stored is None:
            raise InputError("the input file is not there any more; upload it again")
        file = InputFile(self._store.files.place(stored), stored.filename, ".jsonl", "")
        return FileSource([file], self._max_line_bytes)

    async def _run(self, record: BatchRecord, opened: Opened, model: BatchModel, lease: Lease) -> None:
        ledger = opened.ledger
        if record.status == "validating":
            record = await asyncio.to_thread(self._finalizer.begin, record, ledger, model.model.model_id)
        if ledger.done.count < ledger.job.rows and not self._finalizer.is_due(record):
            record = await self._answered(record, opened, model, lease)
        await asyncio.to_thread(self._finalizer.finish, record, opened)

    async def _answered(self, record: BatchRecord, opened: Opened, model: BatchModel, lease: Lease) -> BatchRecord:
        """Run the rows until all are done, the client wants no more, or the time is over."""
        quota = self._quotas.of(record.tenant)
        rows = asyncio.create_task(self._rows(record, opened, model, lease, quota))
        try:
            while True:
                done, _ = await asyncio.wait([rows], timeout=WATCH_SECONDS)
                if done:
                    rows.result()
                    return record
                waits_for = _waits_for(record, model, quota)
                counts = counts_of(opened.ledger)
                record = await asyncio.to_thread(self._noted, record, counts, waits_for, opened.ledger)
                if self._finalizer.is_due(record):
                    return record
        finally:
            rows.cancel()
            await asyncio.gather(rows, return_exceptions=True)

    def _noted(
        self, record: BatchRecord, counts: RequestCounts, waits_for: str | None, ledger: Ledger
    ) -> BatchRecord:
        """Return what became of `record`, and how far it is; passed to readers where that is new."""
        ledger.check()  # who was taken for dead stops, also where nothing is new
        now = self._store.batches.follow(record).counted(counts, waits_for)
        if now != record:
            self._store.batches.note(now)
        return now

    async def _rows(
        self, record: BatchRecord, opened: Opened, model: BatchModel, lease: Lease, quota: RowQuota
    ) -> None:
        ledger = opened.ledger
        async with model.turns.turn(record.tenant, record.id):
            backlog = model.backlog.of(record.tenant)
            ticker = Ticker([lease.check, ledger.flush, backlog.adjust])
            answers = Answers(model.model, RowSource(model.source, ledger, ticker, backlog.make_room), model.metrics)
            await BatchLoop(
                opened.source,
                opened.tasks.task,
                self._preparer(record, ledger.job, model),
                answers,
                ledger,
                backlog,
                ticker,
                RunLimits(),
                quota,
            ).run()

    def _preparer(self, record: BatchRecord, job: Job, model: BatchModel) -> Preparer:
        """Rows use the cache of their tenant alone, at its cost, and come behind all requests of clients."""
        salt_of = partial(tenant_salt, self._tenant_of(record.tenant))
        priority = MAX_PRIORITY if model.model.by_priority else None
        return Preparer(model.model, job.digest, model.seed, job.created, salt_of, priority, record.id, record.tenant)


def _waits_for(record: BatchRecord, model: BatchModel, quota: RowQuota) -> str | None:
    """Return why no row of a batch begins now, None where none is known."""
    before = model.turns.running(record.tenant)
    if before in (None, record.id):
        return quota.waits_for
    return f"batch {before} of tenant {record.tenant}, which runs first"


def _named_model(source: FileSource) -> str | None:
    """Return the model that the first row names: a batch has one."""
    for row in source.rows():
        if row.fields is not None:
            body = row.fields.get("body")
            name = body.get("model") if isinstance(body, dict) else None
            return name if isinstance(name, str) else None
    return None


def _job(record: BatchRecord, checked: Checked, model: BatchModel | None = None) -> Job:
    """Return the job of a batch. model: None = no row is to run any more."""
    settings = {"batch": record.id, **(model.answer_settings if model else {})}  # two batches of one input draw apart
    return Job(
        rows=checked.rows,
        input_digest=checked.digest,
        model=model.model.model_id if model else "",
        fingerprint=model.fingerprint if model else "",
        settings=msgspec.json.encode(settings).decode(),
        created=record.created_at,
        version=version("squadron"),
    )


def _ledger(epoch: Epoch, job: Job, replicas: str | None = None) -> Ledger:
    """Open the ledger; one of another job, such as of weights that have changed since, begins anew.

    replicas: the fingerprint that they tell, None where that is not known.
    """
    stored, had = _stored_job(epoch.folder), read_replicas(epoch.folder)
    changed = stored and difference(stored, job)
    if changed is None and replicas and had and weights_of(replicas) != weights_of(had):
        changed = "the replicas' model was changed"
    if stored is None or changed is not None:
        if stored is not None:
            logger.warning("%s begins anew: %s", epoch.folder, changed)
        epoch.check()
        (epoch.folder / JOB_FILE).unlink(missing_ok=True)  # what is left counts for nothing
    with ExitStack() as undo:
        ledger = undo.enter_context(closing(Ledger.within(epoch, job)))
        if replicas is not None and ledger.replicas is not None:
            ledger.agree_on(replicas)
        undo.pop_all()
    return ledger


def _stored_job(folder: Path) -> Job | None:
    """Return the job of a ledger, None where there is none, or a damaged one."""
    try:
        return msgspec.json.decode((folder / JOB_FILE).read_bytes(), type=Job)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
