"""A replica's spans: the phases of each attempt, made when it has ended, from the engine's times."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from cluster.accounts.flight_recorder import FlightRecorder, Wait, WaitEvent
from cluster.telemetry.logs import about_request
from cluster.telemetry.tracing import semantics as names
from cluster.telemetry.tracing.provider import Tracing, is_fault, is_sampled
from cluster.wire.parts import TraceContext
from engine.report import Finish, StepReport
from engine.request import FinishReason, Request, Sequence

log = logging.getLogger(__name__)
WAITS = (Wait.BUDGET, Wait.SLOTS, Wait.BLOCKS)  # of a replica, recorded as events of the phase


@dataclass(slots=True)
class _Attempt:
    """One that runs. began: when it came, in seconds on the engine's clock. open: its choices that have not ended.

    compiled: when what its output must match was; None where it was not, or need not be.
    """

    parent: Context
    request: Request
    began: float
    open: int
    compiled: float | None = None
    ended: list[Finish] = field(default_factory=list)

    @property
    def leader(self) -> Sequence:
        """The choice that computed the prompt, of those that have ended."""
        return min((finish.sequence for finish in self.ended), key=lambda sequence: sequence.index)

    @property
    def until(self) -> float:
        """When the last step ran for it; when it came, where none did."""
        return max([self.began, *[one.sequence.ended_at for one in self.ended if one.sequence.ended_at is not None]])


class EngineSpans:
    """Follows the attempts whose routers trace them. Used on the replica's event loop; nothing is done per token.

    replica_id / model: for the spans. Times are on the engine's clock, which must be the monotonic one.
    """

    def __init__(self, tracing: Tracing, replica_id: str, model: str) -> None:
        self._tracing = tracing
        self._about = {names.REPLICA_ID: replica_id, names.REQUEST_MODEL: model}
        self._attempts: dict[str, _Attempt] = {}  # by the engine's request id

    def begin(self, request: Request, carried: TraceContext, now: float) -> None:
        """Follow an attempt that came now. carried: the context of its span in the router."""
        self._tracing.follow_clock()
        parent = self._tracing.parent_of({"traceparent": carried.traceparent, "tracestate": carried.tracestate})
        if is_sampled(parent):
            choices = request.params.n if request.resume is None else len(request.resume)
            self._attempts[request.request_id] = _Attempt(parent, request, now, choices)

    def note(self, report: StepReport, flight: FlightRecorder) -> None:
        """Make the spans of the attempts that a step ended."""
        if not self._attempts:
            return
        for finish in report.finished:
            attempt = self._attempts.get(finish.sequence.request.request_id)
            if attempt is not None:
                attempt.ended.append(finish)
                attempt.open -= 1
                if not attempt.open:
                    self._record_attempt(attempt, flight)

    def compiled(self, request_id: str, now: float) -> None:
        """Note that what the output of an attempt must match is compiled now."""
        attempt = self._attempts.get(request_id)
        if attempt is not None:
            attempt.compiled = now

    def refused(self, request_id: str, code: str, now: float) -> None:
        """End an attempt that the engine never began."""
        attempt = self._attempts.pop(request_id, None)
        if attempt is not None:
            self._failed(names.QUEUE, attempt, code, now)

    def abandon(self, code: str, now: float) -> None:
        """End all attempts: the engine is gone, and with it what it knew of their phases."""
        for attempt in self._attempts.values():
            self._failed(names.ENGINE, attempt, code, now)
        self._attempts.clear()

    def close(self) -> None:
        """Export what waits, in a few seconds at most. Can be called twice; not on an event loop."""
        self._tracing.close()

    def _failed(self, name: str, attempt: _Attempt, code: str, now: float) -> None:
        span = self._tracing.begin(name, attempt.began, attempt.parent, attributes=self._about)
        _fail(span, code)
        span.end(self._tracing.nanos(now))

    def _record_attempt(self, attempt: _Attempt, flight: FlightRecorder) -> None:
        del self._attempts[attempt.request.request_id]
        try:
            self._end(attempt, flight)
        except Exception:
            # An exception here would make the caller treat the replica as broken.
            request_id = attempt.request.request_id
            log.exception("request %s: its spans could not be made", request_id, extra=about_request(request_id))

    def _end(self, attempt: _Attempt, flight: FlightRecorder) -> None:
        request_id, now = attempt.request.request_id, attempt.until
        events = flight.story(request_id)
        spans = [
            (self._tracing.begin(name, start, attempt.parent, attributes=self._about), start, end, name)
            for name, start, end in _phases(attempt, now)
        ]
        for span, start, end, name in spans:
            last = name == spans[-1][3]
            self._add_waits(span, [one for one in events if start <= one.at < end], events, now)
            span.set_attributes(_attributes(name, attempt))
            if last:
                span.set_attribute(names.FINISH_REASONS, [finish.reason.value for finish in attempt.ended])
                if code := _failure(attempt.ended):
                    _fail(span, code)
            span.end(self._tracing.nanos(end))

    def _add_waits(self, phase: Span, within: Items[WaitEvent], events: Items[WaitEvent], now: float) -> None:
        for event in within:
            if event.what in WAITS:
                told = {names.REASON: event.detail}
                phase.add_event(f"waits for {event.what.value}", told, self._tracing.nanos(event.at))
            elif event.what is Wait.PREEMPTION:
                back = next((one.at for one in events if one.at > event.at and one.what is Wait.RUNS), now)
                self._tracing.span(names.PREEMPTED, event.at, back, phase, self._about)


def _phases(attempt: _Attempt, now: float) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of each phase that was begun; they follow each other without a gap."""
    leader, queued = attempt.leader, attempt.began
    if attempt.compiled is not None:
        queued = min(max(attempt.compiled, queued), now)
        yield names.GRAMMAR, attempt.began, queued
    started, drawn = leader.started_at, leader.first_token_at
    if started is None:
        yield names.QUEUE, queued, now
        return
    yield names.QUEUE, queued, started
    now = max(now, started)  # its first step may have failed before the model ran
    if drawn is None or attempt.request.pooling is not None:
        yield names.PREFILL, started, now
        return
    yield names.PREFILL, started, drawn
    yield names.DECODE, drawn, now


def _attributes(phase: str, attempt: _Attempt) -> dict[str, int]:
    sequences, leader = [finish.sequence for finish in attempt.ended], attempt.leader
    if phase == names.PREFILL:
        known = leader.num_prompt_tokens + _resumed(leader)
        cached = leader.num_cached_tokens
        return {names.CACHED_TOKENS: cached, names.COMPUTED_TOKENS: known - cached}
    if phase == names.DECODE:
        drawn = sum([one.num_output_tokens - _resumed(one) for one in sequences])
        return {names.DECODED_TOKENS: drawn, names.PREEMPTIONS: sum([one.preemptions for one in sequences])}
    return {}


def _resumed(sequence: Sequence) -> int:
    """Return how many output tokens it came with."""
    resume = sequence.request.resume
    return 0 if resume is None else len(resume.get(sequence.index, ()))


def _failure(ended: Items[Finish]) -> str:
    """Return the type of the error that ended an attempt, "" for any other end."""
    failures = [finish.code or "internal_error" for finish in ended if finish.reason is FinishReason.ERROR]
    return failures[0] if failures else ""


def _fail(span: Span, code: str) -> None:
    span.set_attribute(names.ERROR_TYPE, code)
    if is_fault(code):
        span.set_status(Status(StatusCode.ERROR))
