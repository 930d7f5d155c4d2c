"""The table of families: names, types and buckets are what Prometheus and vLLM's users expect."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.admission.tenants import Tenancy
from cluster.config import parse_config
from cluster.grpc_api.metrics import GrpcMetrics
from cluster.router.counters import DispatcherCounters
from cluster.router.metrics import CostCollector, RequestCollector, TenantCollector
from cluster.router.models import Models
from cluster.router.replica_set import ReplicaView
from cluster.telemetry.families import FAMILIES, PREFIX, TABLE, Family, Kind, Source
from cluster.telemetry.metrics import Metrics, ReplicaSetStats, ReplicaStats
from cluster.telemetry.samples import Histogram, histogram_of, vllm_samples
from cluster.telemetry.step_metrics import StepMetrics
from cluster.wire.parts import Load, ReplicaCosts, ResourceUsage
from engine.errors import ConfigError
from engine.report import EngineStats
from tests.cluster.telemetry.test_metrics import asked
from tests.docs.metrics_page import PAGE, page
from tests.metric_families import at_routers
from tests.openai_app import front_for

VLLM_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
              960.0, 1920.0, 7680.0)  # fmt: skip
VLLM_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                  80.0)  # fmt: skip
VLLM_COUNTS = (*(float(digit * 10**zeros) for zeros in range(6) for digit in (1, 2, 5)), 1e6)
VLLM_BUCKETS = {
    "time_to_first_token_seconds": (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                                    7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    "inter_token_latency_seconds": VLLM_PER_TOKEN,
    "request_time_per_output_token_seconds": VLLM_PER_TOKEN,
    "e2e_request_latency_seconds": VLLM_WHOLE,
    "request_queue_time_seconds": VLLM_WHOLE,
    "request_prefill_time_seconds": VLLM_WHOLE,
    "request_decode_time_seconds": VLLM_WHOLE,
    "request_inference_time_seconds": VLLM_WHOLE,
    "request_prompt_tokens": VLLM_COUNTS,
    "request_generation_tokens": VLLM_COUNTS,
    "request_params_max_tokens": VLLM_COUNTS,
    "request_num_preemptions": (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
    "request_params_n": (1.0, 2.0, 5.0, 10.0, 20.0),
    "iteration_tokens_total": (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
                               16384.0),
}  # fmt: skip


@pytest.mark.parametrize("family", TABLE, ids=lambda family: family.name)
def test_a_family_is_well_formed(family: Family) -> None:
    assert re.fullmatch("[a-z][a-z0-9_]*", family.name)
    assert family.text.endswith(".")
    assert (family.kind is Kind.HISTOGRAM) == bool(family.buckets)
    assert list(family.buckets) == sorted(set(family.buckets))
    assert not family.name.endswith("_total") or family.name == "iteration_tokens_total"  # vLLM's name of a histogram
    assert len(set(family.ray_labels)) == len(family.ray_labels)
    if family.source is Source.TOLD:
        assert "replica" in family.labels


def test_names_are_unique_and_no_series_of_one_is_that_of_another() -> None:
    assert len(FAMILIES) == len(TABLE)
    suffixes = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    series = [family.name + suffix for family in TABLE for suffix in suffixes[family.kind]]
    assert len(series) == len(set(series))


def test_all_aliases_of_histograms_are_compared() -> None:
    assert {*VLLM_BUCKETS} == {family.vllm for family in TABLE if family.vllm and family.kind is Kind.HISTOGRAM}


@pytest.mark.parametrize(("name", "buckets"), VLLM_BUCKETS.items())
def test_an_alias_has_exactly_vllms_buckets(name: str, buckets: tuple[float, ...]) -> None:
    family = FAMILIES[name]
    assert family.buckets[family.finer :] == buckets
    told = histogram_of(name, ("demo",), Histogram(family.buckets))
    bounds = [sample.labels["le"] for sample in vllm_samples(told, family) if sample.name.endswith("_bucket")]
    assert [float(bound) for bound in bounds] == [*buckets, float("inf")]


def parsed(metrics: Metrics) -> list:
    return list(text_string_to_metric_families(metrics.render().decode()))


def shown(vllm: bool = False) -> list:
    """All families of an app under one model, whose one request was answered."""
    metrics = Metrics(vllm=vllm)
    figures = ReplicaSetStats([ReplicaStats("r1", EngineStats(num_waiting=3, kv_blocks_total=4))])
    front = front_for(None, model=FakeModel(), metrics=metrics, figures=lambda: figures)
    metrics.register(TenantCollector(Tenancy(), Models([front]), metrics))
    metrics.register(RequestCollector("demo", DispatcherCounters(), lambda: 9, lambda: 8))
    told = StepMetrics("demo", 16, "r1").told()
    costs = ReplicaCosts(ResourceUsage(), ResourceUsage(), {"team": ResourceUsage()}, {"team": 0.0}, told)
    view = ReplicaView("r1", 1, False, True, 0, 0.1, Load(), costs, block_size=16, num_kv_blocks=4)
    metrics.register(CostCollector("demo", lambda: [view], DispatcherCounters()))
    GrpcMetrics(metrics).answered("Generate", "OK")
    metrics.answered("/v1/models", 200)
    track = front.metrics.track([asked(5)])
    track.tokens(0, 2)
    track.ended(0, "length")
    return parsed(metrics)


class FakeModel:
    """As much of a served model as the metrics see."""

    model_id = "demo"
    names = (model_id,)


def test_an_app_shows_families_of_the_table_and_no_others() -> None:
    for family in shown():
        declared = FAMILIES[family.name.removeprefix(PREFIX).removesuffix("_created")]
        if family.name.endswith("_created"):
            continue  # prometheus_client's own addition
        assert family.name.startswith(PREFIX)
        assert (family.type, family.documentation) == (declared.kind.value, declared.text)
        assert at_routers(declared)
        for sample in family.samples:
            assert {*sample.labels} - {"le"} == {*declared.labels}


def test_without_compatibility_nothing_has_vllms_names() -> None:
    assert not [family.name for family in shown() if not family.name.startswith(PREFIX)]


def test_with_it_vllms_names_have_the_same_types_labels_and_values() -> None:
    found = {family.name: family for family in shown(vllm=True)}
    aliases = {name: family for name, family in found.items() if name.startswith("vllm:")}
    assert {*aliases} == {f"vllm:{one.vllm}" for one in TABLE if one.vllm and at_routers(one)}
    for name, alias in aliases.items():
        ours = [found[one.full_name] for one in TABLE if f"vllm:{one.vllm}" == name]
        assert {alias.type} == {one.type for one in ours}
        values = {
            (s.name.removeprefix(one.name), *sorted(s.labels.items())): s.value for one in ours for s in one.samples
        }
        bounds = {float(sample.labels["le"]) for sample in alias.samples if "le" in sample.labels}
        assert bounds in (set(), {*VLLM_BUCKETS.get(name.removeprefix("vllm:"), ()), float("inf")})
        for sample in alias.samples:
            assert values[sample.name.removeprefix(name), *sorted(sample.labels.items())] == sample.value


# What vLLM's own test of its `/metrics` looks for, without suffixes of histograms.
VLLMS_OWN = {
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
    "iteration_tokens_total", "cache_config_info", "request_success", "request_prompt_tokens",
    "request_generation_tokens", "request_params_n", "request_params_max_tokens", "request_num_preemptions",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "admission_rejections",
}  # fmt: skip


def test_a_router_shows_what_vllms_own_test_looks_for() -> None:
    assert {f"vllm:{name}" for name in VLLMS_OWN} <= {family.name for family in shown(vllm=True)}


VLLM_METRICS = Path(__file__).parent / "vllm_metrics.txt"  # all names in the sources of vLLM 0.33
PEER = "SQUADRON_VLLM_PACKAGE"  # environment variable: the folder of an installed vLLM


def refused_names() -> list[str]:
    """Names, or their beginnings with a *, in the first column of the page's table of what is not here."""
    rows = PAGE.read_text(encoding="utf-8").partition("| vLLM's, not here |")[2].partition("\n\n")[0].splitlines()
    return [name for row in rows[2:] for name in re.findall("`([^`]+)`", row.split("|")[1])]


