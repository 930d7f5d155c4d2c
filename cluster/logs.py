"""Sends what our own modules log to where Ray Serve writes its log, so that one file tells the whole story."""

from __future__ import annotations

import logging

OUR_PACKAGES = ("cluster", "engine", "parallel")


def log_to_serve(level: int = logging.INFO) -> None:
    """Give our loggers the handlers that Serve has set up in this replica's process. Can be called twice."""
    serve_handlers = logging.getLogger("ray.serve").handlers
    for name in OUR_PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers = list(serve_handlers)
        logger.propagate = False
