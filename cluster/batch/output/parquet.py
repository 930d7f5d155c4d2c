"""Parquet, written in row groups by pyarrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.batch.extra import extra_library
from cluster.batch.output.columns import BATCH_BYTES, BATCH_ROWS, arrow_library
from cluster.batch.output.drafts import Sink
from cluster.batch.output.tables import text_of


class ParquetTable:
    """A Parquet file. types: column -> Arrow type, which all values fit; other values of text columns become JSON."""

    def __init__(self, sink: Sink, types: Mapping[str, Any]) -> None:
        self._arrow = arrow_library()
        self._schema = self._arrow.schema(list(types.items()))
        self._file = self._arrow.PythonFile(sink, mode="w")
        self._writer = extra_library("pyarrow.parquet", "Parquet").ParquetWriter(
            self._file, self._schema, compression="zstd"
        )
        self._texts = {name for name, kind in types.items() if self._arrow.types.is_string(kind)}
        self._rows: list[Mapping[str, Any]] = []
        self._size = 0

    def add(self, columns: Mapping[str, Any]) -> None:
        """Append a row."""
        columns = {name: text_of(value) if name in self._texts else value for name, value in columns.items()}
        self._rows.append(columns)
        self._size += sum(len(value) for value in columns.values() if isinstance(value, str | bytes | list | dict))
        if len(self._rows) == BATCH_ROWS or self._size > BATCH_BYTES:
            self._write()

    def close(self) -> None:
        """Write the last row group and the footer."""
        if self._rows:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        arrays = [self._array(field) for field in self._schema]
        self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))
        self._rows, self._size = [], 0

    def _array(self, field: Any) -> Any:
        return self._arrow.array([row.get(field.name) for row in self._rows], field.type)
