"""How an update replaces copies: whether a new one starts first, and when it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import SquadronError

READY_POLL_SECONDS = 0.25
ASK_SECONDS = 1.0  # between questions to Serve's controller, which all routers of an app ask
PATIENCE = 10.0  # seconds that finding replicas of this version may take, where they are there
# Serve's `max_surge_percent` that allows one copy more for each hundred that there are: Serve rounds up. It holds
# however many copies Serve runs, which may be others than the app was built with.
ONE_MORE = 1
Resources = Mapping[str, float]


class UpdateFailedError(SquadronError):
    """The new version does not come up; the one before goes on."""


class StartupWait:
    """The app itself, whose start lasts until requests can be served, or no other app could serve them (ASGI).

    Serve stops an old router as soon as a new one has started. A new one that speaks another model's tokens than the
    replicas there are would refuse everything until theirs have been replaced.

    serving: for how many models requests can be served, and how many there are. others: how many routers serve now;
    asked in a thread, raises `UpdateFailedError` when there is nothing left to wait for.
    """

    def __init__(self, app: ASGIApp, serving: Callable[[], tuple[int, int]], others: Callable[[], int]) -> None:
        self._app = app
        self._serving = serving
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on to the app."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def wait_and_send(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                try:
                    await self._wait()
                except UpdateFailedError as error:
                    message = {"type": "lifespan.startup.failed", "message": str(error)}
            await send(message)

        await self._app(scope, receive, wait_and_send)

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        deadline, ask_at = loop.time() + PATIENCE, loop.time()
        while True:
            ready, wanted = self._serving()
            if ready == wanted:
                return
            if loop.time() >= ask_at:
                try:
                    if not await asyncio.to_thread(self._others):
                        return
                except UpdateFailedError:
                    if loop.time() > deadline:
                        if ready:
                            return  # one model that does not start does not block the others
                        raise
                ask_at = loop.time() + ASK_SECONDS
            await asyncio.sleep(READY_POLL_SECONDS)


def fits(needed: Resources, free: Resources) -> bool:
    """Whether the cluster has so much of everything free."""
    return all(free.get(kind, 0.0) >= amount for kind, amount in needed.items())
