"""The gateway deployments, as the app names them. What they do is in `gateway_host`, imported where they run."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from typing_extensions import override

from cluster.errors import ReplicaStartError
from engine.errors import SquadronError

if TYPE_CHECKING:
    from cluster.deployments.gateway_host import GatewayHost
    from cluster.ingress.gateway import HttpServer

logger = logging.getLogger(__name__)


class GatewayCopy:
    """Serve builds one per copy. Arguments: those of `GatewayHost`."""

    def __init__(self, settings: dict[str, Any], routers: DeploymentHandle[Any]) -> None:
        from cluster.deployments.gateway_host import GatewayHost

        self._host = GatewayHost(settings, routers)

    def check_health(self) -> None:
        """Raise where calls are not taken (called by Serve)."""
        self._host.check_health()


class GrpcGateway(GatewayCopy):
    """A gateway for gRPC alone, beside Serve's proxy."""

    def __init__(self, settings: dict[str, Any], routers: str) -> None:
        """routers: the name of their deployment, which is bound to this one and so cannot be bound here."""
        super().__init__(settings, serve.get_deployment_handle(routers))
        self._host.build()
        self._host.start_grpc()

    async def __del__(self) -> None:
        """Take nothing new, let calls finish, and end (called by Serve)."""
        host: GatewayHost | None = getattr(self, "_host", None)
        if host is not None:
            await host.stop_grpc()


class Gateway(GatewayCopy):
    """A gateway that takes connections itself. Those of one machine share a port."""

    def __init__(self, settings: dict[str, Any], routers: DeploymentHandle[Any]) -> None:
        super().__init__(settings, routers)
        from cluster.ingress.gateway import HttpServer

        host, config = self._host, self._host.config
        try:
            self._server = HttpServer(host.build(), config.host, config.port, host.grace, config.max_connections)
        except SquadronError as error:
            raise ReplicaStartError.of(error) from error
        host.start_grpc()
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
            await asyncio.gather(server.stop(), self._host.stop_grpc())
