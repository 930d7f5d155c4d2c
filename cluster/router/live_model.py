"""One model in a router: its replicas, the live requests on them, and the front through which it is asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.admission.admission_queue import AdmissionConfig, AdmissionQueue
from cluster.admission.capacity import InflightBounds, InflightConfig
from cluster.config import ClusterConfig
from cluster.openai.served_model import ServedModel
from cluster.router.directory import ReplicaDirectory
from cluster.router.dispatcher import Dispatcher
from cluster.router.dispatcher_config import ADMISSION_WAIT, DispatcherConfig
from cluster.router.incidents import IncidentLog, RecordedSource
from cluster.router.metrics import CostCollector, RequestCollector, RoutingCollector
from cluster.router.models import ModelFront
from cluster.router.readiness import ModelViews, ready_body
from cluster.router.sleeping import SleepingModel
from cluster.sleep_orders import OrderBook
from cluster.telemetry.logs import FIELDS
from cluster.telemetry.metrics import Metrics, ReplicaSetStats, ReplicaStats
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk, TokenSource
from cluster.wire.tcp import connect
from cluster.wire.translation import stats_of
from engine.loader.fingerprint import vocabulary_fingerprint
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

TEXTS = ("structured", "stop", "bad_words")  # parameters that are texts of the client's, or made of them
DEFAULTS = SamplingParams()


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
        self.dispatcher = self._dispatcher = Dispatcher(dispatcher_config(config))
        vocabulary = vocabulary_fingerprint(config.source, config.tokenizer)
        self._cold_start = config.scales_to_zero
        scaled = config.max_replicas is not None
        incidents = incident_log(config, f"{router_id}-{replicas.deployment_name}")
        self._directory = ReplicaDirectory(
            router_id,
            replicas,
            self._dispatcher,
            vocabulary,
            on_demand=scaled,
            rouse=rouse,
            open_link=None if incidents is None else incidents.connecting(connect),
        )
        self._deployment = replicas.deployment_name
        self._sleeping: SleepingModel | None = None
        metrics.register(
            RequestCollector(
                model.model_id,
                self._dispatcher.counters,
                lambda: self._dispatcher.num_live,
                self._queued,
                lambda: self._dispatcher.num_waiting,
            )
        )
        metrics.register(RoutingCollector(model.model_id, self._dispatcher.counters, self._dispatcher.caches))
        metrics.register(CostCollector(model.model_id, self._dispatcher.replicas, self._dispatcher.counters))
        self.front = ModelFront(
            model,
            admission_queue(config, self._dispatcher, self._logged(config, model, incidents), routers),
            metrics.of(model.model_id, self._stats),
            ready=lambda: bool(self.ready()["ready"]),
            replicas=self._dispatcher.replicas,
            ask_router=self._dispatcher.explain,
        )

    def with_sleep(self, book: OrderBook) -> SleepingModel:
        """Return what puts this model to sleep, and says so wherever its state is told. book: of its orders."""
        self._sleeping = SleepingModel(self.front.model_id, self._dispatcher, self.front.admission, book)
        return self._sleeping

    def ready(self) -> dict[str, Any]:
        """Return what `/ready` says of this model."""
        body = ready_body(self._dispatcher, self._directory.announcements, self._cold_start)
        order = None if self._sleeping is None else self._sleeping.order
        if order is None or not order.asleep:
            return body
        return {**body, "ready": False, "cold": False, "asleep": order.level}

    def views(self) -> ModelViews:
        """Return what this router sees of the model's replicas."""
        replicas, unlinked = self._dispatcher.replicas(), self._directory.unlinked
        return ModelViews(self.front.model_id, self._deployment, replicas, unlinked)

    def _logged(self, config: ClusterConfig, model: ServedModel, incidents: IncidentLog | None) -> TokenSource:
        source: TokenSource = self._dispatcher
        if incidents is not None:
            source = RecordedSource(source, incidents)
        if not config.enable_log_requests:
            return source
        return LoggedSource(source, model.tokenizer, model.model_id, config.max_log_len)

    def _queued(self) -> int:
        return self.front.admission.num_waiting + self._dispatcher.num_waiting

    def _stats(self) -> ReplicaSetStats:
        replicas = [ReplicaStats(v.replica_id, stats_of(v.load), v.ready) for v in self._dispatcher.replicas()]
        return ReplicaSetStats(replicas, self._dispatcher.counters.migrations)


