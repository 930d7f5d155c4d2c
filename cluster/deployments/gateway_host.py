"""A gateway: holds the connections of clients, and has routers answer what comes through them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster.config import resolve_config
from cluster.errors import ReplicaStartError
from cluster.ingress.gateway import GatewayApp
from cluster.ingress.guard import RouterLossGuard
from cluster.ingress.router_directory import RouterDirectory
from cluster.ingress.router_pool import RouterPool
from cluster.lifecycle.node_drains import own_node
from cluster.replica.orphans import watch_raylet
from cluster.telemetry.logs import log_to_serve
from engine.device.machine import settle_heap
from engine.errors import SquadronError

if TYPE_CHECKING:  # without gRPC nothing of it is imported
    from cluster.grpc_api.server import GrpcServer

logger = logging.getLogger(__name__)


class GatewayHost:
    """What a gateway is, whoever takes the connections of HTTP.

    settings: of the app. routers: the deployment that answers. `grace`: seconds that what runs gets at the end.
    """

    def __init__(self, settings: dict[str, Any], routers: DeploymentHandle[Any]) -> None:
        self._gateway_id = uuid4().hex
        log_to_serve(log_format=settings["log_format"], process={"gateway": self._gateway_id})
        watch_raylet()
        self.config = resolve_config(settings)
        self._routers = routers
        self.grace = self.config.stream_grace

    def build(self) -> ASGIApp:
        """Return the application, and make the gRPC server where there is one; called on the loop that they run on.

        Raises `ReplicaStartError` where a port is taken.
        """
        config = self.config
        pool = RouterPool(self._gateway_id, config.router_wait)
        self._directory = RouterDirectory(self._gateway_id, own_node(), self._routers, pool)
        guard = RouterLossGuard(pool, gateway=True)
        app = GatewayApp(pool, guard)
        settle_heap()
        self._grpc: GrpcServer | None = None
        if config.grpc_port is None:
            return app
        try:
            self._grpc = self._grpc_server(config.grpc_port, guard, pool)
        except SquadronError as error:
            raise ReplicaStartError.of(error) from error
        return app

    def check_health(self) -> None:
        """Raise where calls are not taken (called by Serve)."""
        started: asyncio.Task[None] | None = getattr(self, "_grpc_start", None)
        if started is not None and started.done():
            started.result()

    def start_grpc(self) -> None:
        """Take calls, where that is wanted."""
        if self._grpc is not None:
            self._grpc_start = asyncio.create_task(self._grpc.start())

    async def stop_grpc(self) -> None:
        """Take no more calls, and let those that run finish."""
        grpc: GrpcServer | None = getattr(self, "_grpc", None)  # none where the start failed
        if grpc is not None:
            await grpc.stop(self.grace)

    def _grpc_server(self, port: int, guard: RouterLossGuard, pool: RouterPool) -> GrpcServer:
        from cluster.admission.key_file import keys_for
        from cluster.admission.tenants import Tenancy
        from cluster.grpc_api.gateway import ForwardingInterceptor, ForwardingService
        from cluster.grpc_api.server import GrpcServer, ListenAddress

        config = self.config
        tenancy = Tenancy(keys_for(config.api_key, config.api_key_file, config.metrics_key))
        self._key_watch = asyncio.create_task(tenancy.watch())
        service = ForwardingService(guard, lambda: pool.routers)
        address = ListenAddress(config.host, port)
        return GrpcServer(address, service, ForwardingInterceptor(tenancy, service), config.max_body_bytes)
