"""The router deployment: the HTTP front end, the live requests and their token logs, links to all replicas."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster.config import ClusterConfig, resolve_config
from cluster.directory import ReplicaDirectory
from cluster.dispatch_config import DispatcherConfig
from cluster.dispatcher import Dispatcher
from cluster.grpc_api.beside import BesideHttp
from cluster.grpc_api.figures import GrpcFigures
from cluster.grpc_api.server import GrpcServer, ListenAddress
from cluster.grpc_api.service import GrpcServices
from cluster.ingress.check import IngressCheck
from cluster.logs import log_to_serve
from cluster.metrics import ClusterFigures, Metrics, ReplicaFigures
from cluster.openai.app import build_app
from cluster.openai.reasoning.parsers import REASONING_PARSERS
from cluster.openai.served_model import ServedModel, matryoshka_of
from cluster.openai.tools.formats import TOOL_PARSERS
from cluster.readiness import ready_body
from cluster.request_figures import RequestCollector
from cluster.start_error import ReplicaStartError
from cluster.tenants.fair_gate import UNBOUNDED, FairGate, FairGateConfig
from cluster.tenants.keys import KeySource
from cluster.tenants.start import keys_for
from cluster.tenants.tenancy import Tenancy
from cluster.translation import stats_of
from engine.checkpoint import read_json
from engine.errors import SquadronError
from engine.kv_cache import fit_given_blocks
from engine.loader import open_model
from engine.tokenizer import Tokenizer


@serve.ingress()
class Router:
    """Serve builds one per router copy. It holds no state that a client's retry could not rebuild."""

    def __init__(self, settings: dict[str, Any], replicas: DeploymentHandle[Any]) -> None:
        log_to_serve()
        try:
            self._config = resolve_config(settings)
            self._model = _served_model(self._config)
            self._keys = keys_for(self._config.api_key, self._config.api_key_file)
        except SquadronError as error:
            raise ReplicaStartError.of(error) from error
        self._replicas = replicas
        self._router_id = uuid4().hex

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the front end (called by Serve on this replica's event loop)."""
        config = self._config
        times = DispatcherConfig(stall_timeout=config.stall_timeout, progress_timeout=2 * config.step_timeout)
        self._dispatcher = Dispatcher(times)
        self._directory = ReplicaDirectory(self._router_id, self._replicas, self._dispatcher)
        metrics = Metrics(self._model.model_id, self._figures)
        dispatcher = self._dispatcher
        metrics.register(RequestCollector(self._model.model_id, dispatcher.counters, lambda: dispatcher.num_live))
        tenancy = _tenancy(config, self._dispatcher, self._keys)
        app = build_app(
            self._dispatcher,
            self._model,
            metrics,
            self._ready,
            tenancy=tenancy,
            max_body_bytes=config.max_body_bytes,
            names_answers=False,
        )
        self._ingress = IngressCheck(app)
        if config.grpc_port is None:
            return self._ingress
        return self._with_grpc(self._ingress, metrics, tenancy, config.grpc_port)

    def _with_grpc(self, app: ASGIApp, metrics: Metrics, tenancy: Tenancy, port: int) -> ASGIApp:
        services = GrpcServices(
            self._model,
            tenancy,
            metrics,
            lambda: bool(self._ready()["ready"]),
            self._dispatcher.replicas,
            GrpcFigures(self._model.model_id, metrics).answered,
            self._config.max_body_bytes,
        )
        try:
            server = GrpcServer(ListenAddress(self._config.host, port), services)
        except SquadronError as error:
            raise ReplicaStartError.of(error) from error
        return BesideHttp(app, server, self._config.drain_timeout)

    def _ready(self) -> dict[str, Any]:
        who = {"model": self._model.model_id, "router": self._router_id, "guarded": self._ingress.guarded}
        return who | ready_body(self._dispatcher, self._directory.announcements)

    def _figures(self) -> ClusterFigures:
        replicas = [ReplicaFigures(v.replica_id, stats_of(v.load), v.ready) for v in self._dispatcher.replicas()]
        return ClusterFigures(replicas, self._dispatcher.counters.migrations)


def _tenancy(config: ClusterConfig, dispatcher: Dispatcher, keys: KeySource | None) -> Tenancy:
    """Where no replica is ready nobody is held back: the dispatcher says at once what is wrong."""

    def bound() -> int:
        return config.inflight if dispatcher.ready else UNBOUNDED

    times = FairGateConfig(config.max_waiting_per_tenant, config.max_queue_wait)
    return Tenancy(FairGate(dispatcher, bound, times), keys)


def _served_model(config: ClusterConfig) -> ServedModel:
    folder = open_model(config.model)
    spec = folder.spec
    tools, reasoning = config.tool_call_parser, config.reasoning_parser
    shrink = config.max_model_len is None
    engine = config.engine.resolved(max_model_len=config.max_model_len or spec.max_positions)
    return ServedModel(
        model_id=config.model_id,
        tokenizer=Tokenizer(config.tokenizer or config.model),
        max_model_len=fit_given_blocks(engine, shrink).context_len,
        vocab_size=spec.vocab_size,
        tool_parser=None if tools is None else TOOL_PARSERS.get(tools),
        reasoning_parser=None if reasoning is None else REASONING_PARSERS.get(reasoning),
        pooling="mean" if config.embedding_pooling == "mean" else "last",
        matryoshka=matryoshka_of(read_json(folder.path / "config.json")),
        by_priority=engine.scheduling_policy == "priority",
    )