def test_every_name_of_vllms_is_here_or_refused_by_a_sentence() -> None:
    here = {family.vllm for family in TABLE if family.vllm}
    known = VLLM_METRICS.read_text(encoding="utf-8").split()
    assert here <= {*known}, "an alias of nothing"
    refused = refused_names()
    for name in known:
        assert (name in here) != any(fnmatchcase(name, one) for one in refused), name
    for one in refused:
        assert any(fnmatchcase(name, one) for name in known), f"{one} is none of vLLM's"


@pytest.mark.skipif(not os.environ.get(PEER), reason=f"no vLLM to read: set {PEER} to the folder of its package")
def test_the_names_are_those_of_the_vllm_that_is_installed() -> None:
    sources = [one.read_text(encoding="utf-8") for one in Path(os.environ[PEER]).rglob("*.py")]
    found = {name for text in sources for name in re.findall("[\"']vllm:([a-z0-9_]+)", text)}
    assert found - {"diffusion", "spec_decode"} == {*VLLM_METRICS.read_text(encoding="utf-8").split()}


def test_reasons_of_waiting_add_up_to_all_that_wait() -> None:
    found = {family.name: family for family in shown(vllm=True)}
    waiting, by_reason = found["vllm:num_requests_waiting"], found["vllm:num_requests_waiting_by_reason"]
    assert sum(sample.value for sample in by_reason.samples) == sum(sample.value for sample in waiting.samples) == 11


