"""The router deployment, as the app names it. What it does is in `router_host`, which is imported where it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import uvicorn
from ray import serve
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.lifespan.on import LifespanOn

from cluster.ingress.router_directory import RouterAnnouncement
from engine.device.machine import collector_paused

if TYPE_CHECKING:
    from cluster.deployments.router_host import RouterHost


class RouterCopy:
    """Serve builds one per router copy. Arguments: those of `RouterHost`."""

    def __init__(self, *args: Any) -> None:
        with collector_paused():
            from cluster.deployments.router_host import RouterHost

            self._host = RouterHost(*args)

    async def lease(self, gateway_id: str, node: str, watch: None = None) -> AsyncIterator[RouterAnnouncement]:
        """See `RouterHost.lease`. `watch` is for the gateway's side (`cluster.lifecycle.leases`), and None here."""
        async for announcement in self._host.lease(gateway_id, node):
            yield announcement

    def models(self) -> list[tuple[str, dict[str, Any]]]:
        """See `RouterHost.models`."""
        return self._host.models()

    async def __del__(self) -> None:
        """End (called by Serve once no gateway has a lease, also where `__init__` failed)."""
        host: RouterHost | None = getattr(self, "_host", None)
        if host is not None:
            await host.close()


@serve.ingress()
class Router(RouterCopy):
    """A router whose requests come through Serve's own proxy, and calls of gRPC from gateways."""

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the front end (called by Serve on this replica's event loop)."""
        return self._host.build()


class RouterBehindGateway(RouterCopy):
    """A router whose requests come from gateways."""

    async def __init__(self, *args: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        super().__init__(*args)
        self._lifespan = LifespanOn(uvicorn.Config(self._host.build(), lifespan="on", log_config=None))
        await self._lifespan.startup()
        if self._lifespan.should_exit:
            raise RuntimeError("the router did not start; its log has more")

    @override
    async def __del__(self) -> None:
        """End (called by Serve once no gateway has a lease)."""
        await super().__del__()
        if getattr(self, "_lifespan", None) is not None:
            await self._lifespan.shutdown()
