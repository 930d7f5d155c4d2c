"""The end of one batch: each row's one result, the files for the client, and the status that never changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.batch.answers import failed
from cluster.batch.errors import InputError
from cluster.batch.ledger.epoch import Epoch
from cluster.batch.ledger.folder import OUTPUT_FILE
from cluster.batch.ledger.ledger import Ledger
from cluster.batch.output.spec import OutputSpec, Style
from cluster.batch.output.write import Finished, write_output
from cluster.batch.server import changes
from cluster.batch.server.ids import FILE_IDS
from cluster.batch.server.objects import BatchRecord, BatchUsage, LineError, RequestCounts
from cluster.batch.server.store import Store
from cluster.batch.sources.source import FileSource
from cluster.batch.tasks import TaskMaker
from cluster.errors import ApiError

EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"
FILES = ("output", "error")
ROWS_PER_FLUSH = 4096


@dataclass(frozen=True, slots=True)
class Opened:
    """A batch whose input can be read, and whose ledger is ours."""

    source: FileSource
    tasks: TaskMaker
    ledger: Ledger


class Ending:
    """Writes what batches leave. clock: seconds since 1970. All methods block."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    def is_due(self, record: BatchRecord) -> bool:
        """Whether a batch is to run no more, done or not."""
        return record.status == "cancelling" or self._clock() >= record.expires_at

    def finish(self, record: BatchRecord, opened: Opened) -> None:
        """Give every row its one result, write the output files, and end the batch.

        Raises `InputError` where rows are left though it is not due: the input has fewer than it had.
        """
        ledger = opened.ledger
        left = ledger.done.count < ledger.job.rows
        if left and not self.is_due(record):
            raise InputError(f"the input has not {ledger.job.rows} rows any more")
        if left:
            end_rest(ledger, CANCELLED if record.status == "cancelling" else EXPIRED)
        if record.status == "in_progress" and EXPIRED not in ledger.totals.errors:
            record = changes.finalizing(record, self.now(), counts_of(ledger))
            self.write(record, ledger.check)
        self._end(record, self._outcome(record, opened), EXPIRED in ledger.totals.errors, ledger.check)
        ledger.remove()

    def without_files(self, record: BatchRecord, epoch: Epoch) -> None:
        """End a batch that is due, and of which nothing can be told."""
        outcome = changes.Outcome(RequestCounts(record.request_counts.total))
        self._end(record, outcome, True, epoch.check)
        epoch.remove_folder()

    def fail(self, record: BatchRecord, error: Exception, epoch: Epoch) -> None:
        """End a batch that cannot be run."""
        code = error.code if isinstance(error, ApiError) else "invalid_input"
        fault = LineError(code=code, message=str(error))
        self._close(changes.failed(record, self.now(), [fault]), epoch.check)
        epoch.remove_folder()

    def _close(self, ended: BatchRecord, check: Callable[[], None]) -> None:
        """Keep the end of a batch, and no file that an earlier attempt left and that is not of it."""
        check()
        for kind in FILES:
            if (file_id := FILE_IDS.derived(ended.id, kind)) not in ended.file_ids:
                self._store.files.remove(file_id)
        self.write(ended, check)

    def write(self, record: BatchRecord, check: Callable[[], None]) -> None:
        """Keep a change of a batch that is still ours. check: raises `FencedError` where it is another runner's."""
        check()
        self._store.batches.write(record)

    def now(self) -> int:
        """Return the time in whole seconds."""
        return int(self._clock())

    def _end(self, record: BatchRecord, outcome: changes.Outcome, expired: bool, check: Callable[[], None]) -> None:
        if record.status == "cancelling":
            ended = changes.cancelled(record, self.now(), outcome)
        else:
            ended = (changes.expired if expired else changes.completed)(record, self.now(), outcome)
        self._close(ended, check)

    def _outcome(self, record: BatchRecord, opened: Opened) -> changes.Outcome:
        ledger = opened.ledger
        target = ledger.folder / OUTPUT_FILE
        batch = Finished(ledger.job, opened.source, opened.tasks, ledger.results())
        manifest = write_output(OutputSpec(str(target), Style.OPENAI), batch, ledger.folder, ledger.check)
        errors = None if manifest.error_file is None else target.with_name(manifest.error_file.name)
        totals = ledger.totals
        return changes.Outcome(
            counts_of(ledger),
            self._kept(record, target, "output") if target.stat().st_size else None,
            None if errors is None else self._kept(record, errors, "error"),
            BatchUsage(input_tokens=totals.prompt_tokens, output_tokens=totals.output_tokens),
        )

    def _kept(self, record: BatchRecord, path: Path, kind: str) -> str:
        """Keep a file for the client, in place of one of an attempt that was killed; return its id."""
        draft = self._store.files.draft()
        try:
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    draft.write(chunk)
            name = f"{record.id}_{kind}.jsonl"
            file_id = FILE_IDS.derived(record.id, kind)
            return self._store.files.add(draft, record.tenant, name, "batch_output", file_id).id
        finally:
            draft.discard()


def counts_of(ledger: Ledger) -> RequestCounts:
    """Return how far a batch is."""
    errors = ledger.totals.num_errors
    return RequestCounts(ledger.job.rows, ledger.done.count - errors, errors)


def end_rest(ledger: Ledger, code: str) -> None:
    """Give the rows that did not run to their end the error that says why. Holds few of them at a time."""
    message = "the batch was cancelled" if code == CANCELLED else "the batch's 24 hours were over"
    for row in range(ledger.job.rows):
        if row not in ledger.done:
            ledger.note_done(failed(row, ApiError(code, f"{message} before the row was done", status=503)))
        if row % ROWS_PER_FLUSH == 0:
            ledger.flush()
    ledger.flush()
