"""One log record as one line of JSON: whatever a message holds, a record is a line and a line is a record."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime

FIELDS = "squadron"  # attribute of a record that holds its fields; Ray Serve sets others, `request_id` among them
EXCHANGED = {
    "request_id": "id",
    "client_id": "client_id",
    "tenant": "tenant",
    "model": "model",
    "code": "error",
    "trace_id": "trace_id",
}
ATTEMPT_MARK = "@"  # parts a request's id from the attempt, in the ids that an engine knows requests by


def about(exchange: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return what to log beside a message (`extra=`) of an exchange with a client: ids, names and error code."""
    return {FIELDS: {field: exchange[name] for field, name in EXCHANGED.items() if exchange.get(name)}}


def about_request(request_id: str) -> dict[str, dict[str, str]]:
    """Return what to log beside a message (`extra=`) about a request."""
    return {FIELDS: {"request_id": request_id}}


class JsonLines(logging.Formatter):
    """Fields: ts (UTC), level, logger, message, those of the process, those of the record, exception.

    process: what tells this process from others: its router or replica, rank, model.
    """

    def __init__(self, process: Mapping[str, str | int] | None = None) -> None:
        super().__init__()
        self._process = dict(process or {})

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of ASCII."""
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **self._process,
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        try:
            return json.dumps(line, default=str, allow_nan=False)
        except Exception:  # a field that is no JSON must not cost the line
            return json.dumps({name: _text(value) for name, value in line.items()})


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # what it is made of does not fit together: logging itself would print a traceback in its place
        return f"{_text(record.msg)} {_text(record.args)}"


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = dict(getattr(record, FIELDS, {}))
    request_id, mark, attempt = str(fields.get("request_id", "")).partition(ATTEMPT_MARK)
    if mark:
        fields |= {"request_id": request_id, "attempt": attempt}
    return fields
