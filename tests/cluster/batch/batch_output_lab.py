"""Rows with results, and outputs written of them."""

import json
from pathlib import Path

import msgspec

from cluster.batch.io.manifest import OutputSpec, Style
from cluster.batch.io.output_files import (
    Finished,
    write_output,
)
from cluster.batch.ledger.records import Job, RowDone
from cluster.batch.row_tasks import RowKind, task_maker
from cluster.batch.rows import SourceRow

JOB = Job(
    rows=0, input_digest="abc", model="demo", fingerprint="f", settings="{}", created=1_700_000_000, version="1"
)
OPENAI = task_maker(RowKind.OPENAI, "demo")
PLAIN = task_maker(RowKind.PLAIN, "demo")


class Rows:
    """A source of rows with these columns; None is a row that cannot be read."""

    def __init__(self, *rows):
        self._rows = rows

    def rows(self):
        for number, fields in enumerate(self._rows):
            yield SourceRow(number, f"x:{number + 1}", fields, repr(fields).encode(), "" if fields else "bad")


def job(rows=3, **more):
    return msgspec.structs.replace(JOB, rows=rows, **more)


def chat(row, text="hi", **more):
    body = {"id": "c", "choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}]}
    return RowDone(row, 200, msgspec.json.encode(body), 5, 2, **more)


def wrong(row, status=400, code="invalid_value"):
    body = {"error": {"message": f"row {row} is wrong", "type": "invalid_request_error", "param": "n", "code": code}}
    return RowDone(row, status, msgspec.json.encode(body), code=code)


def ids(*names):
    return Rows(*({"custom_id": name, "method": "POST"} for name in names))


def write(target, source, results, tasks=OPENAI, style=Style.OPENAI, of=None, check=lambda: None, **more):
    batch = Finished(of or job(len(results)), source, tasks, iter(results))
    folder = Path(target).parent if "://" not in str(target) else more.pop("folder")
    return write_output(OutputSpec(str(target), style, **more), batch, folder, check)


def tabled(target, source, results, **more):
    return write(target, source, results, PLAIN, Style.COLUMNS, **more)


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}
