"""The process's part in traces: a tracer, one clock for all spans, and the exporters that they leave by.

A failing exporter does no harm to the code that makes the spans.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from cluster.config_values import file_of
from cluster.errors import STATUS_BY_CODE
from cluster.private_files import FILE
from cluster.telemetry.tracing import semantics
from cluster.wire.link import DRAINED, ENDS, SLOW_CONSUMER
from cluster.wire.parts import TraceContext

log = logging.getLogger(__name__)
SAY_AGAIN = 60.0  # seconds between two lines about a collector that does not answer
LIBRARY_LOGGER = "opentelemetry.exporter.otlp"
BATCH_MILLIS = 1000  # a replica that is killed loses at most what it made since
CLOSE_SECONDS = 3.0
MAX_STATE = 512  # characters of a client's `tracestate` that are carried; W3C asks for as many
CLOCK_STEP = 100_000_000  # nanoseconds: a wall clock that is as far off was set, or the machine slept
CONTEXT_LOGGER = "opentelemetry.trace"  # of what reads contexts
Attributes = Mapping[str, AttributeValue]
GIVEN_UP = "given_up"  # why an attempt ended that its replica broke off
QUARANTINED = "request_quarantined"
# A client that reads slowly has the same code as a router that does, and is the one of the two that there is.
OURS = (frozenset(ENDS) - {DRAINED, SLOW_CONSUMER}) | {GIVEN_UP, QUARANTINED}


class FileExporter(SpanExporter):
    """Appends one JSON object a line and span, as the SDK writes it. Many processes may share the file.

    A new file is its owner's alone; one that is there keeps its modes, so that an operator can grant others access.
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
    """Passes spans on to `inner`; what it cannot deliver is dropped, and one line a minute reports it."""

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
            self._warn(len(spans), why)
        return result

    def shutdown(self) -> None:
        """End the inner one."""
        self._inner.shutdown()

    def _warn(self, lost: int, why: str) -> None:
        self._lost += lost
        now = self._clock()
        if now - self._told_at >= SAY_AGAIN:
            log.warning("%d spans of traces could not be exported and are lost: %s", self._lost, why)
            self._told_at, self._lost = now, 0


class Tracing:
    """Makes spans with explicit times, which are monotonic seconds; the wall clock is followed where it was set.

    Used on one event loop. Ended spans wait in a bounded queue for a thread that exports them; of a full one the
    oldest are dropped.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("squadron", version("squadron"))
        self._propagator = TraceContextTextMapPropagator()
        self._offset = _wall_offset()
        # It would quote a client's bad `tracestate`, a line for each call.
        logging.getLogger(CONTEXT_LOGGER).setLevel(logging.ERROR)

    def nanos(self, seconds: float) -> int:
        """Return nanoseconds since 1970 for monotonic seconds."""
        return int(seconds * 1e9) + self._offset

    def follow_clock(self) -> None:
        """Look at the wall clock again, for it may have been set; small steps would tear spans apart for nothing."""
        offset = _wall_offset()
        if abs(offset - self._offset) > CLOCK_STEP:
            self._offset = offset

    def parent_of(self, carrier: Mapping[str, str]) -> Context:
        """Return the context of who called, from `traceparent` and `tracestate`; an empty one where they are bad."""
        known = {"traceparent": carrier.get("traceparent", "")}
        state = carrier.get("tracestate", "")
        return self._propagator.extract(known | ({"tracestate": state} if 0 < len(state) <= MAX_STATE else {}))

    def carried(self, span: Span) -> TraceContext:
        """Return what makes spans of another process children of `span`."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return TraceContext(carrier["traceparent"], carrier.get("tracestate", ""))

    def begin(
        self,
        name: str,
        start: float,
        parent: Context | Span | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        follows: Span | None = None,
    ) -> Span:
        """Return a span that began at `start`. follows: one that it is linked to."""
        context = set_span_in_context(parent) if isinstance(parent, Span) else parent
        span = self._tracer.start_span(
            name, context or Context(), kind, attributes, start_time=self.nanos(start), record_exception=False
        )
        if follows is not None:
            span.add_link(follows.get_span_context())
        return span

    def span(
        self, name: str, start: float, end: float, parent: Context | Span, attributes: Attributes | None = None
    ) -> Span:
        """Return a span that is over."""
        span = self.begin(name, start, parent, attributes=attributes)
        span.end(self.nanos(max(start, end)))
        return span

    def flush(self) -> None:
        """Export what waits, as long as that takes. Not on an event loop."""
        self._provider.force_flush()

    def close(self) -> None:
        """Export what waits, in a few seconds at most, and end. Not on an event loop. Can be called twice."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)


def _wall_offset() -> int:
    """Return the nanoseconds from the monotonic clock to the wall clock."""
    return time.time_ns() - time.monotonic_ns()


def is_sampled(context: Context) -> bool:
    """Whether spans in that context are kept."""
    return get_current_span(context).get_span_context().trace_flags.sampled


def exporter_to(endpoint: str) -> SpanExporter:
    """Return what exports to a checked endpoint. Raises `ImportError`, and `OSError` for a file."""
    path = file_of(endpoint)
    if path is not None:
        return FileExporter(path)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)


def tracing_to(exporter: SpanExporter, role: str, instance: str) -> Tracing:
    """Return the tracing of this process. `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`,
    `OTEL_BSP_*` and `OTEL_EXPORTER_OTLP_*` mean what the standard says; without a sampler the parent decides."""
    delay = None if "OTEL_BSP_SCHEDULE_DELAY" in os.environ else BATCH_MILLIS
    return tracing_with(BatchSpanProcessor(ForgivingExporter(exporter), schedule_delay_millis=delay), role, instance)


def tracing_with(processor: SpanProcessor, role: str, instance: str) -> Tracing:
    """Return the tracing of this process, whose spans go to `processor`."""
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {semantics.SERVICE_NAME: semantics.PROVIDER}
    own = {
        semantics.SERVICE_VERSION: version("squadron"),
        semantics.SERVICE_INSTANCE_ID: instance,
        semantics.ROLE: role,
    }
    provider = TracerProvider(resource=Resource.create({**named, **own}), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return Tracing(provider)


def is_fault(code: str) -> bool:
    """Whether we failed: an error of 5xx, or a replica that was lost. Not what a client did, nor a drain.

    code: of an error or of a link's end; "" = none.
    """
    return code in OURS or STATUS_BY_CODE.get(code, 0) >= 500