def test_the_size_of_the_cache_is_told() -> None:
    found = {family.name: family for family in shown(vllm=True)}["vllm:cache_config_info"]
    (sample,) = found.samples
    labels = {"model_name": "demo", "replica": "r1", "block_size": "16", "num_gpu_blocks": "4"}
    assert (sample.labels, sample.value) == (labels, 1)


def test_a_scaler_that_knows_vllm_is_told_of_all_that_wait() -> None:
    """A vLLM has no queue but its engine's; here replicas are handed little more than they run."""
    (waiting,) = [family for family in shown(vllm=True) if family.name == "vllm:num_requests_waiting"]
    assert waiting.documentation == FAMILIES["num_requests_waiting"].text
    found = {tuple(sample.labels.items()): sample.value for sample in waiting.samples}
    assert found == {(("model_name", "demo"),): 8, (("model_name", "demo"), ("replica", "r1")): 3}


def test_whose_names_is_checked_and_a_value_that_works_is_named() -> None:
    assert parse_config({"model": "demo"}).metrics_compat is None
    assert parse_config({"model": "demo", "metrics-compat": "vllm"}).metrics_compat == "vllm"
    with pytest.raises(ConfigError, match=r"^metrics_compat: must be one of vllm, not 'sglang'") as caught:
        parse_config({"model": "demo", "metrics_compat": "sglang"})
    assert caught.value.flag == "metrics_compat"


def test_the_page_has_the_table_of_now() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run `make docs`"
    assert all(f"`{family.shown_name}`" in text for family in TABLE)
    with pytest.raises(ConfigError, match="must hold the lines"):
        page("no marks")


def test_documents_name_only_figures_of_the_table() -> None:
    known = {family.shown_name + suffix for family in TABLE for suffix in ("", "_bucket", "_sum", "_count")}
    documents = [PAGE.parents[2] / "README.md", *PAGE.parents[1].rglob("*.md")]
    named = {name for path in documents for name in re.findall(r"squadron_[a-z0-9_]*[a-z0-9]", path.read_text())}
    assert named <= known
