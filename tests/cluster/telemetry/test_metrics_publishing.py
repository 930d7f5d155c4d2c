"""What Ray is given: gauges that are the series which Prometheus makes of counters, gauges and histograms."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
from prometheus_client.core import CounterMetricFamily, Metric

from cluster.telemetry import publishing as ray_publisher
from cluster.telemetry.families import Source
from cluster.telemetry.metrics import Metrics
from cluster.telemetry.publishing import LoopGoneError, Publishing, RayPublisher, on_loop
from cluster.telemetry.samples import Histogram, family_of, histogram_of
from tests.cluster.telemetry.test_metrics import asked

Series = dict[tuple[str, ...], float]


class FakeRay:
    """Ray's metrics as its agent would show them, and how often it was told something."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = defaultdict(lambda: defaultdict(float))
        self.calls = 0

    def gauge(self, name: str, text: str, tag_keys: tuple[str, ...]) -> FakeMetric:
        return FakeMetric(self, name, tag_keys)


class FakeMetric:
    """One metric, as strict as Ray's."""

    def __init__(self, ray: FakeRay, name: str, tag_keys: tuple[str, ...]) -> None:
        self._series, self._keys, self._ray = ray.series[name], tag_keys, ray

    def set(self, value: float, tags: dict[str, str]) -> None:
        self._series[self._key(tags)] = value

    def _key(self, tags: dict[str, str]) -> tuple[str, ...]:
        assert {*tags} == {*self._keys}
        self._ray.calls += 1
        return tuple(f"{key}={tags[key]}" for key in sorted(tags))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_publisher, "Gauge", fake.gauge)
    return fake


def replica(vllm: bool = False) -> RayPublisher:
    own = {"replica": "r1", "rank": "0"}
    return RayPublisher((Source.TOLD, Source.REPLICA, Source.RANK), own, vllm)


def test_counters_are_there_from_the_start_and_a_lost_report_is_made_up_for_by_the_next(ray: FakeRay) -> None:
    publisher = replica()
    counted = ("model_name=demo", "replica=r1")
    for value in (0, 3, 3, 10):
        publisher.publish([family_of("num_preemptions", {("demo", "r1"): value})])
        assert ray.series["squadron_num_preemptions_total"].pop(counted) == value, "Ray's agent knows nothing before"


def test_a_counter_never_falls_where_a_sum_is_rounded_down(ray: FakeRay) -> None:
    publisher = replica()
    shown = []
    for value in (2.0, 1.9999999, 2.5):
        publisher.publish([family_of("device_seconds", {("demo", "r1"): value})])
        shown.append(ray.series["squadron_device_seconds_total"]["model_name=demo", "replica=r1"])
    assert shown == [2.0, 2.0, 2.5]


def test_gauges_are_told_as_they_are(ray: FakeRay) -> None:
    publisher = replica()
    for value in (0, 7, 4, 4):
        publisher.publish([family_of("num_requests_running", {("demo", "r1"): value})])
        assert ray.series["squadron_num_requests_running"] == {("model_name=demo", "replica=r1"): value}
    assert ray.calls == 4, "one that is not told again would be taken for that of a process that is gone"


def test_a_histogram_is_told_exactly(ray: FakeRay) -> None:
    histogram = Histogram((0.3, 1.0))
    publisher = replica()
    for value in (0.1, 0.3, 0.4, 7.0):
        histogram.observe(value)
        publisher.publish([histogram_of("request_queue_time_seconds", ("demo", "r1"), histogram)])
    own = ("model_name=demo", "replica=r1")
    buckets = {key[0]: value for key, value in ray.series["squadron_request_queue_time_seconds_bucket"].items()}
    assert buckets == {"le=0.3": 2, "le=1.0": 3, "le=+Inf": 4}
    assert ray.series["squadron_request_queue_time_seconds_count"] == {own: 4}
    assert ray.series["squadron_request_queue_time_seconds_sum"] == {own: pytest.approx(7.8)}


def test_each_process_tells_only_what_it_measures(ray: FakeRay) -> None:
    metrics = [
        family_of("migrations", {("demo",): 1}),
        family_of("kv_cache_usage_perc", {("demo", "other"): 0.5}),
        CounterMetricFamily("squadron_unheard_of", "Not in the table.", 1),
    ]
    RayPublisher((Source.ROUTER,), {"router": "abc"}).publish(metrics)
    assert {name: dict(series) for name, series in ray.series.items()} == {
        "squadron_migrations_total": {("model_name=demo", "router=abc"): 1}
    }


def test_a_rank_has_its_own_labels(ray: FakeRay) -> None:
    replica().publish([family_of("rank_memory_bytes", {("demo", "host"): 5})])
    assert ray.series["squadron_rank_memory_bytes"] == {("kind=host", "model_name=demo", "rank=0", "replica=r1"): 5}


