"""A router's spans: one for each call at an ingress, one for each request of it, one for each attempt to run that."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from cluster.errors import ApiError
from cluster.telemetry.tracing import semantics as names
from cluster.telemetry.tracing.provider import Attributes, Tracing, is_fault
from cluster.wire.parts import TraceContext
from engine.request import Request


def call_trace(
    tracing: Tracing, name: str, operation: str, carrier: Mapping[str, str], attributes: Mapping[str, str]
) -> CallTrace | None:
    """Return the trace of a call that comes now, None where it is not sampled: nothing is then made for it.

    carrier: headers or metadata, in lower case, with the caller's `traceparent` where it has one.
    """
    tracing.follow_clock()
    span = tracing.begin(name, time.monotonic(), tracing.parent_of(carrier), SpanKind.SERVER, attributes)
    return CallTrace(tracing, span, operation) if span.is_recording() else None


class CallTrace:
    """The span of a call at an ingress. model, operation: set once it is known what is asked. Times are monotonic.

    Spans that are not ended are never exported, so the caller that starts one must end it.
    """

    def __init__(self, tracing: Tracing, span: Span, operation: str) -> None:
        self.model = ""
        self._tracing = tracing
        self._span = span
        self.operation = operation

    @property
    def trace_id(self) -> str:
        """In hex, as collectors show it."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def response(self) -> str:
        """What goes back to the client as `traceresponse`. Source: W3C Trace Context, editor's draft."""
        return self._tracing.carried(self._span).traceparent

    def request(self, request: Request, waited: float = 0.0) -> RequestTrace:
        """Return the trace of a request that is handed to the replicas. waited: seconds, for its tenant's turn."""
        now = time.monotonic()
        name = f"{self.operation} {self.model}".rstrip()
        described = {**_described(request), names.OPERATION_NAME: self.operation}
        if self.model:
            described |= {names.REQUEST_MODEL: self.model, names.RESPONSE_MODEL: self.model}
        span = self._tracing.begin(name, now - waited, self._span, attributes=described)
        if waited:
            self._tracing.span(names.TURN, now - waited, now, span)
        return RequestTrace(self._tracing, span)

    def turned_away(self, request: Request, waited: float, error: BaseException) -> None:
        """Tell of a request that stood in line and never got its turn. waited: seconds."""
        self.request(request, waited).turned_away(error)

    def end(self, told: Mapping[str, str | int], error: str = "", failed: bool = False) -> None:
        """End the span now. told: what is known of the answer. error: its type, "" without; failed: by our fault."""
        self._span.set_attributes({name: value for name, value in told.items() if value != ""})
        _end(self._span, self._tracing.nanos(time.monotonic()), error, failed)


class RequestTrace:
    """The span of one request in a router, with those of its waits and attempts beneath. What is noted is so now.

    The clock is not the event loop's, which may stand still for a millisecond or while the loop works: spans of a
    replica would not lie within those of its router.
    """

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._attempt: Span | None = None  # that runs
        self._former: Span | None = None
        self._attempts = 0
        self._moves = 0
        self._waits_since: float | None = None
        self._left: tuple[float, str] | None = None  # when an attempt was lost, and why

    def waits(self) -> None:
        """Note that no replica takes it."""
        if self._waits_since is None:
            self._waits_since = time.monotonic()

    def attempt(self, replica_id: str, resumed_tokens: int) -> TraceContext:
        """Begin an attempt, and return what goes with it to the replica. One that could not be sent is forgotten.

        resumed_tokens: output tokens that it comes with.
        """
        described: dict[str, str | int] = {
            names.REPLICA_ID: replica_id,
            names.ATTEMPT_NUMBER: self._attempts + 1,
            names.ATTEMPT_RESUMED_TOKENS: resumed_tokens,
        }
        self._attempt = self._tracing.begin(
            names.ATTEMPT, time.monotonic(), self._span, SpanKind.CLIENT, described, follows=self._former
        )
        return self._tracing.carried(self._attempt)

    def sent(self) -> None:
        """Note that the attempt is on its way."""
        self._attempts += 1
        self._waited(time.monotonic())

    def attempt_over(self, why: str = "") -> None:
        """End the attempt that runs. why: the type of the error that ended it, "" for its own end."""
        if self._attempt is not None:
            now = self._tracing.nanos(time.monotonic())
            _end(self._attempt, now, why, is_fault(why))
            self._former, self._attempt = self._attempt, None

    def moves(self, reason: str) -> None:
        """Note that it is to go on elsewhere."""
        self._moves += 1
        self._left = time.monotonic(), reason
        self._span.add_event(names.MIGRATE, {names.REASON: reason}, self._tracing.nanos(self._left[0]))

    def turned_away(self, error: BaseException) -> None:
        """End the span of a request that no replica was asked to take."""
        code = error.code if isinstance(error, ApiError) else names.CANCELLED
        _end(self._span, self._tracing.nanos(time.monotonic()), code, is_fault(code))

    def end(self, outcome: Attributes, error: str = "", failed: bool = False) -> None:
        """End the span of the request. outcome: what is known in the end; error and failed as of `CallTrace.end`."""
        now = time.monotonic()
        self._span.set_attributes({**outcome, names.MIGRATIONS: self._moves})
        self._waited(now)
        _end(self._span, self._tracing.nanos(now), error, failed)

    def _waited(self, now: float) -> None:
        """Make the spans of the waits that end now."""
        if self._left is not None:
            began, reason = self._left
            self._tracing.span(names.MIGRATE, began, now, self._span, {names.REASON: reason})
        if self._waits_since is not None:
            self._tracing.span(names.REPLICA_WAIT, self._waits_since, now, self._span)
        self._left = self._waits_since = None


def _end(span: Span, at: int, error: str, failed: bool) -> None:
    if error:
        span.set_attribute(names.ERROR_TYPE, error)
    if failed:
        span.set_status(Status(StatusCode.ERROR))
    span.end(at)


def _described(request: Request) -> dict[str, str | int | float]:
    """What a request asks for: never its prompt, nor anything that is text of the client's."""
    params = request.params
    found: dict[str, str | int | float] = {
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_ID: request.request_id,
        names.RESPONSE_ID: request.request_id,
        names.TENANT: request.tenant,
        names.USAGE_INPUT_TOKENS: len(request.prompt_token_ids),
    }
    if request.pooling is not None:
        return found
    found |= {
        names.REQUEST_TEMPERATURE: params.temperature,
        names.REQUEST_TOP_P: params.top_p,
        names.REQUEST_FREQUENCY_PENALTY: params.frequency_penalty,
        names.REQUEST_PRESENCE_PENALTY: params.presence_penalty,
    }
    if params.max_tokens is not None:
        found[names.REQUEST_MAX_TOKENS] = params.max_tokens
    if params.top_k:
        found[names.REQUEST_TOP_K] = params.top_k
    if params.seed is not None:
        found[names.REQUEST_SEED] = params.seed
    if params.n > 1:
        found[names.REQUEST_CHOICE_COUNT] = params.n
    return found
