"""From the results of a batch to its files: each row once, whole files only, the same bytes every time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cluster.batch.errors import BatchError, InputError
from cluster.batch.io.answer_formats import OpenAILines, answer_columns
from cluster.batch.io.manifest import LINES, Manifest, OutputSpec, Style, manifest_bytes, refuse_replacing
from cluster.batch.io.output_tables import (
    CsvTable,
    JsonTable,
    ParquetTable,
    Table,
    arrow_library,
    arrow_types,
    column_names,
)
from cluster.batch.io.paths import is_url, local_path
from cluster.batch.io.places import (
    CLAIM,
    ERRORS,
    MANIFEST,
    TRIAL,
    ByteSink,
    DraftPaths,
    described,
    open_draft,
    place_of,
)
from cluster.batch.ledger.ledger import Totals
from cluster.batch.ledger.records import OK, Job, RowDone
from cluster.batch.row_tasks import TaskMaker, default_id
from cluster.batch.rows import InputSource, SourceRow


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch whose rows all have their results. results: in the order of the input, from the first row on."""

    job: Job
    source: InputSource
    tasks: TaskMaker
    results: Iterator[RowDone]


def write_output(spec: OutputSpec, batch: Finished, drafts: Path, check: Callable[[], None]) -> Manifest:
    """Write the output, the file of errors where there are any, and last the manifest; return it.

    Rows with an answer are in the output, the others in `OUTPUT.errors.jsonl`. A run that is killed leaves either
    drafts or whole files, and writes the same bytes when it is run again; what is there without a manifest is not to
    be believed. drafts: a folder for drafts of an output behind a URL. check: called before a file is put in place;
    raises when another driver took over. Raises `BatchError` when something cannot be written, or would replace what
    no batch put there, and `InputError` when the input is not what the results are of.
    """
    try:
        with _Publishing(spec, drafts, check) as publishing:
            output, errors = publishing.draft(""), publishing.draft(ERRORS)
            totals = _write_rows(spec, batch, output, errors)
            return publishing.publish(batch.job, totals, output, errors)
    except OSError as error:
        raise BatchError(
            f"{spec.target} cannot be written ({error.strerror or error}); make room there and run the same command "
            "with --resume: what was done so far is kept"
        ) from error


def try_output(target: str) -> None:
    """See whether an output can be put in place: before any work, with an empty file that is removed again.

    Folders that had to be made go with it. Raises `BatchError` where it cannot.
    """
    place = place_of(target)
    try:
        with tempfile.TemporaryDirectory() as folder, _made_folders_removed(target):
            draft = DraftPaths(target, Path(folder)).new(TRIAL)
            try:
                draft.touch()
                place.put(draft, TRIAL)
            finally:
                draft.unlink(missing_ok=True)
            place.remove(TRIAL)
    except Exception as error:  # whatever a library for URLs raises
        reason = getattr(error, "strerror", None) or error
        raise BatchError(f"{target} cannot be written ({reason}): name an output that can be") from error


@contextmanager
def _made_folders_removed(target: str) -> Iterator[None]:
    path = None if is_url(target) else Path(local_path(target))
    missing = [one for one in path.parents if not one.exists()] if path else []
    yield
    for folder in missing:
        folder.rmdir()


def _write_rows(spec: OutputSpec, batch: Finished, output: Path, errors: Path) -> Totals:
    lines, totals = OpenAILines(batch.job), Totals()
    with open_draft(output, spec.compression) as to_output, open_draft(errors) as to_errors:
        answers = _answers(spec, batch, lines, to_output)
        for row, done in _side_by_side(batch):
            totals.add(done)
            if done.status == OK:
                answers.add(row, done)
            else:
                place = row.place if batch.tasks.reports_places else None
                to_errors.write(lines.error(done, _id(batch.tasks, row), place))
        answers.close()
    return totals


def _side_by_side(batch: Finished) -> Iterator[tuple[SourceRow, RowDone]]:
    number = 0
    with closing(_generated(batch.source)) as rows:
        for number, done in enumerate(batch.results, start=1):
            row = next(rows, None)
            if row is None or row.number != done.row:
                raise InputError(f"the input has no row {number} any more; put it back as it was")
            yield row, done
        if number != batch.job.rows or next(rows, None) is not None:
            raise InputError(f"the input has not {batch.job.rows} rows any more; put it back as it was")


