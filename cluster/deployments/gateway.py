"""The gateway deployment: holds the connections of clients, and has routers answer what comes through them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import uuid4

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster.admission.key_file import keys_for
from cluster.admission.tenants import Tenancy
from cluster.config import resolve_config
from cluster.errors import ReplicaStartError
from cluster.grpc_api.gateway import CarryingDoor, CarryingService
from cluster.grpc_api.server import BesideHttp, GrpcServer, ListenAddress
from cluster.ingress.gateway import GatewayApp, HttpServer
from cluster.ingress.guard import RouterLossGuard
from cluster.ingress.router_directory import RouterDirectory
from cluster.ingress.router_pool import RouterPool
from cluster.replica.orphans import watch_parent
from cluster.telemetry.logs import log_to_serve
from engine.device.machine import settle_heap
from engine.errors import SquadronError

logger = logging.getLogger(__name__)


class GatewayHost:
    """What a gateway is, whoever takes the connections of HTTP.

    settings: of the app. routers: the deployment that answers.
    """

    def __init__(self, settings: dict[str, Any], routers: DeploymentHandle[Any]) -> None:
        self._gateway_id = uuid4().hex
        log_to_serve(log_format=settings["log_format"], process={"gateway": self._gateway_id})
        watch_parent()
        self._config = resolve_config(settings)
        self._routers = routers

    def build(self) -> ASGIApp:
        """Return the application, with its gRPC server where there is one; called on the event loop that it runs on.

        Raises `ReplicaStartError` where a port is taken.
        """
        config = self._config
        pool = RouterPool(self._gateway_id, config.router_wait)
        self._directory = RouterDirectory(self._gateway_id, self._routers, pool)
        guard = RouterLossGuard(pool)
        app = GatewayApp(pool, guard)
        settle_heap()
        if config.grpc_port is None:
            return app
        try:
            tenancy = Tenancy(keys_for(config.api_key, config.api_key_file, config.metrics_key))
            self._key_watch = asyncio.create_task(tenancy.watch())
            service = CarryingService(guard, lambda: pool.routers)
            address = ListenAddress(config.host, config.grpc_port)
            server = GrpcServer(address, service, CarryingDoor(tenancy, service), config.max_body_bytes)
        except SquadronError as error:
            raise ReplicaStartError.of(error) from error
        return BesideHttp(app, server, config.drain_timeout)


@serve.ingress()
class GatewayBehindProxy(GatewayHost):
    """A gateway whose connections come through HAProxy."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application (called by Serve on this copy's event loop)."""
        return self.build()


class Gateway(GatewayHost):
    """A gateway that takes connections itself. Those of one machine share a port."""

    def __init__(self, settings: dict[str, Any], routers: DeploymentHandle[Any]) -> None:
        super().__init__(settings, routers)
        config = self._config
        try:
            self._server = HttpServer(self.build(), config.host, config.port, config.drain_timeout)
        except SquadronError as error:
            raise ReplicaStartError.of(error) from error
        logger.info("HTTP listens on %s port %d", config.host, self._server.port)

    def check_health(self) -> None:
        """Raise when no more connections are taken (called by Serve)."""
        if self._server.ended:
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        """Let exchanges finish, and end (called by Serve)."""
        server: HttpServer | None = getattr(self, "_server", None)
        if server is not None:
            await server.stop()
