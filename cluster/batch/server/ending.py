"""The end of one batch: each row's one result, the files for the client, and the status that never changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cluster.batch.errors import InputError, RowFaultsError
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.ledger.folder import OUTPUT_FILE
from cluster.batch.ledger.ledger import Ledger
from cluster.batch.ledger.records import RowDone
from cluster.batch.output.spec import OutputSpec, Style
from cluster.batch.output.write import Finished, write_output
from cluster.batch.server import changes
from cluster.batch.server.ids import output_ids
from cluster.batch.server.objects import BatchRecord, BatchUsage, LineError, RequestCounts
from cluster.batch.server.store import Store
from cluster.batch.sources.source import FileSource
from cluster.batch.tasks import TaskMaker
from cluster.errors import ApiError

EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"
NEVER_ASKED = 0  # the status of a row that HTTP never answered
ROWS_PER_FLUSH = 4096
MAX_ERRORS = 16  # of a batch that failed; what it keeps is read by every list
MAX_MESSAGE = 1024  # characters of each

Check = Callable[[], None]
End = Callable[[BatchRecord, int, changes.Outcome], BatchRecord]


@dataclass(frozen=True, slots=True)
class Opened:
    """A batch whose input can be read, and whose ledger is ours."""

    source: FileSource
    tasks: TaskMaker
    ledger: Ledger


class Ending:
    """Writes what batches leave. clock: seconds since 1970. All methods block.

    check, in an epoch or its ledger: raises `FencedError` where the batch is another runner's by now.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    def now(self) -> int:
        """Return the time in whole seconds."""
        return int(self._clock())

    def is_due(self, record: BatchRecord) -> bool:
        """Whether a batch is to run no more, done or not."""
        return record.is_due(self._clock())

    def as_asked(self, record: BatchRecord) -> BatchRecord:
        """Return a batch, `cancelling` if its client wants that."""
        return changes.as_asked(record, self._store.batches.cancel_asked_at(record.id))

    def write(self, record: BatchRecord, check: Check) -> None:
        """Keep a change of a batch that is still ours."""
        check()
        self._store.batches.write(record)

    def finish(self, record: BatchRecord, opened: Opened) -> None:
        """Give every row its one result, write the output files, and end the batch.

        Raises `InputError` where rows are left though it is not due: the input has fewer than it had.
        """
        ledger = opened.ledger
        if ledger.done.count < ledger.job.rows:
            if not self.is_due(record):
                raise InputError(f"the input has not {ledger.job.rows} rows any more")
            end_rest(ledger, CANCELLED if record.status == "cancelling" else EXPIRED)
        expired = EXPIRED in ledger.totals.errors
        if record.status == "in_progress" and not expired:
            record = changes.finalizing(record, self.now(), counts_of(ledger))
            self.write(record, ledger.check)
        outcome = self._outcome(record, opened)
        self._end(record, outcome, changes.expired if expired else changes.completed, ledger.check)
        ledger.remove()

    def without_files(self, record: BatchRecord, epoch: Epoch) -> None:
        """End a batch that is due, and of which nothing can be told."""
        self._end(record, changes.Outcome(RequestCounts(record.request_counts.total)), changes.expired, epoch.check)
        epoch.remove_folder()

    def fail(self, record: BatchRecord, error: Exception, epoch: Epoch) -> None:
        """End a batch that cannot be run."""
        asked = self.as_asked(record)
        if asked.status == "cancelling":
            self.without_files(asked, epoch)
            return
        self._close(changes.failed(record, self.now(), line_errors(error)), epoch.check)
        epoch.remove_folder()

    def _end(self, record: BatchRecord, outcome: changes.Outcome, otherwise: End, check: Check) -> None:
        """End a batch as its client was told, even while its files were written: cancelled, `otherwise` if not."""
        record = self.as_asked(record)
        end = changes.cancelled if record.status == "cancelling" else otherwise
        self._close(end(record, self.now(), outcome), check)

    def _close(self, ended: BatchRecord, check: Check) -> None:
        """Keep the end of a batch, and no file that an earlier attempt left and that is not of it."""
        check()
        for file_id in output_ids(ended.id):
            if file_id not in ended.file_ids:
                self._store.files.remove(file_id)
        self.write(ended, check)

    def _outcome(self, record: BatchRecord, opened: Opened) -> changes.Outcome:
        ledger, usage = opened.ledger, _Usage()
        target = ledger.folder / OUTPUT_FILE
        batch = Finished(ledger.job, opened.source, opened.tasks, usage.counted(ledger.results()))
        manifest = write_output(OutputSpec(str(target), Style.OPENAI), batch, ledger.folder, ledger.check)
        errors = None if manifest.error_file is None else target.with_name(manifest.error_file.name)
        output_id, error_id = output_ids(record.id)
        return changes.Outcome(
            counts_of(ledger),
            self._kept(record, target, "output", output_id) if target.stat().st_size else None,
            None if errors is None else self._kept(record, errors, "error", error_id),
            usage.total(),
        )

    def _kept(self, record: BatchRecord, path: Path, kind: str, file_id: str) -> str:
        """Keep a file for the client, in place of one of an attempt that was killed; return its id."""
        draft = self._store.files.draft()
        try:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    draft.write(chunk)
            name = f"{record.id}_{kind}.jsonl"
            return self._store.files.add(draft, record.tenant, name, "batch_output", file_id).id
        finally:
            draft.discard()


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
    """Return what a batch tells of why it cannot be run: an entry for each row at fault, few and short ones."""
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


def end_rest(ledger: Ledger, code: str) -> None:
    """Give the rows that did not run to their end the error that says why. Holds few of them at a time."""
    message = "the batch was cancelled" if code == CANCELLED else "the batch's 24 hours were over"
    body = msgspec.json.encode(ApiError(code, f"{message} before the row was done", status=503).body())
    for row in range(ledger.job.rows):
        if row not in ledger.done:
            ledger.note_done(RowDone(row, NEVER_ASKED, body, code=code))
        if row % ROWS_PER_FLUSH == 0:
            ledger.flush()
    ledger.flush()
