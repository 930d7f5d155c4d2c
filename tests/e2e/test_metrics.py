"""What Ray's own agent shows of a live app under load: every family of the table, by router, replica and rank."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString
from ray.dashboard.modules.metrics.dashboards import serve_llm_dashboard_panels

from cluster.telemetry.families import RAY_PREFIX, TABLE, VLLM_RAY, Family, Kind, Source
from tests.e2e.agent import ask_over_grpc
from tests.e2e.harness import App, eventually

# Names that Ray's Serve-LLM dashboard asks for and that mean nothing here.
MEANINGLESS = ("num_requests_swapped", "external_prefix_cache_", "kv_offload_", "nixl_")
SUFFIXES = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
STREAMS, TOKENS = 6, 60
OF_ROUTER = ("generation_tokens_total", "request_success_total", "e2e_request_latency_seconds_count")
OF_REPLICAS = ("engine_generation_tokens_total", "prefix_cache_queries_total")
Series = dict[str, list[Sample]]


def agents_series() -> Series:
    """All series that the agent of this node shows, by name."""
    (node,) = ray.nodes()
    text = httpx.get(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=10).text
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def stream(app: App, number: int) -> int:
    body = {"model": "demo", "prompt": f"import m{number}\n", "max_tokens": TOKENS, "ignore_eos": True}
    return len(httpx.post(f"{app.url}/v1/completions", json=body, timeout=60).json()["choices"])


def compile_a_grammar(app: App) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}
    assert httpx.post(f"{app.url}/v1/completions", json=body, timeout=60).status_code == 200


def summed(series: Series, name: str, **labels: str) -> float:
    """Sum of one of our figures over all series that have these labels."""
    found = series.get(f"{RAY_PREFIX}squadron_{name}", ())
    return sum(one.value for one in found if labels.items() <= one.labels.items())


def replica_ids(app: App) -> set[str]:
    return {replica["id"] for replica in app.ready()["replicas"]}


def labelled(series: Series, name: str, *labels: str) -> set[tuple[str, ...]]:
    """Values of some labels of one of our figures."""
    return {tuple(one.labels[label] for label in labels) for one in series.get(f"{RAY_PREFIX}squadron_{name}", ())}


@pytest.fixture(scope="module")
def series(demo_app: App) -> Series:
    """What the agent shows once it was told of some streams, and all that routers and replicas know by then."""
    with ThreadPoolExecutor(STREAMS) as pool:
        assert sum(pool.map(lambda number: stream(demo_app, number), range(STREAMS))) == STREAMS
    compile_a_grammar(demo_app)
    ask_over_grpc(demo_app)
    missing: list[str] = []

    def told() -> Series | None:
        found = agents_series()
        missing[:] = _missing(demo_app, found)
        return None if missing else found

    try:
        return eventually(told, "all figures at Ray's agent", 60)
    except AssertionError:
        raise AssertionError(f"Ray's agent was not told of {missing}") from None


def _missing(app: App, found: Series) -> list[str]:
    """Name the figures that are not yet those of the app, which has come to rest."""
    router, replicas = app.ready()["router"], replica_ids(app)
    wanted = {name: app.metric(f"squadron_{name}") for name in (*OF_ROUTER, *OF_REPLICAS)}
    told = {name: summed(found, name, router=router) for name in OF_ROUTER}
    told |= {name: sum(summed(found, name, replica=replica) for replica in replicas) for name in OF_REPLICAS}
    missing = [f"{name} {value:g}, not {told[name]:g}" for name, value in wanted.items() if told[name] != value]
    ranks = {(replica, rank) for replica in replicas for rank in "01"}
    missing += [f"rank {one}" for one in ranks - labelled(found, "rank_memory_bytes", "replica", "rank")]
    if not labelled(found, "tenant_grammar_seconds_total", "tenant"):
        missing.append("tenant_grammar_seconds")
    if not labelled(found, "grpc_responses_total", "router"):
        missing.append("grpc_responses")
    steps = sum(summed(found, "iteration_tokens_total_sum", replica=replica) for replica in replicas)
    return missing if steps >= STREAMS * TOKENS else [*missing, f"iteration_tokens {steps:g}"]


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family.name)
def test_every_family_is_there_with_its_labels(series: Series, family: Family) -> None:
    for suffix in SUFFIXES[family.kind]:
        found = series[f"{RAY_PREFIX}{family.full_name}{suffix}"]
        wanted = {*family.ray_labels, "WorkerId", *(("le",) if suffix == "_bucket" else ())}
        for sample in found:
            assert wanted <= {*sample.labels}, sample
            assert all(sample.labels[label] for label in family.own_labels)
    if family.kind is Kind.HISTOGRAM:
        bounds = {sample.labels["le"] for sample in series[f"{RAY_PREFIX}{family.full_name}_bucket"]}
        assert bounds == {*map(floatToGoString, family.buckets), "+Inf"}


def test_processes_are_told_apart(series: Series, demo_app: App) -> None:
    replicas = replica_ids(demo_app)
    assert len(replicas) == 2
    for family in TABLE:
        if family.source in (Source.TOLD, Source.REPLICA) and "tenant" not in family.labels:
            shown = labelled(series, family.name + SUFFIXES[family.kind][-1], "replica")
            assert {(replica,) for replica in replicas} <= shown, family.name
    forward = labelled(series, "rank_forward_seconds_sum", "replica", "rank")
    assert {(replica, rank) for replica in replicas for rank in "01"} <= forward
    assert ("0",) not in labelled(series, "rank_channel_wait_seconds_sum", "rank"), "rank 0 is the one that tells"


def test_sums_and_times_are_exact(series: Series, demo_app: App) -> None:
    """The fixture has compared counts; Ray's own histograms would have lost the sums."""
    router = demo_app.ready()["router"]
    for name in ("time_to_first_token_seconds_sum", "e2e_request_latency_seconds_sum"):
        assert summed(series, name, router=router) == pytest.approx(demo_app.metric(f"squadron_{name}"), rel=1e-9)
    for replica in replica_ids(demo_app):
        parts = [
            summed(series, f"step_{part}_seconds_sum", replica=replica) for part in ("host", "device", "channel")
        ]
        assert all(parts)
        assert summed(series, "step_seconds_sum", replica=replica) == pytest.approx(sum(parts))


