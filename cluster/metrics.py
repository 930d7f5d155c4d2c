"""Prometheus figures of one front end: what it sees of its requests, and what the replicas report.

Names and meanings are vLLM's, with `squadron_` before them. Each app has a registry of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.report import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds. First tokens come between a few ms and a minute, later ones between a fraction of a ms and seconds.
_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """The last report of one replica."""

    replica: str
    stats: EngineStats
    ready: bool = True


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """What a router knows of a model's replicas. `migrations`: requests it moved to another one since it started."""

    replicas: Sequence[ReplicaFigures] = field(default_factory=tuple)
    migrations: int = 0


class Metrics:
    """All metrics of one app: one set of families, in which each model has its own label."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self.families = Families(self.registry)
        self._models: list[str] = []
        self._collectors = _Collectors()
        self.registry.register(self._collectors)

    def of(self, model_name: str, figures: Callable[[], ClusterFigures] = ClusterFigures) -> ModelMetrics:
        """Return the metrics of a model, which must be new. figures: of its replicas, asked at each scrape."""
        if model_name in self._models:
            raise ValueError(f"the model {model_name!r} has metrics already")
        self._models.append(model_name)
        self.register(_ReplicaCollector(model_name, figures))
        return ModelMetrics(model_name, self.families, self.clock)

    def label(self, model_name: str = "") -> str:
        """Return the label of what was not asked of any model: with one model its name, else ""."""
        return model_name or (self._models[0] if len(self._models) == 1 else "")

    def render(self) -> bytes:
        """Return the Prometheus text of all metrics."""
        return generate_latest(self.registry)

    def answered(self, route: str, status: int, model_name: str = "") -> None:
        """Count one HTTP answer. model_name: that was asked, "" where none was."""
        self.families.answers.labels(route=route, status=str(status), model_name=self.label(model_name)).inc()

    def register(self, collector: Collector) -> None:
        """Show another collector's metrics with these. Several may tell of the same family, each of its own model."""
        self._collectors.all.append(collector)


class Families:
    """What is counted and timed, each by `model_name`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a token.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.success = self._counter("request_success", "Choices that ended, by reason.", "finished_reason")
        self.answers = self._counter("http_responses", "Answers, by route and status.", "route", "status")
        self.time_to_first_token = self._seconds("time_to_first_token", "To the first token.", _FIRST_TOKEN)
        self.inter_token_latency = self._seconds(
            "inter_token_latency", "Between a request's deliveries of tokens, per token.", _PER_TOKEN
        )
        self.time_per_output_token = self._seconds(
            "time_per_output_token", "Mean of a choice's tokens after its first.", _PER_TOKEN
        )
        self.e2e_latency = self._seconds("e2e_request_latency", "From arrival to the last token.", _WHOLE)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"squadron_{name}", text, ["model_name", *labels], registry=self._registry)

    def _seconds(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        full = f"squadron_{name}_seconds"
        return Histogram(full, f"{text} Seconds.", ["model_name"], buckets=buckets, registry=self._registry)


class ModelMetrics:
    """The metrics of one model, ready to count."""

    def __init__(self, model_name: str, families: Families, clock: Callable[[], float]) -> None:
        self.clock = clock
        label = {"model_name": model_name}
        self.prompt_tokens = families.prompt_tokens.labels(**label)
        self.generation_tokens = families.generation_tokens.labels(**label)
        self.finished = {
            reason: families.success.labels(finished_reason=reason, **label)
            for reason in ("stop", "length", "abort", "error")
        }
        self.time_to_first_token = families.time_to_first_token.labels(**label)
        self.inter_token_latency = families.inter_token_latency.labels(**label)
        self.time_per_output_token = families.time_per_output_token.labels(**label)
        self.e2e_latency = families.e2e_latency.labels(**label)

    def track(self, prompt_tokens: int, choices: int, on_output: Callable[[int], None] | None = None) -> RequestTrack:
        """Start to follow one request. on_output: told the tokens of each choice, whichever way it ends."""
        return RequestTrack(self, prompt_tokens, choices, on_output)


class RequestTrack:
    """The times of one request while it runs. Call `ended` exactly once for each choice, or `close` for the rest."""

    __slots__ = ("_arrival", "_choices", "_first", "_last", "_metrics", "_on_output", "_prompt_tokens", "_tokens")

    def __init__(
        self, metrics: ModelMetrics, prompt_tokens: int, choices: int, on_output: Callable[[int], None] | None = None
    ) -> None:
        self._metrics = metrics
        self._on_output = on_output
        self._prompt_tokens = prompt_tokens  # 0 once they were counted
        self._arrival = metrics.clock()
        self._first = [0.0] * choices
        self._last = [0.0] * choices
        self._tokens = [0] * choices
        self._choices = set(range(choices))

    def tokens(self, choice: int, count: int) -> None:
        """Note `count` (at least one) new tokens of a choice."""
        now = self._metrics.clock()
        if self._tokens[choice]:
            self._metrics.inter_token_latency.observe((now - self._last[choice]) / count)
        else:
            self._metrics.prompt_tokens.inc(self._prompt_tokens)
            self._prompt_tokens = 0
            self._first[choice] = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last[choice] = now
        self._tokens[choice] += count
        self._metrics.generation_tokens.inc(count)

    def ended(self, choice: int, reason: str) -> None:
        """Note the end of a choice: `stop`, `length`, `abort` or `error`."""
        if choice not in self._choices:
            return
        self._choices.remove(choice)
        tokens = self._tokens[choice]
        self._metrics.finished[reason].inc()
        if self._on_output is not None:
            self._on_output(tokens)
        if reason in ("abort", "error"):
            return
        if tokens > 1:
            mean = (self._last[choice] - self._first[choice]) / (tokens - 1)
            self._metrics.time_per_output_token.observe(mean)
        self._metrics.e2e_latency.observe(self._metrics.clock() - self._arrival)

    def close(self, reason: str) -> None:
        """End every choice that is still open: `abort` (client gone) or `error`."""
        for choice in tuple(self._choices):
            self.ended(choice, reason)


class _Collectors(Collector):
    """Asks all others when Prometheus asks us, and puts together what they say of the same family."""

    def __init__(self) -> None:
        self.all: list[Collector] = []

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance, so that registering asks nobody."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield each family once."""
        families: dict[str, Metric] = {}
        for collector in self.all:
            for found in collector.collect():
                family = families.setdefault(found.name, found)
                if family is not found:
                    family.samples.extend(found.samples)
        return families.values()


