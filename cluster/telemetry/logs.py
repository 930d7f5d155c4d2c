"""Logs: where our modules log to, records as lines of JSON, and what may fail with no more than a line.

Our lines go where Ray Serve writes its log, so that one file tells the whole story.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar

from engine.errors import redacted

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

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
OUR_PACKAGES = ("cluster", "engine", "parallel")
JSON = "json"  # the setting `log_format`


def about(exchange: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return what to log beside a message (`extra=`) of an exchange with a client: ids, names and error code."""
    return {FIELDS: {field: exchange[name] for field, name in EXCHANGED.items() if exchange.get(name)}}


def about_request(request_id: str) -> dict[str, dict[str, str]]:
    """Return what to log beside a message (`extra=`) about a request."""
    return {FIELDS: {"request_id": request_id}}


class JsonLines(logging.Formatter):
    """Fields: ts (UTC), level, logger, message, those of the process, those of the record, exception.

    process: fields that identify this process: its router or replica, rank, model.
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


def log_to_serve(
    level: int = logging.INFO, log_format: str = "", process: Mapping[str, str | int] | None = None
) -> None:
    """Give our loggers the handlers that Serve has set up in this replica's process. Can be called twice.

    log_format: with "json" these handlers write a JSON object a line, Serve's own lines and those of libraries too;
    else what Serve chose.
    process: fields of each of these lines (`JsonLines`).
    """
    serve_handlers = logging.getLogger("ray.serve").handlers
    if log_format == JSON:
        for handler in serve_handlers:
            # Serve's file is behind a buffer, which formats nothing itself.
            target = handler.target if isinstance(handler, logging.handlers.MemoryHandler) else handler
            if target is not None:
                target.setFormatter(JsonLines(process))
        _libraries_log_to(serve_handlers)
    _log_to(serve_handlers, level)


def log_to_stderr(process: Mapping[str, str | int], level: int = logging.INFO) -> None:
    """Have all loggers write JSON lines to standard error, in a process that Serve knows nothing of."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process))
    _libraries_log_to([handler])
    _log_to([handler], level)


def rank_fields(replica: str, settings: Mapping[str, Any], rank: int = 0) -> dict[str, str | int]:
    """Return the fields that identify a rank's process in its lines. settings: those of its model."""
    names = settings["served_model_name"] or [settings["model"]]
    return {"replica": replica, "rank": rank, "model": names[0]}


def _libraries_log_to(handlers: list[logging.Handler]) -> None:
    """Handle lines without a handler of their own, such as OpenTelemetry's and Python's warnings."""
    logging.getLogger().handlers = list(handlers)
    logging.captureWarnings(True)


def _log_to(handlers: list[logging.Handler], level: int) -> None:
    for name in OUR_PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers = list(handlers)
        logger.propagate = False


class BestEffort:
    """Does for one replica what no token depends on.

    What fails is logged once: a line for each step would hide all else.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def do(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what `act` returns, None where it fails."""
        try:
            return act(*args, **kwargs)
        except Exception as error:
            name = getattr(act, "__qualname__", repr(act))
            if name not in self._told:
                self._told.add(name)
                logger.error("%s failed, which is not told again; all else goes on", name, exc_info=redacted(error))
            return None