def test_rays_own_dashboard_finds_all_that_means_something_here(series: Series) -> None:
    text = Path(serve_llm_dashboard_panels.__file__).read_text()
    asked = {*re.findall(rf"{RAY_PREFIX}{VLLM_RAY}[a-z_]+[a-z]", text)}
    assert len(asked) > 25
    wanted = {name for name in asked if not name.removeprefix(RAY_PREFIX + VLLM_RAY).startswith(MEANINGLESS)}
    histograms = {RAY_PREFIX + VLLM_RAY + one.name for one in TABLE if one.vllm and one.kind is Kind.HISTOGRAM}
    of_histograms = {f"{name}{suffix}" for name in wanted & histograms for suffix in ("_bucket", "_sum", "_count")}
    shown = {name for name in series if name.startswith(RAY_PREFIX + VLLM_RAY)}
    assert (wanted - histograms) | of_histograms <= shown
    counters = "ray_serve_deployment_request_counter_total"
    known = {sample.labels["WorkerId"]: sample.labels["deployment"] for sample in series[counters]}
    for name in ("ray_vllm_num_requests_running", "ray_vllm_request_queue_time_seconds_sum"):
        assert {known[sample.labels["WorkerId"]] for sample in series[name]} == {"Replica"}, "the dashboard's join"
    waiting = series["ray_vllm_num_requests_waiting"]
    assert {known[sample.labels["WorkerId"]] for sample in waiting} == {"Replica", "Router"}, "all that waits"
    assert {known[one.labels["WorkerId"]] for one in series["ray_vllm_time_to_first_token_seconds_sum"]} == {"Router"}