def _generated(source: InputSource) -> Generator[SourceRow, None, None]:
    yield from source.rows()


def _id(tasks: TaskMaker, row: SourceRow) -> str:
    return tasks.custom_id(row) or default_id(row.number)


class _Publishing:
    """Drafts of an output, that are put in place together or are gone when this ends."""

    def __init__(self, spec: OutputSpec, folder: Path, check: Callable[[], None]) -> None:
        self._spec = spec
        self._place = place_of(spec.target)
        self._drafts = DraftPaths(spec.target, folder)
        self._check = check
        self._paths: list[Path] = []

    def __enter__(self) -> Self:
        self._drafts.clear()
        return self

    def __exit__(self, *exception: object) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)

    def draft(self, name: str) -> Path:
        """Return a path for a draft."""
        self._paths.append(self._drafts.new(name))
        return self._paths[-1]

    def publish(self, job: Job, totals: Totals, output: Path, errors: Path) -> Manifest:
        """Put all files in place, the manifest last, and return it."""
        manifest = self._manifest(job, totals, output, errors)
        draft = self.draft(MANIFEST)
        with open_draft(draft) as file:
            file.write(manifest_bytes(manifest))
        self._check()
        refuse_replacing(self._spec.target)
        self._claim()
        self._place.remove(MANIFEST)  # of an earlier batch, which is not what comes now
        self._put(output, "")
        if manifest.error_file is None:
            self._place.remove(ERRORS)
        else:
            self._put(errors, ERRORS)
        self._put(draft, MANIFEST)
        self._place.remove(CLAIM)
        return manifest

    def _claim(self) -> None:
        """Have what lies there from now on known for ours by who goes on after a kill."""
        draft = self.draft(CLAIM)
        with open_draft(draft) as file:
            file.write(f"{self._spec.target} is being replaced\n".encode())
        self._put(draft, CLAIM)

    def _put(self, draft: Path, name: str) -> None:
        self._check()
        self._place.put(draft, name)

    def _manifest(self, job: Job, totals: Totals, output: Path, errors: Path) -> Manifest:
        name = self._drafts.target_name
        error_file = described(errors, name + ERRORS)
        return Manifest(
            job=job,
            style=self._spec.style,
            answer_column=self._spec.answer_column,
            rows=job.rows,
            errors=totals.errors,
            prompt_tokens=totals.prompt_tokens,
            output_tokens=totals.output_tokens,
            output=described(output, name),
            error_file=error_file if error_file.size else None,
        )


class _LineAnswers:
    """Answers as lines of OpenAI's batch output."""

    def __init__(self, sink: ByteSink, lines: OpenAILines, tasks: TaskMaker) -> None:
        self._sink = sink
        self._lines = lines
        self._tasks = tasks

    def add(self, row: SourceRow, done: RowDone) -> None:
        """Append a line."""
        self._sink.write(self._lines.answer(done, _id(self._tasks, row)))

    def close(self) -> None:
        """Nothing is left."""


class _TableAnswers:
    """Answers beside the columns of their rows."""

    def __init__(self, table: Table, answer_column: str) -> None:
        self._table = table
        self._answer_column = answer_column

    def add(self, row: SourceRow, done: RowDone) -> None:
        """Append a row."""
        self._table.add({**(row.fields or {}), **answer_columns(done, self._answer_column)})

    def close(self) -> None:
        """Write what is left."""
        self._table.close()


def _answers(spec: OutputSpec, batch: Finished, lines: OpenAILines, sink: ByteSink) -> _LineAnswers | _TableAnswers:
    if spec.style is Style.OPENAI:
        return _LineAnswers(sink, lines, batch.tasks)
    return _TableAnswers(_table(spec, batch.source, sink), spec.answer_column)


def _table(spec: OutputSpec, source: InputSource, sink: ByteSink) -> Table:
    if spec.format in LINES:
        return JsonTable(sink)
    if spec.format == ".csv":
        return CsvTable(sink, [*column_names(source), *spec.added_columns])
    arrow = arrow_library()
    # Text also where an answer is a vector or several texts: a batch may hold both.
    kinds = (arrow.string(), arrow.string(), arrow.int64(), arrow.int64(), arrow.string())
    return ParquetTable(sink, {**arrow_types(source), **dict(zip(spec.added_columns, kinds, strict=True))})
