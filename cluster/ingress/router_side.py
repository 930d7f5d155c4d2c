"""What a router knows of the ingress before it: whether clients hear of its death, and how much they have taken.

No answer gets far ahead of its client: Ray Serve takes all that it is given, and keeps it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ray.exceptions import RayError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.answer_log import (
    ANSWER_LOG,
    ASKS,
    KEEPS,
    KEPT,
    LISTENS,
    NOTE,
    ROUTER_WAIT,
    SILENCE,
    TICK,
    UNKEPT,
    AnswerLog,
    NoLog,
)
from cluster.ingress.attempt import ASKS_TAKEN, TAKEN
from cluster.ingress.guard import CALLBACK, CALLBACK_VARIABLE, MARK, TELLS_TAKEN, WINDOWED

BEAT = TICK  # seconds without a word to the guard after which it is told that this router lives
NOTE_AFTER = BEAT / 4  # seconds after which it is told what came of an answer that is not sent yet
READS = 1.0  # seconds in which a router that stood still has read what came meanwhile
TAKES_BACK = 0.5  # seconds in which a router that was silent for long hears whether its ingress has left it
WINDOW = 1 << 20  # bytes of an answer that may be on their way to its client
UNGUARDED = (
    "requests come through a proxy of Ray Serve that is not guarded: a client that trusts the end of a body may take "
    "a stream whose router died for whole. Start Ray, on every node, with "
    f"{CALLBACK_VARIABLE}={CALLBACK}"
)
log = logging.getLogger(__name__)


class IngressCheck:
    """ASGI middleware of a router. `guarded`: whether the last request came through the guard; None before any.

    router_wait: seconds that an answer may wait for another router, when this one is lost. unkept: answers that their
    ingress had no room to keep, so that they end with this router.
    """

    def __init__(self, app: ASGIApp, router_wait: float = 60.0) -> None:
        self.guarded: bool | None = None
        self.unkept = 0
        self._app = app
        self._router_wait = router_wait
        self._beats = _Beats()
        self._stalls = _Stalls()
        self._warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at one request and pass it on (ASGI)."""
        receive = until_lost(receive)
        if scope["type"] == "http":
            marks = [value for name, value in scope["headers"] if name == MARK]
            self.guarded = bool(marks)
            if not self.guarded and not self._warned:
                self._warned = True
                log.warning(UNGUARDED)
            if marks == [TELLS_TAKEN]:  # one of an earlier version reports nothing
                scope.setdefault("state", {})[WINDOWED] = True
                window = _SendWindow(receive, send)
                receive, send = window.receive, window.send
            if KEEPS in scope:
                await self._told(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _told(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the guard told that this router lives, and what another one needs to go on with the answer."""
        answer_log: AnswerLog = NoLog()
        if scope[KEEPS]:
            answer_log = scope.setdefault("state", {})[ANSWER_LOG] = AnswerLog.of(scope)
        answer_log.spoke(since=self._stalls.began())
        teller = _Teller(answer_log, receive, send, self._router_wait, self._count_unkept)
        answer_log.until_heard = teller.until_heard
        try:
            with self._beats.of(teller):
                await self._app(scope, teller.receive, teller.send)
        finally:
            del answer_log.until_heard  # no circle is left of an exchange

    def _count_unkept(self) -> None:
        self.unkept += 1


class _Teller:
    """Puts what is to be kept of an answer beside its messages; says something now and then where there are none.

    A router that may have been left asks whether it was, with each message; the ingress answers if it has not.
    """

    def __init__(
        self, answer_log: AnswerLog, receive: Receive, send: Send, router_wait: float, unkept: Callable[[], None]
    ) -> None:
        self._log = answer_log
        self._unkept = unkept
        self._receive = receive
        self._send = send
        self._first: dict[str, Any] = {ROUTER_WAIT: router_wait}
        self._silent = 0.0  # seconds without a word, as `beat` counts them

    async def receive(self) -> Message:
        """Return the next message for the app, and take in those that are not."""
        while (message := await self._receive())["type"] in (LISTENS, UNKEPT):
            if message["type"] == UNKEPT:
                self._unkept()
            else:
                self._log.listens(message["asked_at"])
        return message

    async def send(self, message: Message) -> None:
        """Pass a message on, and what is to be kept with it."""
        self._silent = 0.0
        self._log.spoke()
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last:
            await self.until_heard()  # where another router has the request, this one is cancelled here
        await self._tell(message)
        if is_last:
            self._log.is_answered()

    async def until_heard(self) -> None:
        """Wait, where this router may have been left, until the ingress is heard, or would have been heard.

        A wait in which the router stood still is none: it was left meanwhile, and hears of that only now.
        """
        loop = asyncio.get_running_loop()
        while self._log.may_be_elsewhere:
            self._log.spoke()
            # Nothing of the answer goes with it: another router would go on with one that is refused here.
            await self._send({"type": NOTE, **self._asking()})
            began = loop.time()
            with suppress(TimeoutError):
                async with asyncio.timeout(TAKES_BACK):
                    await self._log.heard()
            if TAKES_BACK <= loop.time() - began < SILENCE:
                return

    async def _tell(self, message: Message) -> None:
        beside, self._first = self._first | self._asking(), {}
        if (note := self._log.take()) is not None:
            beside[KEPT] = note
        await self._send({**message, **beside} if beside else message)

    def _asking(self) -> dict[str, Any]:
        return {ASKS: asyncio.get_running_loop().time()} if self._log.may_be_elsewhere else {}

    async def beat(self) -> None:
        """Speak after `BEAT` without a word, and sooner where there is something to be kept. Each `NOTE_AFTER`."""
        self._silent += NOTE_AFTER
        if self._silent >= BEAT or (self._silent > NOTE_AFTER and self._log.has_news):
            await self.send({"type": NOTE})


class _Beats:
    """Has all tellers of a router beat in turn: one timer for them all, which rests while there is none."""

    def __init__(self) -> None:
        self._tellers: set[_Teller] = set()
        self._beating: asyncio.Task[None] | None = None

    @contextmanager
    def of(self, teller: _Teller) -> Iterator[None]:
        """Have a teller beat in the block."""
        self._tellers.add(teller)
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            self._tellers.discard(teller)

    async def _beat(self) -> None:
        while self._tellers:
            await asyncio.sleep(NOTE_AFTER)
            for teller in list(self._tellers):
                try:
                    await teller.beat()
                except Exception:  # of one exchange, which the others must not miss
                    log.exception("an ingress could not be told that its router lives")
                    self._tellers.discard(teller)
        self._beating = None


class _Stalls:
    """When the router last stood still. What came meanwhile is read at once afterwards, and may be that old."""

    def __init__(self) -> None:
        self._began = self._ended = float("-inf")
        self._looked = asyncio.get_running_loop().time()
        self._look()

    def began(self) -> float:
        """Return when an exchange that begins now may have been sent: in a stall that has just ended, else now."""
        now = asyncio.get_running_loop().time()
        if now - self._looked >= 2 * BEAT:  # the look that is late has not come yet
            return self._looked
        return self._began if now - self._ended < READS else now

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now - self._looked >= 2 * BEAT:
            self._began, self._ended = self._looked, now
        self._looked = now
        loop.call_later(BEAT, self._look)


class _SendWindow:
    """One exchange: sending waits while `WINDOW` bytes of the body are more than the client has taken.

    The last message of a body does not wait, so that a stream can be ended whose client reads no more. An app sending
    more than one message of body must receive meanwhile, as it must anyway to hear that the client has left.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._sent = 0
        self._taken = 0
        self._left = False
        self._moved = asyncio.Event()

    async def receive(self) -> Message:
        """Return the next message for the app, and take in those that are not."""
        while (message := await self._receive())["type"] == TAKEN:
            self._taken = message["bytes"]
            self._moved.set()
        if message["type"] == "http.disconnect":
            self._left = True
            self._moved.set()
        return message

    async def send(self, message: Message) -> None:
        """Pass a message on once it fits."""
        if message["type"] == "http.response.start":
            message = {**message, ASKS_TAKEN: True}
        elif message["type"] == "http.response.body":
            while message.get("more_body") and self._sent - self._taken >= WINDOW and not self._left:
                self._moved.clear()
                await self._moved.wait()
            self._sent += len(message.get("body", b""))
        await self._send(message)


def until_lost(receive: Receive) -> Receive:
    """Return `receive` that reports a disconnect where Ray cannot fetch more from the proxy.

    Serve raises what its call to the proxy raised, when that has died, or has cancelled a request on whose client it
    has given up while its body was still on its way.
    """
    lost = False

    async def receive_or_disconnect() -> Message:
        nonlocal lost
        if not lost:
            try:
                return await receive()
            except RayError as error:
                lost = True
                log.info("a request's client is gone: %s", type(error).__name__)
        return {"type": "http.disconnect"}

    return receive_or_disconnect
