"""The last words of a replica about its requests: what they waited for, written to a file when it dies."""

from __future__ import annotations

import logging
import logging.handlers
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cluster.private_files import opener
from cluster.wire.translation import waited
from engine.telemetry.flight import FlightRecorder

MOST_DUMPS = 20  # in a folder; the oldest goes
PREFIX = "squadron-flight-"
logger = logging.getLogger(__name__)


def log_folder(logger_name: str = "ray.serve") -> Path | None:
    """Return where a logger writes its file, as Ray Serve set it up in this process; None where it writes none."""
    for handler in logging.getLogger(logger_name).handlers:
        inner = handler.target if isinstance(handler, logging.handlers.MemoryHandler) else handler
        if isinstance(inner, logging.FileHandler):
            return Path(inner.baseFilename).parent
    return None


def dump_flight(
    flight: FlightRecorder, folder: Path, replica_id: str, reason: str, clock: Callable[[], float] = time.time
) -> Path | None:
    """Write what is recorded to a new file of `folder` and return its path; None, and a line in the log, on failure.

    The file is its owner's alone: it names tenants, and when they asked for what. clock: seconds since 1970. Events
    bear their age in seconds when the file was written.
    """
    now, at = flight.clock(), clock()
    known = flight.everything()
    requests = {key: [waited(event, now) for event in events] for key, events in known.items()}
    body = {"replica": replica_id, "at": at, "reason": reason, "requests": requests}
    path = folder / f"{PREFIX}{replica_id}-{at:.3f}.json"
    try:
        with open(path, "xb", opener=opener) as file:
            file.write(msgspec.json.encode(body))
        for old in sorted(folder.glob(f"{PREFIX}*.json"), key=lambda one: one.stat().st_mtime)[:-MOST_DUMPS]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.error("the flight record cannot be kept in %s: %s", folder, error)
        return None
    logger.info("what requests waited for is in %s", path)
    return path
