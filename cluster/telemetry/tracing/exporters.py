"""How spans leave a process: into a file, and in any case without harm to whoever made them."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from cluster.private_files import FILE

log = logging.getLogger(__name__)
SAY_AGAIN = 60.0  # seconds between two lines about a collector that does not answer
LIBRARY_LOGGER = "opentelemetry.exporter.otlp"


class FileExporter(SpanExporter):
    """Appends one JSON object a line and span, as the SDK writes it. Many processes may share the file.

    A new file is its owner's alone; one that is there keeps its modes, so that whoever is to read it may be let in.
    Raises `OSError` where it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        # To be read, too: what it ends with is looked at.
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write the spans at once, so that lines of other processes come before or after them."""
        lines = "".join(f"{span.to_json(indent=None)}\n" for span in spans)
        with self._alone():
            left = memoryview((self._end_of_torn_line() + lines).encode())
            while left:
                left = left[os.write(self._file, left) :]
        return SpanExportResult.SUCCESS

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from writing meanwhile: what they are about to write would look torn."""
        with suppress(OSError):  # where a file system has no locks, the worst is an empty line
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _end_of_torn_line(self) -> str:
        """What parts the next line from one that a full disk, or the end of a process, cut short."""
        about = os.fstat(self._file)
        if not stat.S_ISREG(about.st_mode) or not about.st_size:
            return ""
        last = os.pread(self._file, 1, about.st_size - 1)  # nothing, where the file was emptied meanwhile
        return "" if last in (b"\n", b"") else "\n"

    def shutdown(self) -> None:
        """Close the file."""
        os.close(self._file)


class ForgivingExporter(SpanExporter):
    """Passes spans on to `inner`; what it cannot deliver is dropped, and one line a minute tells of it."""

    def __init__(self, inner: SpanExporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._told_at = float("-inf")
        self._lost = 0
        logging.getLogger(LIBRARY_LOGGER).setLevel(logging.CRITICAL)  # it would say the same at each try

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Deliver the spans, or count them as lost. Called by the exporting thread."""
        try:
            result, why = self._inner.export(spans), "the collector did not take them"
        except Exception as error:
            result, why = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        if result is not SpanExportResult.SUCCESS:
            self._tell(len(spans), why)
        return result

    def shutdown(self) -> None:
        """End the inner one."""
        self._inner.shutdown()

    def _tell(self, lost: int, why: str) -> None:
        self._lost += lost
        now = self._clock()
        if now - self._told_at >= SAY_AGAIN:
            log.warning("%d spans of traces could not be exported and are lost: %s", self._lost, why)
            self._told_at, self._lost = now, 0
