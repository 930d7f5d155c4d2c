"""Prometheus metrics of one front end: what it sees of its requests, and what the replicas' engines report.

All families are those of `cluster.telemetry.families`. Each app has a registry of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.telemetry.families import FAMILIES
from cluster.telemetry.samples import (
    Histogram,
    Labels,
    TenantRegistry,
    VllmNames,
    family_of,
    histograms_of,
    live_counter,
    live_histogram,
)
from cluster.wire.parts import ReplicaCosts, ResourceUsage
from engine.report import EngineStats
from engine.request import Request

_READ: Mapping[str, Callable[[EngineStats], float]] = {
    "num_requests_running": lambda stats: stats.num_running,
    "num_requests_waiting": lambda stats: stats.num_waiting,
    "kv_cache_usage_perc": lambda stats: stats.kv_usage,
    "outstanding_prompt_tokens": lambda stats: stats.outstanding_tokens,
    "prefix_cache_queries": lambda stats: stats.prefix_query_tokens,
    "prefix_cache_hits": lambda stats: stats.prefix_hit_tokens,
    "num_preemptions": lambda stats: stats.preemptions,
    "engine_prompt_tokens": lambda stats: stats.prompt_tokens,
    "engine_generation_tokens": lambda stats: stats.generated_tokens,
}
_UNITS: Mapping[str, Callable[[ResourceUsage], float]] = {
    "device_seconds": lambda used: used.device_seconds,
    "kv_block_seconds": lambda used: used.block_seconds,
}
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level; source: vLLM
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def engine_metrics(model_name: str, engines: Mapping[str, EngineStats]) -> Iterable[Metric]:
    """Yield the metrics of a model's engines, by replica."""
    for name, read in _READ.items():
        yield family_of(name, {(model_name, replica): read(stats) for replica, stats in engines.items()})
    blocks: dict[Labels, float] = {
        (model_name, replica, state): number
        for replica, stats in engines.items()
        for state, number in _blocks(stats).items()
    }
    yield family_of("kv_blocks", blocks)
    waiting: dict[Labels, float] = {
        (model_name, replica, "capacity"): stats.num_waiting for replica, stats in engines.items()
    }
    yield family_of("num_requests_waiting_by_reason", waiting)


def _blocks(stats: EngineStats) -> Mapping[str, int]:
    free, cached = stats.kv_blocks_free, stats.kv_blocks_cached
    return {"free": free, "cached": cached, "held": stats.kv_blocks_total - free - cached}


def account_metrics(model_name: str, accounts: Mapping[str, ReplicaCosts]) -> Iterable[Metric]:
    """Yield the accounts of a model's replicas, by replica."""
    for unit, read in _UNITS.items():
        used = {(model_name, replica): costs for replica, costs in accounts.items()}
        yield family_of(unit, {labels: read(costs.total) for labels, costs in used.items()})
        yield family_of(f"idle_{unit}", {labels: read(costs.idle) for labels, costs in used.items()})
        tenants: dict[Labels, float] = {
            (*labels, name): read(usage) for labels, costs in used.items() for name, usage in costs.tenants.items()
        }
        yield family_of(f"tenant_{unit}", tenants)
    compiled: dict[Labels, float] = {
        (model_name, replica, name): seconds
        for replica, costs in accounts.items()
        for name, seconds in costs.grammars.items()
    }
    yield family_of("tenant_grammar_seconds", compiled)


def told_histograms(model_name: str, accounts: Mapping[str, ReplicaCosts]) -> Iterable[Metric]:
    """Yield the histograms that a model's replicas have told, by replica."""
    names = dict.fromkeys(name for costs in accounts.values() for name in costs.histograms)
    for name in names:
        bounds = FAMILIES[name].buckets
        told = {replica: costs.histograms[name] for replica, costs in accounts.items() if name in costs.histograms}
        values: dict[Labels, Histogram] = {
            (model_name, replica): Histogram(bounds, one.counts, one.total) for replica, one in told.items()
        }
        yield histograms_of(name, values)


