"""What `squadron top` shows: a report and windows of the routers' metrics in, one picture out. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.status import ReplicaLine, StatusReport
from deploy.top.scrape import Series, Window, by_label


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds below which half, 95 % and 99 % of the observed stay."""

    p50: float
    p95: float
    p99: float


def percentiles(buckets: Mapping[str, float]) -> Percentiles | None:
    """Return the percentiles of a histogram. buckets: cumulative counts, by `le`. None where nothing was observed."""
    found = [quantile(buckets, share) for share in (0.5, 0.95, 0.99)]
    return None if None in found else Percentiles(*(one for one in found if one is not None))


def quantile(buckets: Mapping[str, float], share: float) -> float | None:
    """Return the value below which `share` (0 to 1) of the observed stay; None where nothing was observed.

    Within a bucket they are taken to lie evenly. What lies above the last bound counts as that bound.
    """
    bounds = sorted((float(bound), count) for bound, count in buckets.items())
    if not bounds or bounds[-1][1] <= 0:
        return None
    rank = share * bounds[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in bounds:
        if count >= rank and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


@dataclass(frozen=True, slots=True)
class ModelPicture:
    """One model, over all routers and replicas. Rates are a second; latencies are of the last interval, None = none.

    requests: that ended well; failed: that ended in an error. refused: turned away at the door. live: requests that
    have not ended; queued: those of them that wait in routers. cache_hits: share of prompt tokens found in the prefix
    cache, of those looked up. moved: requests that migrated in the interval.
    """

    model: str
    requests: float
    failed: float
    refused: float
    prompt_tokens: float
    generation_tokens: float
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    live: int
    queued: int
    cache_hits: float | None
    moved: int


@dataclass(frozen=True, slots=True)
class ReplicaPicture:
    """One replica: its state and load as /ready shows them, and tokens a second."""

    line: ReplicaLine
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    cache_hits: float | None = None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class TenantPicture:
    """One tenant, over all models. devices: how many it kept busy on average; the idle ones have the name ""."""

    tenant: str
    requests: float = 0.0
    refused: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    queued: int = 0
    devices: float = 0.0


@dataclass(frozen=True, slots=True)
class Picture:
    """One poll. seconds: over which rates are taken, None at the first poll. heard: routers that answered."""

    report: StatusReport
    seconds: float | None = None
    heard: int = 0
    models: tuple[ModelPicture, ...] = ()
    replicas: tuple[ReplicaPicture, ...] = ()
    tenants: tuple[TenantPicture, ...] = ()

    def public(self) -> Mapping[str, Any]:
        """Return the picture for JSON."""
        return asdict(self) | {"report": self.report.public()}


ADMITTED, COMPLETED, ABORTED = "admitted", "completed", "aborted"
REQUESTS_ENDED, REQUESTS_LIVE, MIGRATIONS = "requests_ended_total", "requests_live", "migrations_total"
PROMPT_TOKENS, GENERATION_TOKENS = "prompt_tokens_total", "generation_tokens_total"
TTFT, ITL = "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"
TPOT = "request_time_per_output_token_seconds_bucket"
CACHE_QUERIES, CACHE_HITS = "prefix_cache_queries_total", "prefix_cache_hits_total"
ENGINE_PROMPT_TOKENS, ENGINE_TOKENS = "engine_prompt_tokens_total", "engine_generation_tokens_total"
PREEMPTIONS = "num_preemptions_total"
DEVICE_SECONDS, IDLE_SECONDS = "tenant_device_seconds_total", "idle_device_seconds_total"
TENANT_REQUESTS, TENANT_QUEUED = "tenant_requests_total", "tenant_requests_queued"
TENANT_PROMPT_TOKENS, TENANT_TOKENS = "tenant_prompt_tokens_total", "tenant_generation_tokens_total"
NAMES = (
    *(REQUESTS_ENDED, REQUESTS_LIVE, MIGRATIONS, PROMPT_TOKENS, GENERATION_TOKENS, TTFT, ITL, TPOT),
    *(CACHE_QUERIES, CACHE_HITS, ENGINE_PROMPT_TOKENS, ENGINE_TOKENS, PREEMPTIONS, DEVICE_SECONDS, IDLE_SECONDS),
    *(TENANT_REQUESTS, TENANT_QUEUED, TENANT_PROMPT_TOKENS, TENANT_TOKENS),
)
"""All that is read, as samples are named, without `squadron_`."""


def make_picture(report: StatusReport, windows: Sequence[Window]) -> Picture:
    """Return what an app does. windows: one for each router; without any, only what the report says is known."""
    if not windows:
        return Picture(report, replicas=tuple(map(ReplicaPicture, report.replicas)))
    freshest = max(windows, key=lambda window: window.new.at)
    seconds = max(window.seconds for window in windows)
    return Picture(
        report,
        seconds,
        len(windows),
        tuple(_model(name, windows, freshest) for name in report.models),
        tuple(_replica(line, freshest) for line in report.replicas),
        _tenants(windows, freshest),
    )


def _model(name: str, windows: Sequence[Window], freshest: Window) -> ModelPicture:
    def rate(metric: str, **labels: str) -> float:
        return sum(window.rate(metric, model_name=name, **labels) for window in windows)

    def ends(kept: Callable[[str], bool]) -> float:
        grown = (_rates(window, REQUESTS_ENDED, "outcome", kept, model_name=name) for window in windows)
        return sum(sum(one.values()) for one in grown)

    def latencies(metric: str) -> Percentiles | None:
        return percentiles(_buckets(window.growth(metric, model_name=name) for window in windows))

    def now(metric: str) -> int:
        return int(sum(window.new.sum(metric, model_name=name) for window in windows))

    moved = sum(sum(window.growth(MIGRATIONS, model_name=name).values()) for window in windows)
    return ModelPicture(
        model=name,
        requests=rate(REQUESTS_ENDED, outcome=COMPLETED),
        failed=ends(lambda outcome: outcome not in (COMPLETED, ABORTED)),
        refused=_refused(windows, model_name=name),
        prompt_tokens=rate(PROMPT_TOKENS),
        generation_tokens=rate(GENERATION_TOKENS),
        ttft=latencies(TTFT),
        itl=latencies(ITL),
        tpot=latencies(TPOT),
        live=now(REQUESTS_LIVE),
        queued=now(TENANT_QUEUED),
        cache_hits=_hits(freshest, model_name=name),
        moved=int(moved),
    )


def _replica(line: ReplicaLine, window: Window) -> ReplicaPicture:
    """All routers have the same figures of a replica, so one of them is asked."""
    if not any(window.new.values(ENGINE_TOKENS, replica=line.name)):
        return ReplicaPicture(line)
    return ReplicaPicture(
        line,
        window.rate(ENGINE_PROMPT_TOKENS, replica=line.name),
        window.rate(ENGINE_TOKENS, replica=line.name),
        _hits(window, replica=line.name),
        int(sum(window.growth(PREEMPTIONS, replica=line.name).values())),
    )


def _tenants(windows: Sequence[Window], freshest: Window) -> tuple[TenantPicture, ...]:
    """The tenants, those with most devices first, and then what was idle."""

    def rates(metric: str) -> dict[str, float]:
        return _added(_rates(window, metric, "tenant") for window in windows)

    requests, prompt, output = rates(TENANT_REQUESTS), rates(TENANT_PROMPT_TOKENS), rates(TENANT_TOKENS)
    queued = _added(by_label(window.new.samples.get(TENANT_QUEUED, {}), "tenant") for window in windows)
    devices = _rates(freshest, DEVICE_SECONDS, "tenant")
    idle = freshest.rate(IDLE_SECONDS)
    found = [
        TenantPicture(
            name,
            requests.get(name, 0.0),
            _refused(windows, tenant=name),
            prompt.get(name, 0.0),
            output.get(name, 0.0),
            int(queued.get(name, 0)),
            devices.get(name, 0.0),
        )
        for name in {*requests, *devices}
    ]
    found.sort(key=lambda one: (-one.devices, -one.generation_tokens, one.tenant))
    return (*found, TenantPicture("", devices=idle))


def _refused(windows: Sequence[Window], **labels: str) -> float:
    found = (
        _rates(window, TENANT_REQUESTS, "outcome", lambda said: said != ADMITTED, **labels) for window in windows
    )
    return sum(sum(one.values()) for one in found)


def _hits(window: Window, **labels: str) -> float | None:
    looked_up = window.rate(CACHE_QUERIES, **labels)
    return window.rate(CACHE_HITS, **labels) / looked_up if looked_up else None


def _rates(
    window: Window, metric: str, label: str, kept: Callable[[str], bool] = bool, **labels: str
) -> dict[str, float]:
    grown = by_label(window.growth(metric, **labels), label, kept)
    return {name: value / window.seconds for name, value in grown.items()}


def _buckets(grown: Iterable[Series]) -> dict[str, float]:
    return _added(by_label(series, "le") for series in grown)


def _added(each: Iterable[dict[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for one in each:
        for name, value in one.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
