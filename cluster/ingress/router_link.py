"""What a gateway and a router say to one another: exchanges, one after the other, over a connection of their own.

A connection carries one exchange at a time, so that each waits for its own client alone, and the kernel bounds what
is on its way. Messages are ASGI's own, as msgpack; each bears the number of its exchange on the connection, and what
is late from the one before is dropped. Source: ASGI specification 3.0, HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from msgspec import msgpack
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.answer_log import KEPT, LETS_GO, NOTE
from cluster.wire.frames import HELLO_TIMEOUT, FrameServer, FrameStream, open_stream
from cluster.wire.link import LinkAddress, LinkClosedError, LinkLimits

BEGIN = "squadron.begin"  # a gateway's first message of an exchange: its `scope`
WELCOME = "squadron.welcome"  # a router's first one on a connection, once it knows the secret
END = "squadron.end"  # a router's last one of an exchange
WATCH = "squadron.watch"  # a gateway's, in place of an exchange: its `gateway` wants to be told that the router lives
ALIVE = "squadron.alive"  # a router's answer to it, every `BEAT` seconds: whether it is `leaving`
VERSION = 1  # of all this, in the first message of either side
BEAT = 1.0
PIECE = 1 << 20  # bytes of a body that one message carries at most
SILENCE = 3.0  # seconds without a word after which a router gets no new exchange
# The log of an answer that another router goes on with is 32 MiB at most, its request as much.
LIMITS = LinkLimits(max_message_bytes=96 << 20, max_up_bytes=97 << 20, max_down_bytes=97 << 20)
CARRIED = (  # of a scope; what else is in it has a meaning in its own process alone
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)
log = logging.getLogger(__name__)
_encode = msgpack.Encoder().encode
_decode = msgpack.Decoder(tuple[int, dict[str, Any]]).decode


class RouterConnection:
    """A gateway's end: passes exchanges on to a router, one at a time. Made by `open`."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._number = 0

    @classmethod
    async def open(cls, address: LinkAddress) -> RouterConnection:
        """Connect. Raises `OSError` within `HELLO_TIMEOUT` seconds."""
        stream: FrameStream | None = None
        try:
            async with asyncio.timeout(HELLO_TIMEOUT):
                stream = await open_stream(address, LIMITS)
                _, welcome = _decode(await stream.receive())
            if (welcome["type"], welcome.get("version")) != (WELCOME, VERSION):
                raise ConnectionError(f"{address!r} is no router of version {VERSION}")
            return cls(stream)
        except BaseException as error:
            if stream is not None:
                stream.close()
            if isinstance(error, LinkClosedError):
                raise ConnectionError(str(error)) from error
            raise

    @property
    def closed(self) -> bool:
        """Whether it can carry no more."""
        return self._stream.closed

    def close(self, discard: bool = True) -> None:
        """End it; the router hears of it as of a client that has left. discard: what has come of an answer."""
        self._stream.close(discard=discard)

    async def exchange(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Have the router answer; returns whether it came to the end, which is not so where it died."""
        self._number += 1
        asking = asyncio.ensure_future(self._ask(scope, receive))
        asking.add_done_callback(self._end_if_failed)
        try:
            while (message := await self._next())["type"] != END:
                if message["type"] == "http.response.start":
                    message["headers"] = [tuple(pair) for pair in message["headers"]]
                await send(message)
        except LinkClosedError:
            return False
        except BaseException:
            self.close()
            raise
        finally:
            asking.cancel()
        return True

    def _end_if_failed(self, asking: asyncio.Future[None]) -> None:
        """Give the exchange up where what the client says cannot be passed on: the router would wait for it."""
        if not asking.cancelled() and (error := asking.exception()) is not None:
            log.error("a request could not be passed on", exc_info=error)
            self.close()

    async def watch(self, gateway_id: str, heard: Callable[[bool], None]) -> None:
        """Call `heard` when the router says that it lives, with whether it leaves; returns once it is gone."""
        self._number += 1
        try:
            self._stream.send(_encode((self._number, {"type": WATCH, "gateway": gateway_id, "version": VERSION})))
            while (message := await self._next())["type"] == ALIVE:
                heard(message["leaving"])
        except LinkClosedError:
            return

    async def _ask(self, scope: Scope, receive: Receive) -> None:
        """Tell the router what the client asks, and what it does then."""
        number = self._number
        carried = {name: scope[name] for name in CARRIED if name in scope}
        carried |= {name: value for name, value in scope.items() if name.startswith("squadron.")}
        try:
            self._stream.send(_encode((number, {"type": BEGIN, "scope": carried})))
            while True:
                message = await receive()
                for piece in _pieces(message):
                    self._stream.send(_encode((number, piece)))
                    await self._stream.room()
                if message["type"] == "http.disconnect":
                    return
        except LinkClosedError:
            return  # `exchange` sees it as well

    async def _next(self) -> Message:
        """Return the next message of the exchange that runs; what is left of the one before is dropped."""
        while True:
            number, message = _decode(await self._stream.receive())
            if number == self._number:
                return message


class ExchangeServer:
    """A router's end: takes connections of gateways, and has `app` answer what comes through them (ASGI)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._addresses: dict[str, asyncio.Task[LinkAddress]] = {}  # host -> where exchanges are taken there
        self._servers: list[FrameServer] = []
        self._watches: dict[FrameStream, str] = {}  # which gateway watches by each
        self._changed = asyncio.Condition()  # of these
        self._leaves = asyncio.Event()

    async def address(self, host: str) -> LinkAddress:
        """Return where exchanges are taken on `host`, at a port that the system chooses."""
        if host not in self._addresses:
            server = FrameServer(self._serve, LIMITS, "router")
            self._servers.append(server)
            self._addresses[host] = asyncio.create_task(server.start(host))
        return await asyncio.shield(self._addresses[host])

    async def until_left(self, gateway_id: str, patience: float) -> None:
        """Return when a gateway watches this router no more, or has not begun to within `patience` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience) as limit, self._changed:
                await self._changed.wait_for(lambda: gateway_id in self._watches.values())
                limit.reschedule(None)
                await self._changed.wait_for(lambda: gateway_id not in self._watches.values())

    def leave(self) -> None:
        """Tell all gateways to bring nothing more, where there is another router."""
        self._leaves.set()

    async def close(self) -> None:
        """End all connections."""
        for server in self._servers:
            await server.close()

    async def _serve(self, stream: FrameStream) -> None:
        stream.send(_encode((0, {"type": WELCOME, "version": VERSION})))
        while True:
            number, message = _decode(await stream.receive())
            if message["type"] == BEGIN:
                await _Exchange(number, stream).run(self._app, message["scope"])
            elif message["type"] == WATCH:
                await self._beat(number, stream, message["gateway"])
            # else of an exchange that is over

    async def _beat(self, number: int, stream: FrameStream, gateway_id: str) -> None:
        """Tell a gateway that this router lives, until the connection is over."""
        await self._note(stream, gateway_id)
        leaves = asyncio.ensure_future(self._leaves.wait())
        over = asyncio.ensure_future(stream.over.wait())
        try:
            while not over.done():
                stream.send(_encode((number, {"type": ALIVE, "leaving": leaves.done()})))
                awaited = {over} if leaves.done() else {over, leaves}
                await asyncio.wait(awaited, timeout=BEAT, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaves.cancel()
            over.cancel()
            await self._note(stream, None)

    async def _note(self, stream: FrameStream, gateway_id: str | None) -> None:
        """Take note of which gateway watches by a connection, None = none any more."""
        async with self._changed:
            if gateway_id is None:
                del self._watches[stream]
            else:
                self._watches[stream] = gateway_id
            self._changed.notify_all()


class _Exchange:
    """One exchange at a router."""

    def __init__(self, number: int, stream: FrameStream) -> None:
        self._number = number
        self._stream = stream
        self._left = False
        self._over = False

    async def run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        scope["headers"] = [tuple(pair) for pair in scope["headers"]]
        scope["state"] = {}
        scope["asgi"] = {"version": "3.0"}
        try:
            await app(scope, self._receive, self._send)
        except LinkClosedError:
            raise
        except Exception:
            log.exception("an exchange failed inside")
        finally:
            self._over = True
        self._stream.send(_encode((self._number, {"type": END})))

    async def _receive(self) -> Message:
        while not self._left:
            try:
                number, message = _decode(await self._stream.receive())
            except LinkClosedError:
                break
            if number == self._number:
                self._left = message["type"] == "http.disconnect"
                return message
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if self._over or self._stream.closed:
            return  # as ASGI has it for a client that has left
        if message["type"] == NOTE:  # nobody waits for it: who says it says it of other exchanges, too
            if KEPT in message or LETS_GO in message or not self._stream.is_full:
                self._stream.send(_encode((self._number, message)))
            return
        for piece in _pieces(message):
            self._stream.send(_encode((self._number, piece)))
            await self._stream.room()


def _pieces(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Cut the body of a message into what one frame carries."""
    body = message.get("body", b"")
    if len(body) <= PIECE:
        yield message
        return
    for at in range(0, len(body), PIECE):
        more = at + PIECE < len(body) or message.get("more_body", False)
        rest = {"type": message["type"]} if at else message
        yield {**rest, "body": body[at : at + PIECE], "more_body": more}
