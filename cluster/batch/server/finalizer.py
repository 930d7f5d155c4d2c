"""The end of one batch: each row's one result, the files for the client, and the status that never changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from cluster.batch.errors import FencedError, IllegalChangeError, InputError, RowFaultsError
from cluster.batch.io.manifest import OutputSpec, Style
from cluster.batch.io.output_files import Finished, write_output
from cluster.batch.io.source import FileSource
from cluster.batch.ledger.epoch import OUTPUT_FILE, Epoch
from cluster.batch.ledger.ledger import Ledger
from cluster.batch.ledger.records import RowDone
from cluster.batch.row_tasks import TaskMaker
from cluster.batch.server.batch_store import Change
from cluster.batch.server.ids import output_ids
from cluster.batch.server.limits import CompletionWindows
from cluster.batch.server.objects import BatchRecord, BatchUsage, LineError, Outcome, RequestCounts, StoredFile
from cluster.batch.server.store import Store
from cluster.errors import ApiError

EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"
NEVER_ASKED = 0  # the status of a row that HTTP never answered
ROWS_PER_FLUSH = 4096
MAX_ERRORS = 16  # of a batch that failed; what it keeps is read by every list
MAX_MESSAGE = 1024  # characters of each

Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Opened:
    """A batch whose input can be read, and whose ledger is ours."""

    source: FileSource
    tasks: TaskMaker
    ledger: Ledger


class Finalizer:
    """Begins and ends batches in their runner's name. time_of_day: seconds since 1970. All methods block.

    Each raises `FencedError` where the batch is another runner's by now: then nothing was changed.
    """

    def __init__(self, store: Store, windows: CompletionWindows, time_of_day: Callable[[], float]) -> None:
        self._store = store
        self._windows = windows
        self._time_of_day = time_of_day

    def is_due(self, record: BatchRecord) -> bool:
        """Whether a batch is to run no more, done or not."""
        return record.status == "cancelling" or self._windows.is_over(record)

    def begin(self, record: BatchRecord, ledger: Ledger, model: str) -> BatchRecord:
        """Have the rows of a valid input run, unless the batch is cancelled meanwhile; return what became of it."""

        def to(now: BatchRecord) -> BatchRecord:
            return now if now.status == "cancelling" else now.begun(self._now(), ledger.job.rows, model)

        return self._changed(record, to, ledger.check)

    def finish(self, record: BatchRecord, opened: Opened) -> None:
        """Give every row its one result, write the output files, and end the batch.

        Raises `InputError` where rows are left though it is not due: the input has fewer than it had.
        """
        ledger = opened.ledger
        if ledger.done.count < ledger.job.rows:
            if not self.is_due(record):
                raise InputError(f"the input has not {ledger.job.rows} rows any more")
            end_rest(ledger, CANCELLED if record.status == "cancelling" else EXPIRED, record.errors)
        if EXPIRED not in ledger.totals.errors:
            record = self._finalizing(record, ledger)
        self._end(self._decided(record, opened), ledger.check)
        ledger.remove()

    def as_decided(self, record: BatchRecord, epoch: Epoch) -> None:
        """End a batch whose files are there: its runner was killed before it recorded that."""
        self._end(record, epoch.check)
        epoch.remove_folder()

    def without_files(self, record: BatchRecord, epoch: Epoch) -> None:
        """End a batch that is due, and of which nothing is known."""
        nothing = Outcome(RequestCounts(record.request_counts.total), expired=True)
        self._changed(record, lambda now: now.finished(self._now(), nothing), epoch.check)
        epoch.remove_folder()

    def fail(self, record: BatchRecord, error: Exception, epoch: Epoch) -> None:
        """End a batch that cannot be run; it is cancelled if its client wanted that."""

        def to(now: BatchRecord) -> BatchRecord:
            if now.status == "cancelling":
                return now.cancelled(self._now(), Outcome(RequestCounts(now.request_counts.total)))
            return now.failed(self._now(), line_errors(error))

        self._changed(record, to, epoch.check)
        epoch.remove_folder()

    def _now(self) -> int:
        return int(self._time_of_day())

    def _changed(self, record: BatchRecord, to: Change, check: Check) -> BatchRecord:
        """Keep a change of a batch. check: whether its ledger is ours, to know early; the store decides."""
        check()
        return self._store.batches.change(record, to)

    def _finalizing(self, record: BatchRecord, ledger: Ledger) -> BatchRecord:
        def to(now: BatchRecord) -> BatchRecord:
            counts = counts_of(ledger)
            running = now.status == "in_progress"
            return now.finalizing(self._now(), counts) if running else now.counted(counts)

        return self._changed(record, to, ledger.check)

    def _decided(self, record: BatchRecord, opened: Opened) -> BatchRecord:
        """Store the outcome of the batch: every later attempt to end it uses this one."""
        with ExitStack() as undo:
            outcome = self._outcome(record, opened, undo)
            try:
                decided = self._changed(record, partial(_decided_once, outcome=outcome), opened.ledger.check)
            except FencedError:
                raise
            except BaseException:
                undo.pop_all()  # it may be decided all the same: the store did not say
                raise
            undo.pop_all()
        return decided

    def _end(self, record: BatchRecord, check: Check) -> None:
        """End a batch as it was decided, and as its client was answered, even while its files were written."""
        outcome = record.outcome
        if outcome is None:
            raise IllegalChangeError(f"batch {record.id} cannot end before it is decided how")
        for file in outcome.files:
            self._store.files.publish(file)
        self._changed(record, lambda now: now.finished(self._now(), outcome), check)

    def _outcome(self, record: BatchRecord, opened: Opened, undo: ExitStack) -> Outcome:
        ledger, usage = opened.ledger, _Usage()
        target = ledger.folder / OUTPUT_FILE
        batch = Finished(ledger.job, opened.source, opened.tasks, usage.counted(ledger.results()))
        manifest = write_output(OutputSpec(str(target), Style.OPENAI), batch, ledger.folder, ledger.check)
        errors = None if manifest.error_file is None else target.with_name(manifest.error_file.name)
        output = self._kept(record, target, "output", undo) if target.stat().st_size else None
        failed = None if errors is None else self._kept(record, errors, "error", undo)
        return Outcome(
            counts_of(ledger),
            None if output is None else output.id,
            None if failed is None else failed.id,
            usage.total(),
            tuple(file for file in (output, failed) if file is not None),
            EXPIRED in ledger.totals.errors,
        )

    def _kept(self, record: BatchRecord, path: Path, kind: str, undo: ExitStack) -> StoredFile:
        """Keep a file for the client, beside those of attempts that were killed. `undo` removes it."""
        file_id = output_ids(record.id)[("output", "error").index(kind)]
        draft = self._store.files.draft()
        try:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    draft.write(chunk)
            name, seconds = f"{record.id}_{kind}.jsonl", record.output_expires_after
            kept = self._store.files.add_unpublished(draft, record.tenant, name, file_id, seconds)
        finally:
            draft.discard()
        undo.callback(self._store.files.remove_unpublished, kept)
        return kept


def _decided_once(record: BatchRecord, outcome: Outcome) -> BatchRecord:
    """Two attempts of one runner may meet, where the first was stopped in the middle of this."""
    if record.outcome is not None:
        raise FencedError(f"what batch {record.id} leaves was decided by another attempt")
    return record.decided(outcome)


class _Usage:
    """Sums what the rows of a batch took, as they pass."""

    def __init__(self) -> None:
        self._input = self._cached = self._output = self._reasoning = 0

    def counted(self, results: Iterable[RowDone]) -> Iterator[RowDone]:
        """Yield them."""
        for done in results:
            self._input += done.prompt_tokens
            self._cached += done.cached_tokens
            self._output += done.output_tokens
            self._reasoning += done.reasoning_tokens
            yield done

    def total(self) -> BatchUsage:
        """Return the sums so far."""
        return BatchUsage(
            input_tokens=self._input,
            cached_tokens=self._cached,
            output_tokens=self._output,
            reasoning_tokens=self._reasoning,
        )


def line_errors(error: Exception) -> list[LineError]:
    """Return why a batch cannot be run: an entry for each row at fault, few and short ones."""
    if isinstance(error, RowFaultsError):
        faults = [(one.text, one.line) for one in error.faults]
        faults += [(f"{error.more} more rows are at fault", None)] if error.more else []
    else:
        faults = [(str(error), None)]
    code = error.code if isinstance(error, ApiError) else "invalid_input"
    return [LineError(code=code, message=_short(text), line=line) for text, line in faults[:MAX_ERRORS]]


def _short(text: str) -> str:
    """Return a message whose end, which names places, is kept as well."""
    half = MAX_MESSAGE // 2
    return text if len(text) <= MAX_MESSAGE else f"{text[:half]} ... {text[-half:]}"


def counts_of(ledger: Ledger) -> RequestCounts:
    """Return how far a batch is."""
    errors = ledger.totals.num_errors
    return RequestCounts(ledger.job.rows, ledger.done.count - errors, errors)


def end_rest(ledger: Ledger, code: str, why: Sequence[LineError] = ()) -> None:
    """Give the rows that did not run to their end the error that says why. Holds few of them at a time.

    why: the server cancelled the batch; none where its client did.
    """
    message = "the batch was cancelled" if code == CANCELLED else "the batch's 24 hours were over"
    reason = "".join([f": {one.message}" for one in why[:1]])
    body = msgspec.json.encode(ApiError(code, f"{message} before the row was done{reason}", status=503).body())
    for row in range(ledger.job.rows):
        if row not in ledger.done:
            ledger.note_done(RowDone(row, NEVER_ASKED, body, code=code))
        if row % ROWS_PER_FLUSH == 0:
            ledger.flush()
    ledger.flush()
