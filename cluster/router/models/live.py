"""One model in a router: its replicas, the live requests on them, and the front through which it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.config import ClusterConfig
from cluster.openai.served_model import ServedModel
from cluster.router.app_body import ModelViews
from cluster.router.directory import ReplicaDirectory
from cluster.router.dispatcher import Dispatcher
from cluster.router.gate_start import dispatcher_config, fair_gate
from cluster.router.metrics import CostCollector, RequestCollector
from cluster.router.models.front import ModelFront
from cluster.router.readiness import ready_body
from cluster.router.request_log import LoggedSource
from cluster.router.routing.figures import RoutingCollector
from cluster.telemetry.metrics import ClusterFigures, Metrics, ReplicaFigures
from cluster.token_source import TokenSource
from cluster.wire.translation import stats_of
from engine.loader.fingerprint import vocabulary_fingerprint


class LiveModel:
    """Made on the router's event loop. `front` is what the ingresses see of it.

    routers: how many routers share the replicas now. rouse: as in `ReplicaDirectory`.
    """

    def __init__(
        self,
        router_id: str,
        config: ClusterConfig,
        model: ServedModel,
        replicas: DeploymentHandle[Any],
        metrics: Metrics,
        routers: Callable[[], int],
        rouse: Callable[[], bool],
    ) -> None:
        self._dispatcher = Dispatcher(dispatcher_config(config))
        vocabulary = vocabulary_fingerprint(config.model, config.tokenizer)
        self._cold_start = config.scales_to_zero
        scaled = config.max_replicas is not None
        self._directory = ReplicaDirectory(
            router_id, replicas, self._dispatcher, vocabulary, on_demand=scaled, rouse=rouse
        )
        self._deployment = replicas.deployment_name
        metrics.register(
            RequestCollector(
                model.model_id, self._dispatcher.counters, lambda: self._dispatcher.num_live, self._queued
            )
        )
        metrics.register(RoutingCollector(model.model_id, self._dispatcher.counters, self._dispatcher.caches))
        metrics.register(CostCollector(model.model_id, self._dispatcher.replicas, self._dispatcher.counters))
        self.front = ModelFront(
            model,
            fair_gate(config, self._dispatcher, self._logged(config, model), routers),
            metrics.of(model.model_id, self._figures),
            ready=lambda: bool(self.ready()["ready"]),
            replicas=self._dispatcher.replicas,
            explain=self._dispatcher.explain,
        )

    def ready(self) -> dict[str, Any]:
        """Return what `/ready` says of this model."""
        return ready_body(self._dispatcher, self._directory.announcements, self._cold_start)

    def views(self) -> ModelViews:
        """Return what this router sees of the model's replicas."""
        replicas, unlinked = self._dispatcher.replicas(), self._directory.unlinked
        return ModelViews(self.front.model_id, self._deployment, replicas, unlinked)

    def _logged(self, config: ClusterConfig, model: ServedModel) -> TokenSource:
        if not config.enable_log_requests:
            return self._dispatcher
        return LoggedSource(self._dispatcher, model.tokenizer, model.model_id, config.max_log_len)

    def _queued(self) -> int:
        return self.front.gate.num_waiting + self._dispatcher.num_waiting

    def _figures(self) -> ClusterFigures:
        replicas = [ReplicaFigures(v.replica_id, stats_of(v.load), v.ready) for v in self._dispatcher.replicas()]
        return ClusterFigures(replicas, self._dispatcher.counters.migrations)
