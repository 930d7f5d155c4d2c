"""Which columns an input has, found by reading it once: its rows need not agree, and all of them must fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cluster.batch.extra import extra_library
from cluster.batch.output.tables import text_of
from cluster.batch.rows import Source

BATCH_ROWS = 4096
BATCH_BYTES = 16 << 20
MAX_NESTED = 500  # fields below one column; what has more is a mapping with keys of its own in each row


def column_names(source: Source) -> list[str]:
    """Return the names of all columns, in the order in which they come."""
    names: dict[str, None] = {}
    for row in source.rows():
        names.update(dict.fromkeys(row.fields or ()))
    return list(names)


def arrow_types(source: Source) -> dict[str, Any]:
    """Return the Arrow type of every column that holds all its values; text, as JSON, where they have none in common.

    Reads the source once, and once more where types were widened, to see that all values fit.
    """
    survey = _Survey()
    for batch in _batches(source):
        survey.take(batch)
    types = survey.settled()
    if survey.widened:
        for batch in _batches(source):
            for name in sorted(survey.widened & types.keys()):
                if not fits([columns.get(name) for columns in batch], types[name]):
                    types[name] = survey.text
    return types


def fits(values: list[Any], kind: Any) -> bool:
    """Whether Arrow takes `values` for a column of type `kind`."""
    arrow = arrow_library()
    try:
        arrow.array(values if kind != arrow.string() else [text_of(value) for value in values], kind)
    except (arrow.ArrowException, OverflowError, TypeError, ValueError):
        return False
    return True


def arrow_library() -> Any:
    """Return pyarrow. Raises `InputError` naming the extra when it is missing."""
    return extra_library("pyarrow", "Parquet")


class _Survey:
    """Types of columns, as batches of rows show them. widened: columns whose batches did not agree."""

    def __init__(self) -> None:
        self._arrow = arrow_library()
        self.text = self._arrow.string()
        self.widened: set[str] = set()
        self._types: dict[str, Any] = {}

    def take(self, batch: list[Mapping[str, Any]]) -> None:
        """Take in the values of a batch."""
        for name in dict.fromkeys(name for columns in batch for name in columns):
            found = self._inferred([columns.get(name) for columns in batch])
            before = self._types.get(name, found)
            if before != found:
                self.widened.add(name)
                found = self._common(name, before, found)
            self._types[name] = found

    def settled(self) -> dict[str, Any]:
        """Return a type for each column that a Parquet file can hold."""
        return {name: kind if self._is_storable(kind) else self.text for name, kind in self._types.items()}

    def _inferred(self, values: list[Any]) -> Any:
        try:
            return self._arrow.array(values).type
        except (self._arrow.ArrowException, OverflowError, TypeError, ValueError):
            return self.text

    def _common(self, name: str, one: Any, other: Any) -> Any:
        schemas = [self._arrow.schema([(name, kind)]) for kind in (one, other)]
        try:
            return self._arrow.unify_schemas(schemas, promote_options="permissive").field(name).type
        except self._arrow.ArrowException:
            return self.text

    def _is_storable(self, kind: Any) -> bool:
        """Whether Parquet can hold the type, which it cannot for an object without fields."""
        if self._arrow.types.is_null(kind) or _num_nested(kind) > MAX_NESTED:
            return False
        table = self._arrow.table({"column": self._arrow.array([], kind)})
        try:
            extra_library("pyarrow.parquet", "Parquet").write_table(table, self._arrow.BufferOutputStream())
        except self._arrow.ArrowException:
            return False
        return True


def _num_nested(kind: Any) -> int:
    return sum(1 + _num_nested(kind.field(at).type) for at in range(kind.num_fields))


def _batches(source: Source) -> Iterator[list[Mapping[str, Any]]]:
    batch: list[Mapping[str, Any]] = []
    size = 0
    for row in source.rows():
        if row.fields is not None:
            batch.append(row.fields)
            size += len(row.raw)
        if len(batch) == BATCH_ROWS or size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
