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

from cluster.admission.tenant import Tenant, tenant_salt
from cluster.batch.answers import Answers
from cluster.batch.backlog import Backlog
from cluster.batch.check import Checked, check_input
from cluster.batch.errors import InputError, UnreachableError
from cluster.batch.ledger.difference import difference
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.ledger.folder import JOB_FILE
from cluster.batch.ledger.ledger import Ledger, read_replicas
from cluster.batch.ledger.records import Job
from cluster.batch.openai_rows import OpenAIRows
from cluster.batch.prepare import Preparer
from cluster.batch.row_tokens import LoggedSource, RowSource
from cluster.batch.rows import SourceRow, Task
from cluster.batch.run import BatchRun, RunLimits
from cluster.batch.server import changes
from cluster.batch.server.ending import Ending, Opened, counts_of
from cluster.batch.server.errors import StoreError
from cluster.batch.server.lease import Lease, place_of
from cluster.batch.server.objects import BatchRecord, RequestCounts
from cluster.batch.server.private_folder import make_private
from cluster.batch.server.row_quotas import RowQuota, RowQuotas
from cluster.batch.server.store import Store
from cluster.batch.server.turns import Turns
from cluster.batch.server.windows import Windows
from cluster.batch.sources.found import InputFile
from cluster.batch.sources.lines import MAX_LINE_BYTES
from cluster.batch.sources.source import FileSource
from cluster.batch.ticks import Ticks
from cluster.errors import ApiError
from cluster.openai.checking import MAX_PRIORITY
from cluster.openai.served_model import ServedModel
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

    fingerprint: of the weights, for the job. seed: of rows that bring none. decisive: what decides answers beside
    the weights, as JSON has it (`cluster.batch.decisive`).
    """

    model: ServedModel
    source: LoggedSource
    backlog: Backlog
    metrics: ModelMetrics
    turns: Turns
    fingerprint: str
    seed: int
    decisive: Mapping[str, Any]


ModelOf = Callable[[str | None], BatchModel]


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
    """Sees one batch to its end. folder: for ledgers.

    model_of: finds a model by the name that rows use; raises `ApiError` where there is none. tenant_of: the tenant of
    a name, whose cache its rows use. max_line_bytes: that a row may have. windows: of the runner. private: whether
    the folder lies on this machine alone: runners elsewhere do not see it, and other users here must not open it.
    quotas: that rows are charged to; None = nobody has any.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        model_of: ModelOf,
        tenant_of: Callable[[str], Tenant] = Tenant,
        max_line_bytes: int = MAX_LINE_BYTES,
        windows: Windows | None = None,
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
        self._checks = Turns()
        self._checkers = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._lease: Lease | None = None
        self._ending = Ending(store, windows or Windows(store.root), time_of_day)

    async def run(self, batch_id: str) -> None:
        """Run a batch to its end. Raises `BusyError` when it is another runner's, `BatchError`, `OSError`."""
        epoch = await asyncio.to_thread(self._claimed, batch_id)
        with closing(epoch), ExitStack() as stack:
            epoch.keep_beating()
            lease = self._lease = self._lease or Lease(self._store.root, self._place())
            await asyncio.to_thread(stack.enter_context, lease.held())
            record = await self._taken(batch_id, lease)
            if record is None or record.ended:
                await asyncio.to_thread(epoch.remove_folder)
            elif record.outcome is not None:
                await asyncio.to_thread(self._ending.as_decided, record, epoch)
            elif self._ending.is_due(record):
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

    def _place(self) -> str:
        """Where no other machine sees the ledgers, whose they are has to be told beside them."""
        return place_of(self._folder) if self._private else ""

    async def _taken(self, batch_id: str, lease: Lease) -> BatchRecord | None:
        """Return a batch that no other runner changes from now on, None where there is none (any more)."""
        batches = self._store.batches
        record = await asyncio.to_thread(batches.read, batch_id)
        if record is None or record.ended or record.runner == lease.name:
            return record
        if record.runner:
            await lease.outlive(record.runner)
        return await asyncio.to_thread(batches.change, record, partial(changes.taken, runner=lease.name))

    def _opened(self, record: BatchRecord, epoch: Epoch) -> tuple[Opened, BatchModel] | None:
        """Check the input and open the ledger; None if the batch has failed over it."""
        try:
            source = self._source(record)
            model = self._model_of(_named_model(source))
            tasks = OfEndpoint(model.model.model_id, record.endpoint)
            checked = check_input(source, tasks, epoch.folder)
        except UnreachableError:
            raise  # trouble of ours: the batch is tried again
        except (InputError, ApiError) as error:
            self._ending.fail(record, error, epoch)
            return None
        job = _job(record, checked, model)
        return Opened(source, tasks, _ledger(epoch, job, model.source.fingerprint)), model

    def _end_as_it_is(self, record: BatchRecord, epoch: Epoch) -> None:
        """End a batch that is due with the answers that it has. That takes no model: it may be gone."""
        tasks = OfEndpoint(record.model or "", record.endpoint)
        try:
            source = self._source(record)
            job = _stored_job(epoch.folder) or _job(record, check_input(source, tasks, epoch.folder))
            with closing(_ledger(epoch, job)) as ledger:
                self._ending.finish(record, Opened(source, tasks, ledger))
        except UnreachableError:
            raise
        except (InputError, StoreError) as error:
            logger.warning("batch %s ends without files: %s", record.id, error)
            self._ending.without_files(record, epoch)

    def _source(self, record: BatchRecord) -> FileSource:
        stored = self._store.files.get(record.input_file_id, record.tenant)
        if stored is None:
            raise InputError("the input file is not there any more; upload it again")
        file = InputFile(self._store.files.place(stored), stored.filename, ".jsonl", "")
        return FileSource([file], self._max_line_bytes)

    async def _run(self, record: BatchRecord, opened: Opened, model: BatchModel, lease: Lease) -> None:
        ledger = opened.ledger
        if record.status == "validating":
            record = await asyncio.to_thread(self._ending.begin, record, ledger, model.model.model_id)
        if ledger.done.count < ledger.job.rows and not self._ending.is_due(record):
            record = await self._answered(record, opened, model, lease)
        await asyncio.to_thread(self._ending.finish, record, opened)

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
                if self._ending.is_due(record):
                    return record
        finally:
            rows.cancel()
            await asyncio.gather(rows, return_exceptions=True)

    def _noted(
        self, record: BatchRecord, counts: RequestCounts, waits_for: str | None, ledger: Ledger
    ) -> BatchRecord:
        """Return what became of `record`, and how far it is; told to readers where that is new."""
        ledger.check()  # who was taken for dead stops, also where nothing is new
        now = changes.counted(self._store.batches.follow(record), counts, waits_for)
        if now != record:
            self._store.batches.note(now)
        return now

    async def _rows(
        self, record: BatchRecord, opened: Opened, model: BatchModel, lease: Lease, quota: RowQuota
    ) -> None:
        ledger = opened.ledger
        async with model.turns.turn(record.tenant, record.id):
            backlog = model.backlog.of(record.tenant)
            ticks = Ticks([lease.check, ledger.flush, backlog.look])
            answers = Answers(model.model, RowSource(model.source, ledger, ticks, backlog.make_room), model.metrics)
            await BatchRun(
                opened.source,
                opened.tasks.task,
                self._preparer(record, ledger.job, model),
                answers,
                ledger,
                backlog,
                ticks,
                RunLimits(),
                quota,
            ).run()

    def _preparer(self, record: BatchRecord, job: Job, model: BatchModel) -> Preparer:
        """Rows use the cache of their tenant alone, at its cost, and come behind all requests of clients."""
        salt_of = partial(tenant_salt, self._tenant_of(record.tenant))
        priority = MAX_PRIORITY if model.model.by_priority else None
        return Preparer(model.model, job.digest, model.seed, job.created, salt_of, priority, record.id, record.tenant)


def _waits_for(record: BatchRecord, model: BatchModel, quota: RowQuota) -> str | None:
    """Return why no row of a batch begins now, None where none is told."""
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
    settings = {"batch": record.id, **(model.decisive if model else {})}  # two batches of one input draw apart
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
