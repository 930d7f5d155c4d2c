"""Metrics of the steps of one replica's engine, its peak speed, and what a replica records of each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from cluster.accounts.flight_recorder import FlightRecorder
from cluster.telemetry.families import FAMILIES, Source
from cluster.telemetry.logs import BestEffort
from cluster.telemetry.samples import Histogram, by_label, family_of, histogram_of
from cluster.wire.parts import Counted, TraceContext
from engine.report import Finish, StepReport
from engine.request import FinishReason, Request

if TYPE_CHECKING:
    from cluster.telemetry.tracing.engine_spans import EngineSpans

BROKEN = "internal_error"  # code of a refusal: the request could not be read or handled
_PHASES = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
)
_PREEMPTIONS = "request_num_preemptions"
_GRAMMAR = "request_grammar_time_seconds"
_SIZES = ("iteration_tokens_total", "step_batch_size", "step_budget_used_ratio")
_TIMES = ("step_seconds", "step_host_seconds", "step_device_seconds", "step_channel_seconds")
_HISTOGRAMS = (*_PHASES, _PREEMPTIONS, _GRAMMAR, *_SIZES, *_TIMES)
_TOLD = tuple(name for name in _HISTOGRAMS if FAMILIES[name].source is Source.TOLD)
_WINDOW = 0.2  # seconds of computing that make one measurement
_HALF_LIFE = 600.0  # seconds of computing after which a peak counts half


class StepMetrics:
    """Fed with every `StepReport`, at one or two microseconds for each. Used on one event loop.

    token_budget: tokens that a step may compute (`max_num_batched_tokens`). replica: whose.
    """

    def __init__(self, model_name: str, token_budget: int, replica: str = "") -> None:
        self._model_name = model_name
        self._replica = replica
        self._token_budget = token_budget
        self._ended: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._resumed = 0
        self._histograms = {name: Histogram(FAMILIES[name].buckets) for name in _HISTOGRAMS}
        self._phases = [self._histograms[name] for name in _PHASES]
        self._sizes = [self._histograms[name] for name in _SIZES]
        self._seconds, self._host, self._device, self._channel = [self._histograms[name] for name in _TIMES]

    def note(self, report: StepReport) -> None:
        """Count one step; one that computed nothing only brings ends."""
        if report.num_tokens:
            tokens, sequences, budget = self._sizes
            tokens.observe(report.num_tokens)
            sequences.observe(report.num_sequences)
            budget.observe(report.num_tokens / self._token_budget)
            self._seconds.observe(report.seconds)
            self._host.observe(report.seconds - report.executed)
            self._device.observe(report.executed - report.channel)
            if report.channel:  # 0 for a group of one rank
                self._channel.observe(report.channel)
        for finish in report.finished:
            self._note_end(finish)

    def submitted(self, resumed: bool) -> None:
        """Count a request that was taken. resumed: it comes with tokens from another replica."""
        self._resumed += resumed

    def compiled(self, seconds: float) -> None:
        """Count a request that waited so long for what its output must match to be compiled."""
        self._histograms[_GRAMMAR].observe(seconds)

    def refused(self, code: str) -> None:
        """Count a request that was not taken."""
        self._refused[code] += 1

    def _note_end(self, finish: Finish) -> None:
        self._ended[finish.code or finish.reason.value] += 1
        phases = finish.sequence.phases
        if phases is not None and finish.reason is not FinishReason.ERROR:
            seconds = (phases.queue, phases.prefill, phases.decode, phases.inference)
            for histogram, value in zip(self._phases, seconds, strict=True):
                histogram.observe(value)
            self._histograms[_PREEMPTIONS].observe(finish.sequence.preemptions)

    def told(self) -> dict[str, Counted]:
        """Return the histograms that routers are told."""
        kept = {name: self._histograms[name] for name in _TOLD}
        return {name: Counted(list(one.counts), one.total) for name, one in kept.items()}

    def collect(self, unwanted: int) -> Iterable[Metric]:
        """Yield all families. unwanted: tokens dropped because their request had ended."""
        model = self._model_name
        for name, histogram in self._histograms.items():
            yield histogram_of(name, (model, self._replica) if name in _TOLD else (model,), histogram)
        yield histogram_of("rank_forward_seconds", (model,), self._device)
        ended, refused = by_label(FinishReason, self._ended), by_label((BROKEN,), self._refused)
        yield family_of("engine_choices_ended", {(model, str(reason)): n for reason, n in ended.items()})
        yield family_of("submits_refused", {(model, code): n for code, n in refused.items()})
        yield family_of("engine_requests_resumed", {(model,): self._resumed})
        yield family_of("rows_unwanted", {(model,): unwanted})


class StepSpeed:
    """The peak of tokens per second of computing, prompt and output, over the last minutes of work.

    A peak and not a mean: a step of few sequences computes few tokens in nearly the time of many, and says nothing
    about how fast a waiting prompt would be done.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0
        self._peak = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Take note of a step."""
        self._tokens += tokens
        self._seconds += seconds
        if self._seconds >= _WINDOW:
            fallen = self._peak * 0.5 ** (self._seconds / _HALF_LIFE)
            self._peak = max(fallen, self._tokens / self._seconds)
            self._tokens, self._seconds = 0, 0.0

    def seconds_for(self, tokens: int) -> float:
        """Return how long so many tokens take; 0 while the speed is not known."""
        return tokens / self._peak if self._peak else 0.0


class ReplicaTelemetry:
    """Metrics, speed and spans of one replica. A failure in here is logged once and harms no request.

    flight: what requests waited for. spans: of the attempts that routers trace; None = of none. clock: seconds.
    """

    def __init__(
        self, metrics: StepMetrics, flight: FlightRecorder, spans: EngineSpans | None, clock: Callable[[], float]
    ) -> None:
        self.metrics = metrics
        self.speed = StepSpeed()
        self._flight = flight
        self._spans = spans
        self._clock = clock
        self._best_effort = BestEffort()

    def step(self, report: StepReport) -> None:
        """Record one step; called after its tokens were sent."""
        self._best_effort.do(self.speed.note, report.num_tokens, report.seconds)
        self._best_effort.do(self.metrics.note, report)
        if self._spans is not None:
            self._best_effort.do(self._spans.note, report, self._flight)

    def submitted(self, request: Request, trace: TraceContext | None) -> None:
        """Record a request that was taken, and begin its spans where its router traces it."""
        self._best_effort.do(self.metrics.submitted, request.resume is not None)
        if self._spans is not None and trace is not None:
            self._best_effort.do(self._spans.begin, request, trace, self._clock())

    def compiled(self, request: Request) -> None:
        """Record that the grammar of a request is ready."""
        now = self._clock()
        seconds = 0.0 if request.arrival_time is None else now - request.arrival_time
        self._best_effort.do(self.metrics.compiled, seconds)
        if self._spans is not None:
            self._best_effort.do(self._spans.compiled, request.request_id, now)

    def refused(self, code: str) -> None:
        """Record that a request was refused with `code`."""
        self._best_effort.do(self.metrics.refused, code)

    def ended(self, request_id: str, code: str) -> None:
        """End the spans of a request that never reached the engine."""
        if self._spans is not None:
            self._best_effort.do(self._spans.refused, request_id, code, self._clock())

    def abandoned(self, code: str) -> None:
        """End the spans of all requests: the replica stops or is dead."""
        if self._spans is not None:
            self._best_effort.do(self._spans.abandon, code, self._clock())
