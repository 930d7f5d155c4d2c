"""Publishes a process's metrics through Ray's, some times a minute, in a thread beside all that is hot.

Ray's agent on each node then shows the metrics of all its processes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import ray
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from ray.serve import metrics as serve_metrics
from ray.util.metrics import Gauge

from cluster.telemetry.families import VLLM_RAY, Family, Kind, Source
from cluster.telemetry.samples import BY_FULL_NAME, alias_labels, namesake, own_samples, vllm_samples

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that an event loop may be held up
Snapshot = Callable[[], Iterable[Metric]]
# Ray's counters refuse 0, and one that nothing was added to is not shown. This is lost in any sum.
LEAST = 5e-324
REPORT_INTERVAL, LEAST_INTERVAL = 10_000, 1_000  # milliseconds
_Key = tuple[str, tuple[str, ...]]


class Publishing:
    """Publishes what `snapshot` returns, at once and every `period` seconds until stopped, or the process ends.

    What keeps it from that is logged when it begins and when it is over, not at every round between.
    """

    def __init__(self, snapshot: Snapshot, publisher: RayPublisher, period: float) -> None:
        self._snapshot = snapshot
        self._publisher = publisher
        self._period = period
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Begin. Can be called once."""
        self._thread.start()

    def stop(self) -> None:
        """End after what is being published."""
        self._stop.set()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._publish()
                self._stop.wait(self._period)
        except LoopGoneError:
            return

    def _publish(self) -> None:
        try:
            self._publisher.publish(self._snapshot())
        except LoopGoneError:
            raise
        except TimeoutError:
            self._failed("metrics are not published: the event loop is held up", traceback=False)
        except Exception:
            # Figures must not end what they are about; the next round may do better.
            self._failed("metrics are not published", traceback=True)
        else:
            if self._failing:
                logger.info("metrics are published again")
            self._failing = False

    def _failed(self, message: str, traceback: bool) -> None:
        level = logging.DEBUG if self._failing else logging.ERROR if traceback else logging.WARNING
        logger.log(level, message, exc_info=traceback)
        self._failing = True


class LoopGoneError(Exception):
    """The event loop whose metrics are wanted is closed."""


def on_loop(collect: Snapshot, patience: float = PATIENCE) -> Snapshot:
    """Return a snapshot for another thread of what `collect` yields on the running event loop.

    It raises `TimeoutError` where the loop is held up for `patience` seconds, `LoopGoneError` where it is closed.
    """
    loop = asyncio.get_running_loop()

    def snapshot() -> list[Metric]:
        found: Future[list[Metric]] = Future()
        try:
            loop.call_soon_threadsafe(_fill, found, collect)
        except RuntimeError as error:
            raise LoopGoneError(str(error)) from error
        return found.result(patience)

    return snapshot


def _fill(found: Future[list[Metric]], collect: Snapshot) -> None:
    try:
        found.set_result(list(collect()))
    except Exception as error:
        found.set_exception(error)


def publish_period() -> float:
    """Return how often Ray gets metrics, in seconds: twice for each of its reports, so that none is of old metrics.

    Until this process ends Ray reports the last values that it got; two reports later it forgets the gauges. The
    interval of its reports is not public: where Ray has it no more, it is taken for what Ray's own default is.
    """
    settings = getattr(ray, "_config", None)
    told = getattr(settings, "metrics_report_interval_ms", None)
    return max(told() if told is not None else REPORT_INTERVAL, LEAST_INTERVAL) / 2000


class RayPublisher:
    """Gives Ray the present metrics, whenever asked. Used by one thread.

    All are gauges for Ray, under the names of the series that Prometheus makes of them: a counter is `NAME_total`, a
    histogram `NAME_bucket` with `le`, `NAME_sum` and `NAME_count`. Ray's own counter sends its agent what was added
    since the last report: a report that the agent is too busy to take is lost for good. Ray's own histogram puts
    each value in the middle of its bucket, so that sums are wrong. A gauge is right again with the next report.

    sources: whose families this process measures; all others are passed over. own: values of the labels that tell it
    apart (`Family.own_labels`). vllm: whether to publish under vLLM's names as well.
    """

    def __init__(self, sources: Iterable[Source], own: Mapping[str, str], vllm: bool = False) -> None:
        self._sources = frozenset(sources)
        self._own = dict(own)
        self._vllm = vllm
        self._gauges: dict[str, Gauge] = {}
        self._highest: dict[_Key, float] = {}  # of each counter

    def publish(self, metrics: Iterable[Metric]) -> None:
        """Give Ray the present metrics."""
        for metric in metrics:
            family = BY_FULL_NAME.get(metric.name)
            if family is None or family.source not in self._sources:
                continue
            own = {label: self._own[label] for label in family.own_labels}
            for sample in own_samples(metric):
                self._report(family.full_name, family, sample, metric.name, {**sample.labels, **own})
            if self._vllm and family.vllm:
                all_labels = alias_labels(family)
                for sample in vllm_samples(metric, family):
                    tags = {**all_labels, **sample.labels, **own}
                    self._report(VLLM_RAY + family.vllm, namesake(family), sample, metric.name, tags)

    def _report(self, name: str, family: Family, sample: Sample, reported_as: str, tags: dict[str, str]) -> None:
        series = name + sample.name.removeprefix(reported_as)
        value = sample.value
        if family.kind is Kind.COUNTER:
            # A sum of floats may be rounded down; to Prometheus a counter that falls has begun anew.
            key = (series, tuple(tags.values()))
            value = self._highest[key] = max(value, self._highest.get(key, value))
        self._gauge(series, family, tags).set(value, tags)

    def _gauge(self, name: str, family: Family, tags: Mapping[str, str]) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, family.text, tuple(tags))
        return self._gauges[name]


def show_to_dashboard() -> None:
    """Have Serve's counter of requests count for this replica. Called in a replica of Serve.

    The dashboard joins metrics with that counter, by process, to learn whose they are. Serve counts a request when it
    has ended, and those of a replica of ours are leases, which end with it: without this its panels would be empty.
    """
    counter = serve_metrics.Counter(
        "serve_deployment_request_counter", "Requests processed in this replica.", ("route",)
    )
    counter.inc(LEAST, {"route": ""})
