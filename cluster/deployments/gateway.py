"""The gateway deployment: holds the connections of clients, and has routers answer what comes through them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import uuid4

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp
from typing_extensions import override

from cluster.admission.key_file import keys_for
from cluster.admission.tenants import Tenancy
from cluster.config import resolve_config
from cluster.errors import ReplicaStartError
from cluster.grpc_api.gateway import ForwardingInterceptor, ForwardingService
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
        # What Serve itself does at the end counts as well.
        self._grace = max(1.0, self._config.drain_timeout - 5.0)

    def build(self) -> ASGIApp:
        """Return the application, and make the gRPC server where there is one; called on the loop that they run on.

        Raises `ReplicaStartError` where a port is taken.
        """
        config = self._config
        pool = RouterPool(self._gateway_id, config.router_wait)
        self._directory = RouterDirectory(self._gateway_id, self._routers, pool)
        guard = RouterLossGuard(pool)
        app = GatewayApp(pool, guard)
        settle_heap()
        self._grpc: GrpcServer | None = None
        if config.grpc_port is None:
            return app
        try:
            tenancy = Tenancy(keys_for(config.api_key, config.api_key_file, config.metrics_key))
            self._key_watch = asyncio.create_task(tenancy.watch())
            service = ForwardingService(guard, lambda: pool.routers)
            address = ListenAddress(config.host, config.grpc_port)
            self._grpc = GrpcServer(address, service, ForwardingInterceptor(tenancy, service), config.max_body_bytes)
        except SquadronError as error:
            raise ReplicaStartError.of(error) from error
        return app

    def check_health(self) -> None:
        """Raise where calls are not taken (called by Serve)."""
        started: asyncio.Task[None] | None = getattr(self, "_grpc_start", None)
        if started is not None and started.done():
            started.result()

    def _start_grpc(self) -> None:
        if self._grpc is not None:
            self._grpc_start = asyncio.create_task(self._grpc.start())

    async def _stop_grpc(self) -> None:
        grpc: GrpcServer | None = getattr(self, "_grpc", None)  # none where the start failed
        if grpc is not None:
            await grpc.stop(self._grace)


@serve.ingress()
class GatewayBehindProxy(GatewayHost):
    """A gateway whose connections come through HAProxy."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application (called by Serve on this copy's event loop)."""
        app, grpc = self.build(), self._grpc
        return app if grpc is None else BesideHttp(app, grpc, self._grace)


class GrpcGateway(GatewayHost):
    """A gateway for gRPC alone, beside Serve's proxy."""

    def __init__(self, settings: dict[str, Any], routers: str) -> None:
        """routers: the name of their deployment, which is bound to this one and so cannot be bound here."""
        super().__init__(settings, serve.get_deployment_handle(routers))
        self.build()
        self._start_grpc()

    async def __del__(self) -> None:
        """Take nothing new, let calls finish, and end (called by Serve)."""
        await self._stop_grpc()


class Gateway(GatewayHost):
    """A gateway that takes connections itself. Those of one machine share a port."""

    def __init__(self, settings: dict[str, Any], routers: DeploymentHandle[Any]) -> None:
        super().__init__(settings, routers)
        config = self._config
        try:
            self._server = HttpServer(self.build(), config.host, config.port, self._grace)
        except SquadronError as error:
            raise ReplicaStartError.of(error) from error
        self._start_grpc()
        logger.info("HTTP listens on %s port %d", config.host, self._server.port)

    @override
    def check_health(self) -> None:
        """Raise when no more connections are taken (called by Serve)."""
        super().check_health()
        if self._server.ended:
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        """Take nothing new, let exchanges and calls finish, and end (called by Serve)."""
        server: HttpServer | None = getattr(self, "_server", None)
        if server is not None:
            await asyncio.gather(server.stop(), self._stop_grpc())