def test_what_waits_in_routers_and_on_replicas_has_one_name_of_vllms_and_the_same_labels(ray: FakeRay) -> None:
    router = RayPublisher((Source.ROUTER,), {"router": "abc"}, vllm=True)
    router.publish([family_of("requests_queued", {("demo",): 8})])
    replica(vllm=True).publish([family_of("num_requests_waiting", {("demo", "r1"): 3})])
    assert ray.series["vllm_num_requests_waiting"] == {
        ("model_name=demo", "replica=", "router=abc"): 8,
        ("model_name=demo", "replica=r1", "router="): 3,
    }
    assert ray.series["squadron_requests_queued"] == {("model_name=demo", "router=abc"): 8}
    assert ray.series["squadron_num_requests_waiting"] == {("model_name=demo", "replica=r1"): 3}


def test_vllms_names_have_vllms_buckets_and_are_there_only_if_asked_for(ray: FakeRay) -> None:
    metrics = Metrics()
    track = metrics.of("demo").track([asked(3)])
    track.tokens(0, 2)
    track.ended(0, "length")
    RayPublisher((Source.ROUTER,), {"router": "abc"}).publish(metrics.registry.collect())
    assert not [name for name in ray.series if not name.startswith("squadron_")]
    RayPublisher((Source.ROUTER,), {"router": "abc"}, vllm=True).publish(metrics.registry.collect())
    assert ray.series["vllm_generation_tokens_total"] == {("model_name=demo", "router=abc"): 2}
    finer = len(ray.series["squadron_e2e_request_latency_seconds_bucket"])
    assert len(ray.series["vllm_e2e_request_latency_seconds_bucket"]) == 22 < finer
    assert not [name for name in ray.series if "requests_accepted" in name and name.startswith("vllm")]
    assert not [name for name in ray.series if name.endswith("_created")]


class Told:
    """A publisher that keeps what it gets; the first time it fails."""

    def __init__(self) -> None:
        self.got: list[list[Metric]] = []
        self.threads: set[int] = set()
        self.enough = threading.Event()
        self.failed = False

    def publish(self, metrics) -> None:
        if not self.failed:
            self.failed = True
            raise ValueError("the first time")
        self.threads.add(threading.get_ident())
        self.got.append(list(metrics))
        if len(self.got) == 3:
            self.enough.set()


async def test_figures_are_read_on_the_loop_and_published_beside_it_whatever_fails() -> None:
    told, readers = Told(), set()

    def collect() -> list[Metric]:
        readers.add(threading.get_ident())
        return [family_of("migrations", {("demo",): len(told.got)})]

    publishing = Publishing(on_loop(collect), told, period=0.001)
    publishing.start()
    await asyncio.to_thread(told.enough.wait, 10)
    publishing.stop()
    assert [metrics[0].samples[0].value for metrics in told.got[:3]] == [0, 1, 2]
    assert readers == {threading.get_ident()}
    assert threading.get_ident() not in told.threads


def test_publishing_ends_with_the_loop() -> None:
    async def snapshot():
        return on_loop(list, patience=0.01)

    take = asyncio.run(snapshot())
    with pytest.raises(LoopGoneError):
        take()
    told = Told()
    publishing = Publishing(take, told, period=0.001)
    publishing.start()
    publishing._thread.join(10)
    assert not publishing._thread.is_alive()
    assert not told.got


def test_what_keeps_figures_from_ray_is_logged_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    broken = [True, True, True, False, False, True]

    def snapshot() -> list[Metric]:
        if broken.pop(0):
            raise ConnectionError("Ray has gone")
        return []

    publishing = Publishing(snapshot, Told(), period=1.0)
    with caplog.at_level(logging.INFO):
        while broken:
            publishing._publish()
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO", "ERROR"]
    assert caplog.records[0].exc_info is not None


async def test_what_cannot_be_read_is_said_by_who_reads() -> None:
    def broken() -> list[Metric]:
        raise ValueError("cannot be read")

    with pytest.raises(ValueError, match="cannot be read"):
        await asyncio.to_thread(on_loop(broken))


@pytest.mark.parametrize(
    ("settings", "period"),
    [(SimpleNamespace(metrics_report_interval_ms=lambda: 400), 0.5), (SimpleNamespace(), 5.0), (None, 5.0)],
    ids=["as Ray says, which never reports oftener than each second", "unsaid", "no settings"],
)
def test_ray_is_told_twice_as_often_as_it_reports(monkeypatch: pytest.MonkeyPatch, settings, period: float) -> None:
    monkeypatch.setattr(ray_publisher.ray, "_config", settings)
    assert ray_publisher.publish_period() == period
