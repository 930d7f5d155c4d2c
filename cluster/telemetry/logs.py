"""Where our own modules log to: where Ray Serve writes its log, so that one file tells the whole story."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Mapping
from typing import Any

from cluster.telemetry.log_lines import JsonLines

OUR_PACKAGES = ("cluster", "engine", "parallel")
JSON = "json"  # the setting `log_format`


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
    """Return what tells a rank's process from others in its lines. settings: those of its model."""
    names = settings["served_model_name"] or [settings["model"]]
    return {"replica": replica, "rank": rank, "model": names[0]}


def _libraries_log_to(handlers: list[logging.Handler]) -> None:
    """Take the lines that nobody else takes, OpenTelemetry's and Python's warnings among them: they would be text."""
    logging.getLogger().handlers = list(handlers)
    logging.captureWarnings(True)


def _log_to(handlers: list[logging.Handler], level: int) -> None:
    for name in OUR_PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers = list(handlers)
        logger.propagate = False
