"""Rows of files with a JSON object per line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from cluster.batch.errors import InputError
from cluster.batch.rows import SourceRow
from cluster.batch.sources.found import InputFile
from cluster.batch.sources.lines import Line, read_lines
from cluster.batch.sources.reading import open_bytes

_object = msgspec.json.Decoder(dict[str, Any]).decode


def read_json_rows(file: InputFile, first: int, limit: int) -> Iterator[SourceRow]:
    """Yield a row per line that is not blank, numbered from `first`; a line that is no object has a problem."""
    with open_bytes(file) as data:
        for number, line in enumerate(read_lines(data, limit), start=first):
            if number == first and file.suffix == ".json":
                _refuse_whole(file, line)
            yield _row(file, line, number, limit)


def _row(file: InputFile, line: Line, number: int, limit: int) -> SourceRow:
    place = f"{file.name}:{line.number}"
    if line.too_long:
        return SourceRow(number, place, None, line.text, f"the line is longer than {limit} bytes", line.number)
    try:
        return SourceRow(number, place, _object(line.text), line.text, line=line.number)
    except (ValueError, RecursionError) as error:
        return SourceRow(number, place, None, line.text, f"the line is no JSON object: {error}", line.number)


def _refuse_whole(file: InputFile, line: Line) -> None:
    """Raise `InputError` when the whole file is one JSON value: its lines would all be told as bad rows."""
    text = line.text.strip()
    if text.startswith(b"[") or text == b"{":
        raise InputError(
            f"{file.name}: a JSON object per line is read, and this is one value over many lines; make it so: "
            "jq -c '.[]' data.json > data.jsonl"
        )