class _ReplicaCollector(Collector):
    """Asks for the replicas' figures when Prometheus asks us."""

    def __init__(self, model_name: str, figures: Callable[[], ClusterFigures]) -> None:
        self._model_name = model_name
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """Yield gauges and counters, one sample per replica."""
        figures = self._figures()
        for name, text, read in _REPLICA_GAUGES:
            gauge = GaugeMetricFamily(f"squadron_{name}", text, labels=["model_name", "replica"])
            self._fill(gauge, figures.replicas, read)
            yield gauge
        for name, text, read in _REPLICA_COUNTERS:
            counter = CounterMetricFamily(f"squadron_{name}", text, labels=["model_name", "replica"])
            self._fill(counter, figures.replicas, read)
            yield counter
        yield self._replica_count(figures.replicas)
        moved = CounterMetricFamily(
            "squadron_migrations", "Requests moved to another replica.", labels=["model_name"]
        )
        moved.add_metric([self._model_name], figures.migrations)
        yield moved

    def _fill(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        replicas: Sequence[ReplicaFigures],
        read: Callable[[EngineStats], float],
    ) -> None:
        for one in replicas:
            family.add_metric([self._model_name, one.replica], read(one.stats))

    def _replica_count(self, replicas: Sequence[ReplicaFigures]) -> Metric:
        gauge = GaugeMetricFamily("squadron_replicas", "Replicas, by state.", labels=["model_name", "state"])
        ready = sum(1 for one in replicas if one.ready)
        gauge.add_metric([self._model_name, "ready"], ready)
        gauge.add_metric([self._model_name, "not_ready"], len(replicas) - ready)
        return gauge


_Read = Callable[[EngineStats], float]
_REPLICA_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("num_requests_running", "Sequences in the running batch.", lambda stats: stats.num_running),
    ("num_requests_waiting", "Sequences that wait to run.", lambda stats: stats.num_waiting),
    ("kv_cache_usage_perc", "Share of the KV blocks in use, 1 = all.", lambda stats: stats.kv_usage),
    ("outstanding_prompt_tokens", "Prompt tokens still to compute.", lambda stats: stats.outstanding_tokens),
    ("kv_blocks_total", "KV blocks; what is neither free nor cached is held.", lambda stats: stats.kv_blocks_total),
    ("kv_blocks_free", "KV blocks that hold nothing.", lambda stats: stats.kv_blocks_free),
    ("kv_blocks_cached", "KV blocks that only the prefix cache knows.", lambda stats: stats.kv_blocks_cached),
)
_REPLICA_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda stats: stats.prefix_query_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda stats: stats.prefix_hit_tokens),
    ("num_preemptions", "Sequences preempted.", lambda stats: stats.preemptions),
    ("engine_prompt_tokens", "Prompt tokens a replica computed or found.", lambda stats: stats.prompt_tokens),
    ("engine_generation_tokens", "Tokens a replica generated.", lambda stats: stats.generated_tokens),
)
