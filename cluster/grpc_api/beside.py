"""Ties the gRPC server to the life of the HTTP app, which Serve starts and ends."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.grpc_api.server import GrpcServer


class BesideHttp:
    """The app itself, with a gRPC server that takes calls from the app's start to its shutdown (ASGI).

    grace: seconds that running calls get at the end. Serve counts only what comes through its own proxies, so that
    it would not wait for them.
    """

    def __init__(self, app: ASGIApp, server: GrpcServer, grace: float) -> None:
        self._app = app
        self._server = server
        self._grace = grace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on to the app."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def receive_and_stop() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._server.stop(self._grace)
            return message

        async def start_and_send(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                await self._server.start()
            await send(message)

        await self._app(scope, receive_and_stop, start_and_send)
