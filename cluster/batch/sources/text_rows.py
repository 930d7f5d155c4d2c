"""Rows of text files, a line each."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.batch.rows import SourceRow
from cluster.batch.sources.found import InputFile
from cluster.batch.sources.lines import Line, read_lines
from cluster.batch.sources.reading import open_bytes

COLUMN = "text"


def read_text_rows(file: InputFile, first: int, limit: int) -> Iterator[SourceRow]:
    """Yield a row per line that is not blank, numbered from `first`: its column `text`, the prompt, is the line."""
    with open_bytes(file) as data:
        for number, line in enumerate(read_lines(data, limit), start=first):
            yield _row(f"{file.name}:{line.number}", line, number, limit)


def _row(place: str, line: Line, number: int, limit: int) -> SourceRow:
    if line.too_long:
        return SourceRow(number, place, None, line.text, f"the line is longer than {limit} bytes")
    try:
        return SourceRow(number, place, {COLUMN: line.text.decode()}, line.text, prompt_column=COLUMN)
    except UnicodeDecodeError as error:
        return SourceRow(number, place, None, line.text, f"the line is not UTF-8: {error}")
