"""What a router tells Prometheus of the answers that it keeps, and of those of others that it gives out."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.responses.making import STOPS
from cluster.responses.shelf import DROPS
from cluster.responses.store import ResponseStore
from cluster.telemetry.metrics import Metrics
from cluster.telemetry.samples import by_label, family_of


class KeptAnswerCollector(Collector):
    """Reads a store at each scrape. Answers of all models count together: under the model's name if there is one."""

    def __init__(self, store: ResponseStore, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Tell nothing in advance (called by the registry)."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the counters and the gauges."""
        shelf, maker, replays = self._store.shelf, self._store.maker, self._store.replays
        model = self._metrics.label()
        running = sum(1 for one in shelf if one.task is not None)
        yield family_of("kept_answers", {(model, "running"): running, (model, "ended"): len(shelf) - running})
        yield family_of("kept_answer_bytes", {(model,): shelf.num_bytes})
        yield family_of("kept_answers_taken_over", {(model,): self._store.taken_over})
        yield family_of("kept_answers_refused", {(model,): self._store.refused})
        stopped, dropped = by_label(STOPS, maker.stopped), by_label(DROPS, shelf.dropped)
        yield family_of("kept_answers_stopped", {(model, code): number for code, number in stopped.items()})
        yield family_of("kept_answers_dropped", {(model, reason): number for reason, number in dropped.items()})
        yield family_of("answer_replays", {(model,): replays.begun})
        yield family_of("answer_replays_running", {(model,): replays.num_running})
        yield family_of("answer_replay_bytes", {(model,): replays.num_bytes})
        yield family_of("answer_replays_refused", {(model,): replays.refused})
