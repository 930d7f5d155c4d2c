"""What traces cost a request: nothing where they are off, a tenth of a millisecond in each process where they are on.

`python -m tests.bench.tracing` prints a table. Spans are made and kept as in a router and a replica; what
exports them is a thread of its own, whose work for the file is a line of the table.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter

from cluster.accounts.flight_recorder import FlightRecorder
from cluster.router.replica_handle import LiveRequest
from cluster.router.token_log import TokenLog
from cluster.telemetry.tracing.call_trace import call_trace
from cluster.telemetry.tracing.engine_spans import EngineSpans
from cluster.telemetry.tracing.provider import FileExporter, Tracing, tracing_with
from cluster.token_source import NO_CONTEXT, CallContext
from cluster.wire.parts import TraceContext
from engine.kv.block_manager import NO_EVENTS
from engine.report import EngineStats, Finish, StepReport
from engine.request import FinishReason, Request, Sequence
from engine.sampling_params import SamplingParams
from tests.bench.flight import each_us

TIMES = 2000
REQUEST = Request("chatcmpl-0", tuple(range(64)), SamplingParams(max_tokens=64))
UNSAMPLED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}


class Kept(SpanProcessor):
    """Keeps the last spans, which is all that a queue for export does on the event loop."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """Keep a span."""
        self.spans.append(span)
        if len(self.spans) > 512:
            self.spans.clear()


def live(context: CallContext) -> LiveRequest:
    """Return a request as a router has it."""
    return LiveRequest(TokenLog(REQUEST), time.monotonic(), context)


def routed(tracing: Tracing, carrier: dict[str, str]) -> None:
    """Do what a router does for the trace of one request, beside its work."""
    trace = call_trace(tracing, "POST /v1/chat/completions", "chat", carrier, {"http.route": "/v1/chat/completions"})
    one = live(CallContext(trace=trace))
    if trace is None or one.trace is None:
        return
    one.begin_attempt_trace("replica")
    one.trace.sent()
    one.trace.attempt_over()
    one.end_trace()
    trace.end({"http.response.status_code": 200})


def ran(spans: EngineSpans, carried: TraceContext, flight: FlightRecorder) -> None:
    """Do what a replica does for the trace of one attempt, beside its work."""
    spans.begin(REQUEST, carried, 1.0)
    sequence = Sequence(REQUEST, 0, 64, 128, started_at=2.0, first_token_at=3.0, ended_at=4.0)
    finished = [Finish(sequence, FinishReason.LENGTH)]
    spans.note(StepReport(1, [], [], {}, finished, NO_EVENTS, EngineStats()), flight)


def exported(exporter: SpanExporter, spans: list[ReadableSpan]) -> Callable[[int], object]:
    """Return what exports one request's six spans."""
    return lambda _: exporter.export(spans)


def measure() -> dict[str, float]:
    """Return microseconds by name."""
    kept, flight = Kept(), FlightRecorder(time.monotonic)
    tracing = tracing_with(kept, "router", "bench")
    spans = EngineSpans(tracing, "replica", "demo")
    carried = tracing.carried(tracing.begin("attempt", 0.0))
    idle = StepReport(1, [], [], {}, [], NO_EVENTS, EngineStats())
    figures = {
        "router, off: a live request is made": each_us(lambda _: live(NO_CONTEXT), TIMES),
        "router, on, the client does not sample": each_us(lambda _: routed(tracing, UNSAMPLED), TIMES),
        "router, on: three spans": each_us(lambda _: routed(tracing, {}), TIMES),
        "replica, on: three spans": each_us(lambda _: ran(spans, carried, flight), TIMES),
        "replica, on: a step without an end": each_us(lambda _: spans.note(idle, flight), TIMES),
    }
    kept.spans.clear()
    routed(tracing, {})
    ran(spans, carried, flight)
    with tempfile.TemporaryDirectory() as folder:
        exporter = FileExporter(Path(folder) / "traces.jsonl")
        figures["beside the loop: six spans into a file"] = each_us(exported(exporter, list(kept.spans)), TIMES)
        exporter.shutdown()
    return figures


def main() -> None:
    """Print the figures."""
    print("us".rjust(8), "")
    for name, value in measure().items():
        print(f"{value:8.1f}", name)


if __name__ == "__main__":
    main()
