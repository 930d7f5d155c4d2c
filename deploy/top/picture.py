"""Puts together what the routers said of an app. Pure: a report and windows in, a picture out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from deploy.status.report import ReplicaLine, Report
from deploy.top.figures import ModelFigures, Picture, ReplicaFigures, TenantFigures
from deploy.top.quantile import Percentiles, percentiles
from deploy.top.scrape import Series, Window, by_label

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


def make_picture(report: Report, windows: Sequence[Window]) -> Picture:
    """Return what an app does. windows: one for each router; without any, only what the report says is known."""
    if not windows:
        return Picture(report, replicas=tuple(map(ReplicaFigures, report.replicas)))
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


def _model(name: str, windows: Sequence[Window], freshest: Window) -> ModelFigures:
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
    return ModelFigures(
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


def _replica(line: ReplicaLine, window: Window) -> ReplicaFigures:
    """All routers are told the same of a replica, so one of them is asked."""
    if not any(window.new.values(ENGINE_TOKENS, replica=line.name)):
        return ReplicaFigures(line)
    return ReplicaFigures(
        line,
        window.rate(ENGINE_PROMPT_TOKENS, replica=line.name),
        window.rate(ENGINE_TOKENS, replica=line.name),
        _hits(window, replica=line.name),
        int(sum(window.growth(PREEMPTIONS, replica=line.name).values())),
    )


def _tenants(windows: Sequence[Window], freshest: Window) -> tuple[TenantFigures, ...]:
    """The tenants, those with most devices first, and then what was idle."""

    def rates(metric: str) -> dict[str, float]:
        return _added(_rates(window, metric, "tenant") for window in windows)

    requests, prompt, output = rates(TENANT_REQUESTS), rates(TENANT_PROMPT_TOKENS), rates(TENANT_TOKENS)
    queued = _added(by_label(window.new.samples.get(TENANT_QUEUED, {}), "tenant") for window in windows)
    devices = _rates(freshest, DEVICE_SECONDS, "tenant")
    idle = freshest.rate(IDLE_SECONDS)
    found = [
        TenantFigures(
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
    return (*found, TenantFigures("", devices=idle))


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
