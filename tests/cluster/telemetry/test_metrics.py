"""Figures for Prometheus: the replicas' last reports, and the times of requests."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.errors import STATUS_BY_CODE
from cluster.router.counters import FAULTS, DispatcherCounters
from cluster.router.metrics import RequestCollector
from cluster.telemetry.metrics import Metrics, ReplicaSetStats, ReplicaStats
from engine.report import EngineStats
from engine.request import Request
from engine.sampling_params import SamplingParams


def samples(metrics):
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics, name, **labels):
    return samples(metrics)[(f"squadron_{name}", *sorted({"model_name": "demo", **labels}.items()))]


def asked(prompt_tokens, n=1, max_tokens=16):
    return Request("r", (1,) * prompt_tokens, SamplingParams(n=n, max_tokens=max_tokens))


def test_replicas_are_asked_at_each_scrape():
    stats = [EngineStats(num_running=3, num_waiting=2, kv_blocks_total=10, kv_blocks_free=4, kv_blocks_cached=1,
                         prefix_query_tokens=100, prefix_hit_tokens=40, preemptions=7)]  # fmt: skip
    metrics = Metrics()
    metrics.of("demo", lambda: ReplicaSetStats([ReplicaStats("r1", stats[0])], migrations=5))
    assert value(metrics, "num_requests_running", replica="r1") == 3
    assert value(metrics, "num_requests_waiting", replica="r1") == 2
    assert value(metrics, "kv_cache_usage_perc", replica="r1") == 0.5
    assert value(metrics, "prefix_cache_queries_total", replica="r1") == 100
    assert value(metrics, "prefix_cache_hits_total", replica="r1") == 40
    assert value(metrics, "num_preemptions_total", replica="r1") == 7
    assert value(metrics, "migrations_total") == 5
    states = {state: value(metrics, "kv_blocks", replica="r1", state=state) for state in ("free", "cached", "held")}
    assert states == {"free": 4, "cached": 1, "held": 5}
    stats[0] = EngineStats(num_running=9)
    assert value(metrics, "num_requests_running", replica="r1") == 9


def test_replicas_are_counted_by_state():
    found = [ReplicaStats("a", EngineStats()), ReplicaStats("b", EngineStats(), ready=False)]
    metrics = Metrics()
    metrics.of("demo", lambda: ReplicaSetStats(found))
    assert value(metrics, "replicas", state="ready") == 1
    assert value(metrics, "replicas", state="not_ready") == 1


def test_times_of_a_request():
    now = [10.0]
    metrics = Metrics(clock=lambda: now[0])
    track = metrics.of("demo").track([asked(4)])
    now[0] = 10.5
    track.tokens(0, 1)
    now[0] = 11.5
    track.tokens(0, 4)
    now[0] = 12.0
    track.ended(0, "length")
    track.close("abort")
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "inter_token_latency_seconds_sum") == 0.25
    assert value(metrics, "request_time_per_output_token_seconds_sum") == 0.25
    assert value(metrics, "e2e_request_latency_seconds_sum") == 2.0
    assert value(metrics, "generation_tokens_total") == 5
    assert value(metrics, "prompt_tokens_total") == 4
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_success_total", finished_reason="abort") == 0


def test_sizes_of_requests_are_those_of_all_that_got_a_token():
    metrics = Metrics()
    demo = metrics.of("demo")
    track = demo.track([asked(4, n=2, max_tokens=30), asked(6, n=2, max_tokens=30)])
    demo.track([asked(100)]).close("abort")
    track.tokens(0, 3)
    track.tokens(3, 9)
    track.ended(0, "length")
    track.close("abort")
    assert value(metrics, "request_prompt_tokens_sum") == value(metrics, "prompt_tokens_total") == 10
    assert value(metrics, "request_prompt_tokens_bucket", le="5.0") == 1
    assert value(metrics, "request_generation_tokens_sum") == value(metrics, "generation_tokens_total") == 12
    assert value(metrics, "request_generation_tokens_count") == 2
    assert (value(metrics, "request_params_n_sum"), value(metrics, "request_params_n_count")) == (4, 2)
    assert value(metrics, "request_params_max_tokens_sum") == 60


def test_a_pooled_request_has_a_prompt_and_a_latency_and_no_tokens():
    metrics = Metrics()
    pooled = Request("r", (1,) * 7, SamplingParams(max_tokens=1), pooling="last")
    metrics.of("demo").track([pooled]).ended(0, "stop")
    assert value(metrics, "prompt_tokens_total") == 7
    assert value(metrics, "e2e_request_latency_seconds_count") == 1
    assert value(metrics, "request_generation_tokens_count") == 0
    assert value(metrics, "request_params_max_tokens_count") == 0


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_choices_that_were_cut_short_do_not_count_as_latency(reason):
    metrics = Metrics()
    track = metrics.of("demo").track([asked(1, n=2)])
    track.tokens(0, 1)
    track.close(reason)
    assert value(metrics, "request_success_total", finished_reason=reason) == 2
    assert value(metrics, "e2e_request_latency_seconds_count") == 0


def test_prompt_tokens_count_once_and_only_when_something_was_generated():
    metrics = Metrics()
    demo = metrics.of("demo")
    demo.track([asked(7)]).close("error")
    assert value(metrics, "prompt_tokens_total") == 0
    track = demo.track([asked(7, n=2)])
    track.tokens(0, 1)
    track.tokens(1, 1)
    assert value(metrics, "prompt_tokens_total") == 7


def test_two_apps_in_one_process_do_not_share_figures():
    one, two = Metrics(), Metrics()
    two.of("demo")
    one.of("demo").track([asked(5, n=2)]).tokens(0, 1)
    assert value(one, "prompt_tokens_total") == 5
    assert value(two, "prompt_tokens_total") == 0


def test_ends_that_alerts_go_by_are_told_before_the_first_of_them():
    """A counter that appears with its first events hides them: all that a lost replica costs may come at once."""
    metrics = Metrics()
    metrics.register(RequestCollector("demo", DispatcherCounters(), lambda: 0, lambda: 0))
    of_servers = {code for code, status in STATUS_BY_CODE.items() if status >= 500}
    elsewhere = {"router_lost", "no_router"}  # said by those who stand before routers
    for outcome in {"completed", "aborted", *of_servers} - elsewhere:
        assert value(metrics, "requests_ended_total", outcome=outcome) == 0
    assert {*FAULTS} == of_servers - elsewhere - {"deadline_exceeded", "asleep"}


def test_requests_that_were_taken_in_add_up_and_lost_links_are_told_by_reason():
    counters = DispatcherCounters(accepted=9, stale_rows=2, stale_reports=1)
    counters.outcomes.update(completed=4, aborted=1, replica_lost=1)
    counters.links_lost.update(lost=2)
    metrics = Metrics()
    metrics.register(RequestCollector("demo", counters, lambda: 3, lambda: 5))
    assert value(metrics, "requests_accepted_total") == 9
    assert value(metrics, "requests_live") == 3
    assert value(metrics, "requests_queued") == 5
    ended = [v for (name, *_), v in samples(metrics).items() if name == "squadron_requests_ended_total"]
    assert sum(ended) == 6
    assert value(metrics, "requests_ended_total", outcome="replica_lost") == 1
    assert value(metrics, "links_lost_total", reason="lost") == 2
    assert value(metrics, "stale_rows_total") == 3
    counters.accepted = 10
    assert value(metrics, "requests_accepted_total") == 10