def incident_log(config: ClusterConfig, name: str) -> IncidentLog | None:
    """Return what records a router's incidents, None where that is off. Raises `ConfigError`."""
    if config.record_incidents is None:
        return None
    return IncidentLog(config.record_incidents, name, asyncio.get_running_loop().time)


def dispatcher_config(config: ClusterConfig) -> DispatcherConfig:
    """Return the times of one model's dispatcher."""
    return DispatcherConfig(
        stall_timeout=config.stall_timeout,
        progress_timeout=2 * config.step_timeout,
        admission_wait=config.cold_start_timeout if config.scales_to_zero else ADMISSION_WAIT,
        no_replica_timeout=config.replica_wait,
        routing_policy=config.routing_policy,
        stream_migration=config.stream_migration,
    )


def admission_queue(
    config: ClusterConfig,
    dispatcher: Dispatcher,
    source: TokenSource | None = None,
    routers: Callable[[], int] | None = None,
) -> AdmissionQueue:
    """Return the admission queue of one model on one router.

    source: what passes requests on to the dispatcher, if not itself.
    routers: how many share what the replicas hold, asked now and then; None = as many as there should be.

    Who comes while no replica is there hears so within `ADMISSION_WAIT`. Unless the model may have none while nobody
    asks: then those who come wait for one.
    """
    sizes = InflightConfig(
        config.max_num_seqs,
        config.engine.token_budget,
        config.max_inflight,
        config.max_inflight_tokens,
    )
    clock = asyncio.get_running_loop().time
    counted = dispatcher.counters.outcomes.total
    room = InflightBounds(sizes, dispatcher.room, counted, clock, routers or (lambda: config.routers))
    absent_wait = config.cold_start_timeout if config.scales_to_zero else ADMISSION_WAIT
    bounds = AdmissionConfig(config.max_waiting_per_tenant, config.max_queue_wait, config.target_ttft, absent_wait)
    admission = AdmissionQueue(
        source or dispatcher,
        room.sequences,
        bounds,
        room.tokens,
        dispatcher.tokens_computed,
        dispatcher.has_replica,
        dispatcher.turned_away,
    )
    dispatcher.watch_queue(admission.demand)
    return admission


log = logging.getLogger(__name__)


class LoggedSource:
    """A token source that logs each request before it passes it on. Prompts are logged only where that is configured.

    model: its id. max_len: characters of each prompt that are shown; 0 = none.
    """

    def __init__(self, source: TokenSource, tokenizer: Tokenizer, model: str, max_len: int) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._model = model
        self._max_len = max_len

    def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        """Log the request and run it; see `TokenSource.generate`."""
        length, params = len(request.prompt_token_ids), _numbers(request.params)
        fields: dict[str, object] = {"request_id": request.request_id, "tenant": request.tenant, "model": self._model}
        fields |= {"prompt_tokens": length, "params": params}
        if context.trace is not None:
            fields["trace_id"] = context.trace.trace_id
        message = f"request {request.request_id} of tenant {request.tenant}: {length} prompt tokens, {params}"
        if self._max_len:
            fields["prompt"] = self._beginning(request)
            message += f", prompt {fields['prompt']!r}"
        log.info("%s", message, extra={FIELDS: fields})
        return self._source.generate(request, context)

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice."""
        self._source.finish_choice(request_id, choice)

    def _beginning(self, request: Request) -> str:
        # Nearly every token is a character or more, and for the others it is but a beginning that is shown.
        ids = request.prompt_token_ids[: self._max_len]
        return self._tokenizer.decode(ids, skip_special_tokens=False)[: self._max_len]


def _numbers(params: SamplingParams) -> dict[str, object]:
    """Return the parameters that differ from their defaults, without texts; of lists and maps only how long."""
    found: dict[str, object] = {}
    for name in params.__dataclass_fields__:
        value = getattr(params, name)
        if name not in TEXTS and value != getattr(DEFAULTS, name):
            found[name] = len(value) if isinstance(value, tuple) else value
    return found
