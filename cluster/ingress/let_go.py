"""A router that leaves lets go of its answers: whoever holds their clients' connections has another one go on.

For that it is as if the router had died, but at a moment when there is another one.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.answer_log import ANSWER_LOG, KEEPS, LETS_GO, NOTE, AnswerLog

# As Serve's proxy says it where there is no router: no answer, so that another one is asked.
_NOT_HERE = {
    "type": "http.response.start",
    "status": 503,
    "headers": [(b"content-type", b"text/plain"), (b"retry-after", b"1")],
    LETS_GO: True,
}
logger = logging.getLogger(__name__)


class LetGo:
    """ASGI middleware of a router, within `IngressCheck`. What cannot go on elsewhere is made to its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._leaves = False
        self._kept: dict[asyncio.Task[None], AnswerLog] = {}

    def let_go(self) -> None:
        """End all that others can go on with, now and from now on."""
        self._leaves = True
        logger.info("this router leaves: %d answers go on elsewhere", len(self._kept))
        for answer, log in self._kept.items():
            log.let_go()
            answer.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one exchange on, for as long as this router stays (ASGI)."""
        if scope["type"] != "http" or not scope.get(KEEPS):
            await self._app(scope, receive, send)
            return
        if self._leaves:
            await send(dict(_NOT_HERE))
            await send({"type": "http.response.body", "body": b"this router leaves\n"})
            return

        async def say(message: Message) -> None:
            if not self._leaves:
                await send(message)

        answer = asyncio.ensure_future(self._app(scope, receive, say))
        self._kept[answer] = scope["state"][ANSWER_LOG]
        try:
            await asyncio.wait((answer,))
            if answer.cancelled() and self._leaves:
                await send({"type": NOTE, LETS_GO: True})
            else:
                answer.result()
        finally:
            del self._kept[answer]
            answer.cancel()