def cache_metric(model_name: str, caches: Mapping[str, tuple[int, int]]) -> Metric:
    """Return the sizes of replicas' KV caches: tokens of a block and blocks, by replica."""
    return family_of("cache_config_info", {(model_name, one, *map(str, size)): 1 for one, size in caches.items()})


def sleep_metric(model_name: str, levels: Mapping[str, int]) -> Metric:
    """Return the states of replicas that sleep at these levels, 0 = awake."""
    states: dict[Labels, float] = {
        (model_name, one, state): float(number == level)
        for one, level in levels.items()
        for number, state in enumerate(SLEEP_STATES)
    }
    return family_of("engine_sleep_state", states)


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """The last report of one replica."""

    replica: str
    stats: EngineStats
    ready: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaSetStats:
    """What a router knows of a model's replicas. `migrations`: requests it moved to another one since it started."""

    replicas: Sequence[ReplicaStats] = field(default_factory=tuple)
    migrations: int = 0


class Metrics:
    """All metrics of one app: one set of families, in which each model has its own label.

    vllm: whether to show them under vLLM's names too. clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, vllm: bool = False) -> None:
        self.clock = clock
        self._started = time.time()
        self.registry = CollectorRegistry()
        self.families = Families(self.registry)
        self._models: list[str] = []
        self._collectors = _Collectors()
        self.registry.register(self._collectors)
        self._vllm = VllmNames(self.registry) if vllm else None

    def of(self, model_name: str, stats: Callable[[], ReplicaSetStats] = ReplicaSetStats) -> ModelMetrics:
        """Return the metrics of a model, which must be new. stats: of its replicas, asked at each scrape."""
        if model_name in self._models:
            raise ValueError(f"the model {model_name!r} has metrics already")
        self._models.append(model_name)
        self.register(_ReplicaCollector(model_name, stats, self._started))
        return ModelMetrics(model_name, self.families, self.clock)

    def label(self, model_name: str = "") -> str:
        """Return the label of what was not asked of any model: with one model its name, else ""."""
        return model_name or (self._models[0] if len(self._models) == 1 else "")

    def render(self, tenant: str | None = None) -> bytes:
        """Return the Prometheus text of all metrics, or of those of one tenant alone."""
        if tenant is not None:
            return generate_latest(TenantRegistry(self.registry, tenant))
        return generate_latest(self.registry) + (b"" if self._vllm is None else generate_latest(self._vllm))

    def answered(self, route: str, status: int, model_name: str = "") -> None:
        """Count one HTTP answer. model_name: that was asked, "" where none was."""
        self.families.answers.labels(route=route, status=str(status), model_name=self.label(model_name)).inc()

    def register(self, collector: Collector) -> None:
        """Show another collector's metrics with these. Several may have the same family, each of its own model."""
        self._collectors.all.append(collector)


