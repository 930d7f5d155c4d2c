"""The router deployment: the HTTP front end, the live requests and their token logs, links to all replicas.

Also what Serve says of an app's routers: who serves while one starts, and among how many the replicas are shared.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster.admission.key_file import keys_for
from cluster.admission.tenants import Tenancy
from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from cluster.config import NO_KEYS, ClusterConfig, resolve_config
from cluster.config_values import GATEWAY
from cluster.errors import ReplicaStartError
from cluster.grpc_api.metrics import GrpcMetrics
from cluster.http.app import build_app
from cluster.http.gate import RootPath
from cluster.http.sites import Sites
from cluster.ingress.let_go import LetGo
from cluster.ingress.router_directory import RouterAnnouncement
from cluster.ingress.router_link import ExchangeServer
from cluster.ingress.router_side import IngressCheck
from cluster.lifecycle.app_end import announced_end
from cluster.lifecycle.app_status import AppPicture, AppWatch, app_state, probe_app
from cluster.lifecycle.control_store import FAILURES
from cluster.lifecycle.leases import listening_host
from cluster.lifecycle.leaving import NodeEnd, stop_flag, until_others_serve, until_stopped
from cluster.lifecycle.node_drains import drain, ends_soon, own_node
from cluster.lifecycle.rollback import AppMemory, BuiltOf, DeployedApp, Rollback
from cluster.lifecycle.shared_quotas import SharedQuotas
from cluster.lifecycle.sleep_book import StoredOrders, watch
from cluster.lifecycle.updates import StartupWait, UpdateFailedError
from cluster.openai.served_model import ServedModel
from cluster.replica.orphans import watch_raylet
from cluster.router.answer_copies import AnswerCopies
from cluster.router.live_model import LiveModel
from cluster.router.metrics import IngressCollector, StartCollector
from cluster.router.models import Models, served_model
from cluster.router.readiness import app_body, app_ready_body, fresh
from cluster.router.sleeping import SleepingModel
from cluster.telemetry.families import Source
from cluster.telemetry.logs import log_to_serve
from cluster.telemetry.metrics import Metrics
from cluster.telemetry.publishing import Publishing, RayPublisher, on_loop, publish_period
from cluster.telemetry.tracing.start import process_tracing
from engine.device.machine import settle_heap
from engine.errors import SquadronError

if TYPE_CHECKING:  # without traces and gRPC nothing of them is imported
    from cluster.grpc_api.rpc import Answered
    from cluster.http.request_spans import RouterTracing

logger = logging.getLogger(__name__)
LINK_PATIENCE = 5.0  # seconds that a gateway may hold a lease without a connection


@dataclass(frozen=True, slots=True)
class OtherRouters:
    """The routers of an app beside the one that asks. `deployment`: their name. `replicas`: deployments of models."""

    app: str
    deployment: str
    replicas: tuple[str, ...]

    def count(self) -> int:
        """Return how many serve; 0 also where no replica is there or on its way, for which one could wait.

        Blocks. Raises `UpdateFailedError` when the replicas of the new version do not start.
        """
        try:
            state = app_state(self.app)
        except (RayError, RayServeException, ConnectionError) as error:
            logger.warning("Serve cannot be asked who else serves: %r", error)
            return 0
        if state is None:
            return 0
        replicas = [one for name, one in state.deployments.items() if name in self.replicas]
        for one in replicas:
            if one.update_failed:
                raise UpdateFailedError(f"the new version does not start: {one.reason}")
        routers = state.deployments.get(self.deployment)
        return routers.running if routers is not None and any(one.present for one in replicas) else 0

    def serving(self) -> int:
        """Return how many routers serve, by Serve, and stay. Blocks; raises what Ray and Serve raise."""
        state = app_state(self.app)
        routers = None if state is None else state.deployments.get(self.deployment)
        return 0 if routers is None else routers.running

    def sharing(self, picture: AppPicture | None, before: int) -> int:
        """Return how many routers serve by the latest picture, the one that asks among them.

        before: what to return where the picture is old, or has none serve yet.
        """
        seen = fresh(picture, time.monotonic())
        app = None if seen is None else seen.app
        routers = None if app is None else app.deployments.get(self.deployment)
        return (0 if routers is None else routers.running) or before


class RouterHost:
    """A router, however its requests come. It holds no state that a client's retry could not rebuild.

    settings / replicas: of each model, alike in all settings that concern the app. built_of: what `cluster.app` made
    the app of. batches: runs what clients leave at `/v1/batches`. gateways: of gRPC, beside Serve's proxy. Both find
    this deployment by themselves; a part of the app is what is bound here.
    """

    def __init__(
        self,
        settings: list[dict[str, Any]],
        replicas: list[DeploymentHandle[Any]],
        built_of: BuiltOf,
        batches: DeploymentHandle[Any] | None = None,
        gateways: DeploymentHandle[Any] | None = None,
    ) -> None:
        self._router_id = uuid4().hex
        log_to_serve(log_format=settings[0]["log_format"], process={"router": self._router_id})
        watch_raylet()
        self._configs, self._served = zip(*[_resolved(one, len(settings) > 1) for one in settings], strict=True)
        self._config = self._configs[0]
        try:
            self._keys = keys_for(self._config.api_key, self._config.api_key_file, self._config.metrics_key)
            self._store = _store(self._config)
            self._tracing = _router_tracing(self._config, self._router_id)
        except SquadronError as error:
            raise ReplicaStartError.of(error) from error
        self._replicas = replicas
        context = serve.get_replica_context()
        names = tuple([one.deployment_name for one in replicas])
        self._others = OtherRouters(context.app_name, context.deployment, names)
        self._sharers = self._config.routers  # a config file may have Serve run others than the app was built with
        deployed = DeployedApp(context.app_name, context.deployment, context.replica_id.unique_id, built_of)
        self._deployed = built_of.versions.get(context.deployment)
        memory = AppMemory(context.app_name)
        self._rollback = Rollback(deployed, memory)
        self._new = self._deployed_now(memory, built_of)
        self._watch = AppWatch(partial(probe_app, context.app_name), self._rollback.observe)
        self._watch.start()

    def build(self) -> ASGIApp:
        """Return the front end; called on the event loop that it runs on."""
        config, tenancy = self._config, Tenancy(self._keys)
        metrics = Metrics(vllm=config.metrics_compat is not None)
        if config.api_key_file is not None:  # without one there are no quotas
            quotas = SharedQuotas(self._others.app, self._router_id, tenancy.quotas, asyncio.get_running_loop())
            quotas.start()
        self._live = [
            LiveModel(
                self._router_id,
                config,
                served,
                replicas,
                metrics,
                self._sharing,
                partial(self._rouse, config, replicas.deployment_name),
            )
            for config, served, replicas in zip(self._configs, self._served, self._replicas, strict=True)
        ]
        models = Models([live.front for live in self._live])
        metrics.register(StartCollector(self._deployments(), lambda: self._watch.picture))
        front = build_app(
            models,
            metrics,
            self._ready,
            tenancy=tenancy,
            max_body_bytes=config.max_body_bytes,
            names_answers=config.ingress == GATEWAY,
            store=self._store,
            sites=Sites(tenancy.keyed, config.host, config.allowed_hosts, config.allowed_origins),
            drain=drain,
            response_retention=config.response_retention,
            copies=AnswerCopies([live.dispatcher for live in self._live], config.response_retention),
            sleeping=self._sleeping() if config.enable_sleep_mode else None,
            root_path=config.root_path,
        )
        publisher = RayPublisher((Source.ROUTER,), {"router": self._router_id}, config.metrics_compat is not None)
        Publishing(on_loop(metrics.registry.collect), publisher, publish_period()).start()
        whole = RootPath(front if self._tracing is None else self._tracing.app(front), config.root_path)
        answered = GrpcMetrics(metrics).answered
        letting_go = LetGo(whole if config.grpc_port is None else self._with_calls(whole, models, tenancy, answered))
        self._ingress = ingress = IngressCheck(letting_go, config.router_wait)
        metrics.register(IngressCollector(lambda: ingress.unkept, metrics.label))
        self._leaving = asyncio.get_running_loop().create_task(self._leave(letting_go))
        self._ending = asyncio.get_running_loop().create_task(self._end_in_time())
        settle_heap()
        app = StartupWait(self._ingress, self._serving, self._others.count)
        self._exchanges = ExchangeServer(app)
        return app

    def _sleeping(self) -> list[SleepingModel]:
        """Return what puts each model to sleep, with its orders watched from now on."""
        loop, found = asyncio.get_running_loop(), []
        for live, replicas in zip(self._live, self._replicas, strict=True):
            book = StoredOrders(self._others.app, replicas.deployment_name)
            found.append(live.with_sleep(book))
            watch(book, loop, found[-1].obey)
        return found

    def _with_calls(self, app: ASGIApp, models: Models, tenancy: Tenancy, answered: Answered) -> ASGIApp:
        from cluster.grpc_api.forwarded import ForwardedCalls
        from cluster.grpc_api.service import GrpcServices

        traced = None if self._tracing is None else self._tracing.rpc
        return ForwardedCalls(app, GrpcServices(models, tenancy, answered, self._config.max_body_bytes, traced))

    async def _leave(self, letting_go: LetGo) -> None:
        """Let go of all answers once this router's node is to end and others serve."""
        await NodeEnd(partial(ends_soon, [own_node()])).wait()
        await until_others_serve(self._others.serving, stop_flag())
        self._exchanges.leave()  # Serve's proxies hear of it from Serve
        letting_go.let_go()

    async def _end_in_time(self) -> None:
        """End what still runs with an error of its own, when it has had its time in an app that is deleted."""
        await until_stopped(stop_flag())
        seconds = await asyncio.to_thread(announced_end, self._others.app)
        if seconds is not None:
            await asyncio.sleep(seconds)
            await asyncio.gather(*[live.dispatcher.close() for live in self._live])

    async def lease(self, gateway_id: str, node: str) -> AsyncIterator[RouterAnnouncement]:
        """Announce this router to a gateway; stays open until it lets go or one of the two is gone."""
        address = await self._exchanges.address(listening_host(self._config.link_host, [node]))
        yield RouterAnnouncement(self._router_id, serve.get_replica_context().replica_id.unique_id, address)
        await self._exchanges.until_left(gateway_id, LINK_PATIENCE)

    async def close(self) -> None:
        """End, once no gateway has a lease."""
        exchanges: ExchangeServer | None = getattr(self, "_exchanges", None)
        if exchanges is not None:
            await exchanges.close()

    def models(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the deployment of each model's replicas, and its settings without keys (asked by batches)."""
        settings = [{**asdict(config), **NO_KEYS} for config in self._configs]
        return [(one.deployment_name, own) for one, own in zip(self._replicas, settings, strict=True)]

    def _deployed_now(self, memory: AppMemory, built_of: BuiltOf) -> set[str]:
        """Return the deployments that may go without replicas, and whose first ones are yet to be started."""
        new = set()
        for config, replicas in zip(self._configs, self._replicas, strict=True):
            name = replicas.deployment_name
            try:
                if config.scales_to_zero and memory.is_first(name, built_of.versions.get(name, ""), self._router_id):
                    new.add(name)
            except FAILURES as error:
                logger.warning("it is not known whether %s was deployed just now: %r", name, error)
        return new

    def _rouse(self, config: ClusterConfig, deployment: str) -> bool:
        """Whether to search for replicas without a request: not where all were stopped for lack of requests."""
        if not config.scales_to_zero or deployment in self._new:
            return True
        picture = self._watch.picture
        known = None if picture is None or picture.app is None else picture.app.deployments.get(deployment)
        return known is not None and known.present > 0

    def _deployments(self) -> list[tuple[str, str]]:
        return [
            (live.front.model_id, one.deployment_name) for live, one in zip(self._live, self._replicas, strict=True)
        ]

    def _serving(self) -> tuple[int, int]:
        return sum(one.front.ready() for one in self._live), len(self._live)

    def _sharing(self) -> int:
        """How many routers share the replicas; as many as were last seen where that is not known now."""
        self._sharers = self._others.sharing(self._watch.picture, self._sharers)
        return self._sharers

    def _ready(self) -> dict[str, Any]:
        who = {"router": self._router_id, "deployed": self._deployed, "guarded": self._ingress.guarded}
        ready = app_ready_body([(one.front.model_id, one.ready()) for one in self._live])
        views = [one.views() for one in self._live]
        return who | ready | app_body(self._others.app, self._watch.picture, views, self._rollback.notice)


def _resolved(settings: dict[str, Any], one_of_many: bool) -> tuple[ClusterConfig, ServedModel]:
    """Return what a model's settings come to on this machine; raises `ReplicaStartError`."""
    try:
        config = resolve_config(settings)
        return config, served_model(config)
    except SquadronError as error:
        title = (settings["served_model_name"] or ("",))[0] if one_of_many else ""
        raise ReplicaStartError.of(error, title) from error


def _router_tracing(config: ClusterConfig, router_id: str) -> RouterTracing | None:
    """Return what traces the calls of a router, None where tracing is off. Raises `ConfigError`."""
    tracing = process_tracing(config, "router", router_id)
    if tracing is None:
        return None
    from cluster.http.request_spans import RouterTracing

    return RouterTracing(tracing)


def _store(config: ClusterConfig) -> Store | None:
    """Return where files and batches are kept; raises `ConfigError`."""
    return None if config.batch_dir is None else Store(open_root(config.batch_dir), config.max_file_bytes)
