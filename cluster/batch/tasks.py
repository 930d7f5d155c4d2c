"""What the rows of an input ask for: requests of the OpenAI batch format, or columns of a table."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from cluster.batch.openai_rows import OpenAIRows, looks_openai
from cluster.batch.plain_rows import ColumnOptions, PlainRows
from cluster.batch.rows import Source, SourceRow, Task


class RowKind(StrEnum):
    """openai: `custom_id`, `method`, `url` and `body`. plain: columns, one of which is the prompt."""

    OPENAI = "openai"
    PLAIN = "plain"


class TaskMaker(Protocol):
    """Makes the tasks of rows, each from its row alone.

    has_ids: whether the input must give ids to its rows. tells_places: whether the file of errors tells where each
    row lies, beside the fields that OpenAI gives it.
    """

    has_ids: bool
    tells_places: bool

    def custom_id(self, row: SourceRow) -> str | None:
        """Return the row's id, made of its number where the input has none; None where one is missing."""
        ...

    def without_id(self, row: SourceRow) -> str:
        """Return what to say of a row that could be read and has no id: its place comes before it."""
        ...

    def task(self, row: SourceRow) -> Task:
        """Return what the row asks for; what is wrong with it is told in the task."""
        ...


def kind_of(source: Source) -> RowKind:
    """Return the kind of the first row that can be read, which is taken for that of all. Raises `InputError`."""
    for row in source.rows():
        if row.fields is not None:
            return RowKind.OPENAI if looks_openai(row.fields) else RowKind.PLAIN
    return RowKind.PLAIN


def task_maker(kind: RowKind, model: str, options: ColumnOptions | None = None) -> TaskMaker:
    """Return what makes the tasks of an input. model: for rows that name none. options: of plain rows.

    Raises `ConfigError` when `options` contradict themselves, or are given for rows that have no use for them.
    """
    if kind is RowKind.PLAIN:
        return PlainRows(model, options or ColumnOptions())
    (options or ColumnOptions()).refuse_for_requests()
    return OpenAIRows(model)