class Families:
    """What is counted and timed, each by `model_name`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prompt_tokens = live_counter("prompt_tokens", registry)
        self.generation_tokens = live_counter("generation_tokens", registry)
        self.success = live_counter("request_success", registry)
        self.answers = live_counter("http_responses", registry)
        self.time_to_first_token = live_histogram("time_to_first_token_seconds", registry)
        self.inter_token_latency = live_histogram("inter_token_latency_seconds", registry)
        self.time_per_output_token = live_histogram("request_time_per_output_token_seconds", registry)
        self.e2e_latency = live_histogram("e2e_request_latency_seconds", registry)
        self.request_prompt_tokens = live_histogram("request_prompt_tokens", registry)
        self.request_generation_tokens = live_histogram("request_generation_tokens", registry)
        self.params_n = live_histogram("request_params_n", registry)
        self.params_max_tokens = live_histogram("request_params_max_tokens", registry)


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
        self.request_prompt_tokens = families.request_prompt_tokens.labels(**label)
        self.request_generation_tokens = families.request_generation_tokens.labels(**label)
        self.params_n = families.params_n.labels(**label)
        self.params_max_tokens = families.params_max_tokens.labels(**label)

    def track(self, requests: Sequence[Request], on_output: Callable[[int], None] | None = None) -> RequestTrack:
        """Start to follow a call, whose choices are those of its requests, in order.

        on_output: called with the tokens of each choice, whichever way it ends.
        """
        return RequestTrack(self, requests, on_output)

    def served(self, request: Request) -> None:
        """Count what a request asked for, which got something."""
        params = request.params
        self.prompt_tokens.inc(len(request.prompt_token_ids))
        self.request_prompt_tokens.observe(len(request.prompt_token_ids))
        self.params_n.observe(params.n)
        if params.max_tokens is not None and request.pooling is None:
            self.params_max_tokens.observe(params.max_tokens)


class RequestTrack:
    """The times of one call while it runs. Call `ended` exactly once for each choice, or `close` for the rest."""

    __slots__ = ("_arrival", "_choices", "_first", "_last", "_metrics", "_on_output", "_requests", "_tokens")

    def __init__(
        self, metrics: ModelMetrics, requests: Sequence[Request], on_output: Callable[[int], None] | None = None
    ) -> None:
        choices = sum(request.params.n for request in requests)
        self._metrics = metrics
        self._on_output = on_output
        self._requests = requests  # none once they were counted
        self._arrival = metrics.clock()
        self._first = [0.0] * choices
        self._last = [0.0] * choices
        self._tokens = [0] * choices
        self._choices = set(range(choices))

    def tokens(self, choice: int, count: int, again: bool = False) -> None:
        """Note `count` (at least one) new tokens of a choice. again: another router had and counted them."""
        now = self._metrics.clock()
        if again:
            self._first[choice] = self._first[choice] or now
            self._last[choice], self._requests = now, ()
            self._tokens[choice] += count
            return
        if self._tokens[choice]:
            self._metrics.inter_token_latency.observe((now - self._last[choice]) / count)
        else:
            self._served()
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
        tokens, metrics = self._tokens[choice], self._metrics
        metrics.finished[reason].inc()
        if tokens:
            metrics.request_generation_tokens.observe(tokens)
        if self._on_output is not None:
            self._on_output(tokens)
        if reason in ("abort", "error"):
            return
        self._served()  # of a pooled state there are no tokens
        if tokens > 1:
            metrics.time_per_output_token.observe((self._last[choice] - self._first[choice]) / (tokens - 1))
        metrics.e2e_latency.observe(metrics.clock() - self._arrival)

    def close(self, reason: str) -> None:
        """End every choice that is still open: `abort` (client gone) or `error`."""
        for choice in tuple(self._choices):
            self.ended(choice, reason)

    def _served(self) -> None:
        """Count what was asked for, once there is an answer to it."""
        requests, self._requests = self._requests, ()
        for request in requests:
            self._metrics.served(request)


class NoTrack(RequestTrack):
    """Of an answer that is made again: whoever made it first has counted it."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def tokens(self, choice: int, count: int, again: bool = False) -> None:
        """Note nothing."""

    def ended(self, choice: int, reason: str) -> None:
        """Note nothing."""

    def close(self, reason: str) -> None:
        """Note nothing."""


class _Collectors(Collector):
    """Asks all others when Prometheus asks us, and puts together what they say of the same family."""

    def __init__(self) -> None:
        self.all: list[Collector] = []

    def describe(self) -> Iterable[Metric]:
        """Describe nothing in advance, so that registering collects nothing."""
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
    """Asks for the replicas' statistics when Prometheus asks us."""

    def __init__(self, model_name: str, stats: Callable[[], ReplicaSetStats], started: float) -> None:
        self._model_name = model_name
        self._stats = stats
        self._started = started

    def collect(self) -> Iterable[Metric]:
        """Yield what replicas reported, one sample for each, and what the router knows of them and of itself."""
        stats, model = self._stats(), self._model_name
        yield from engine_metrics(model, {one.replica: one.stats for one in stats.replicas})
        ready = sum(1 for one in stats.replicas if one.ready)
        yield family_of("replicas", {(model, "ready"): ready, (model, "not_ready"): len(stats.replicas) - ready})
        yield family_of("migrations", {(model,): stats.migrations})
        yield family_of("router_start_time_seconds", {(model,): self._started})
