"""One exchange with a client as the guard keeps it: what was asked, what the client has, and what routers said of it.

An answer may be made by several routers, one after the other. Each makes it from its beginning, in the same bytes;
what the client has already is dropped here, after a look at whether it is the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from msgspec import DecodeError, json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.answer_log import CONTINUES, ELAPSED, KEPT, NOTES, ROUTER_WAIT
from cluster.client_id import SERVERS_NAME

ASKS_TAKEN = "squadron.tell_taken"  # beside the status of an answer whose router asks for the next
TAKEN = "squadron.taken"  # type of the message that reports what the client has taken: `bytes` of the body, so far
TELL_BYTES = 1 << 18  # after so many it is reported, or
TELL_LEAST, TELL_SECONDS = 1 << 15, 5.0  # after these, when the last report is so long ago
STALLED = 600.0  # seconds; a client that takes nothing for so long is taken for gone
MOST_OF_ONE = 32 << 20  # bytes that are kept of one exchange: what was asked and what its routers said
TICK = 1.0  # seconds between two looks at whether a router lives
LEASE = 5  # looks without a word of a router after which it is dead: it says something between two of them
QUIET = 5.0  # seconds without a byte for a client that waits for another router, until it gets a comment
OF_MESSAGE, OF_NOTE = 256, 64  # bytes that a kept one takes beside its content
COMMENT = b": waiting for another router\n\n"  # source: WHATWG HTML, server-sent events: clients pass over it
REPEATED = frozenset(  # a POST that has no effect but its answer
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
    }
)
log = logging.getLogger(__name__)


class Budget:
    """Bytes that all exchanges of a proxy may keep together."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, size: int) -> bool:
        """Take so much, if there is room."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def give_back(self, size: int) -> None:
        """Return what was taken."""
        self._left += size


class Exchange:
    """The client's side of one exchange, which lasts over all routers that answer it.

    over: answered to the end, or the client is gone. started: whether the client has the head of an answer, which
    `streams_events` or not. last: what of the body came last. sent: bytes of the body that the client has or that are
    on their way to it. shown_id: the router's id of the answer, where the answer shows that one. named: whether the
    client has a name of its own for the request.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, budget: Budget, named: bool) -> None:
        self.over = False
        self.started = False
        self.streams_events = False
        self.last = b""
        self.sent = 0
        self.shown_id: str | None = None
        self.stalled = False
        self.named = named
        self._scope = dict(scope)
        self._receive = receive
        self._send = send
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._arriving: asyncio.Future[Message] | None = None  # what the client sends next
        self._asked: list[Message] = []  # what it has sent
        self._notes: list[bytes] = []
        self._size = 0
        self._keeps = _is_repeated(scope)
        self._digest = blake2b(digest_size=16)
        self._sent_at = self._began

    @property
    def continuable(self) -> bool:
        """Whether another router can give the rest of the answer."""
        return self._keeps and (not self.started or (self.streams_events and bool(self._notes)))

    @property
    def progress(self) -> tuple[int, int]:
        """What has come so far; grows."""
        return self.sent, len(self._notes)

    @property
    def digest(self) -> bytes:
        """Of all bytes of the body that the client has."""
        return self._digest.digest()

    def scope_of(self, again: bool) -> Scope:
        """Return the scope for a router. again: it is not the first that gets the request."""
        scope = {**self._scope, "headers": list(self._scope["headers"])}
        if again:
            scope[CONTINUES] = {NOTES: list(self._notes), ELAPSED: self._loop.time() - self._began}
        return scope

    def asked(self) -> list[Message]:
        """Return what the client has sent so far."""
        return list(self._asked)

    def arriving(self) -> asyncio.Future[Message]:
        """Return what ends with the client's next message; `take_in` it then."""
        if self._arriving is None:
            self._arriving = asyncio.ensure_future(self._receive())
        return self._arriving

    def take_in(self) -> Message:
        """Return the message that has arrived."""
        message, self._arriving = self.arriving().result(), None
        if message["type"] == "http.disconnect":
            self.over = True
        elif self._keep(len(message.get("body", b"")) + OF_MESSAGE):
            self._asked.append(message)
        return message

    def keep(self, note: bytes) -> None:
        """Keep what a router told of the answer."""
        if self._keep(len(note) + OF_NOTE):
            self._notes.append(note)

    async def pass_on(self, message: Message) -> None:
        """Send to the client; one that stalls for too long has left, as far as the others can see."""
        self.started = True
        if message["type"] == "http.response.body":
            body = message.get("body", b"")
            self.last = body or self.last
            self.sent += len(body)
            self._digest.update(body)
            self.over |= not message.get("more_body", False)
        await self._send_in_time(message)

    async def comment(self) -> None:
        """Show a client of a stream that has waited for a while that its connection lives."""
        if self.streams_events and self._loop.time() - self._sent_at >= QUIET:
            await self._send_in_time({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def _send_in_time(self, message: Message) -> None:
        try:
            async with asyncio.timeout(STALLED):
                await self._send(message)
        except TimeoutError:
            self.over = self.stalled = True
        self._sent_at = self._loop.time()

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than the client does."""
        arriving = self.arriving()
        await asyncio.wait((arriving,), timeout=seconds)
        if arriving.done():
            self.take_in()

    def close(self) -> None:
        """Wait for nothing more, and keep nothing."""
        if self._arriving is not None:
            self._arriving.cancel()
        self._forget()

    def _keep(self, size: int) -> bool:
        if not self._keeps:
            return False
        if self._size + size > MOST_OF_ONE or not self._budget.take(size):
            self._forget()
            return False
        self._size += size
        return True

    def _forget(self) -> None:
        self._budget.give_back(self._size)
        self._size, self._keeps = 0, False
        self._asked.clear()
        self._notes.clear()


class Attempt:
    """One router's answer to an exchange. learning: a 404 of the proxy itself is no answer, for it knows no app yet.

    beats: routers are known to say something now and then. unknown: it was such a 404. wait: seconds that answers may
    wait for another router, as this one says; None = it is of an earlier version, or was lost before it said so.
    heard: whether it has said anything. differs: it made other bytes than those that the client has. silent: it was
    given up as it said nothing. refused: the error with which it would not go on with an answer that was begun.
    """

    def __init__(self, exchange: Exchange, learning: bool = False, beats: bool = False) -> None:
        self.unknown = False
        self.differs = False
        self.silent = False
        self.refused: dict[str, Any] | None = None
        self.wait: float | None = None
        self._exchange = exchange
        self._learning = learning
        self._beats = beats
        self._loop = asyncio.get_running_loop()
        self._asked = exchange.asked()[::-1]  # what the client sent before, the first one last
        self._head: Message | None = None  # goes to the client with the first of its body
        self._news = self._loop.create_future()  # done when the router is to be told something
        self._believed = True
        self._given_up = self._loop.create_future()
        self.heard = False
        self._quiet = 0
        self._sending = False
        self._behind = exchange.sent if exchange.started else 0  # bytes that the client has already
        self._again = blake2b(digest_size=16)
        self._joins = exchange.started
        self._refusal: bytearray | None = None
        self._unanswered = False
        self._asks = False
        self._taken = self._told = 0
        self._told_at = self._loop.time()

    async def run(self, app: ASGIApp, scope: Scope, until: float | None = None) -> None:
        """Have a router answer; returns when it has, or is lost. until: when it must have said something."""
        task = asyncio.ensure_future(app(scope, self._receive, self._send))
        task.add_done_callback(_look_at)
        try:
            while not await self._ends(task):
                self._quiet += not self._sending  # nothing more is heard while the client reads slowly
                late = not (self.heard or self._sending or until is None or self._loop.time() <= until)
                self.silent = late or (self._beats and self._quiet > LEASE)
                if self.silent and self._exchange.continuable:
                    log.warning("a router says nothing: the request is asked again")
                    return
                if self._joins:
                    await self._exchange.comment()
        finally:
            self._believed = False
            task.cancel()

    async def _ends(self, task: asyncio.Future[None]) -> bool:
        done, _ = await asyncio.wait((task, self._given_up), timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    async def _receive(self) -> Message:
        """Return what the client sends next, or how much it has taken, whichever comes first."""
        exchange = self._exchange
        if self._asked:
            return self._asked.pop()
        arriving = exchange.arriving()
        await asyncio.wait((arriving, self._news), return_when=asyncio.FIRST_COMPLETED)
        if exchange.stalled:
            return {"type": "http.disconnect"}
        if not arriving.done():
            self._news = self._loop.create_future()
            return {"type": TAKEN, "bytes": self._taken}
        return exchange.take_in()

    async def _send(self, message: Message) -> None:
        if not self._believed or self._exchange.stalled:
            return
        self._take_note(message)
        self._quiet, self._sending = 0, True
        if message["type"] == "http.response.start":
            self._start(message)
        elif message["type"] == "http.response.body" and not self._unanswered:
            await self._body(message)
        self._sending = False
        self.heard |= not self._unanswered

    def _take_note(self, message: Message) -> None:
        note, wait = message.pop(KEPT, None), message.pop(ROUTER_WAIT, None)
        if note is not None:
            self._exchange.keep(note)
        if wait is not None:
            self._beats, self.wait = True, wait

    def _start(self, message: Message) -> None:
        exchange = self._exchange
        self._asks = message.pop(ASKS_TAKEN, False)
        kind, status = Headers(raw=message["headers"]).get("content-type", ""), message["status"]
        plain = kind.startswith("text/plain")  # as Serve's own words are, and no router's
        self.unknown = plain and self._learning and status == 404
        self._unanswered = self.unknown or (plain and status == 503)
        if exchange.started:
            if not self._unanswered and (status != 200 or not kind.startswith("text/event-stream")):
                self._refusal = bytearray()
        elif not self._unanswered:
            message["headers"] = self._with_one_id(message["headers"])
            exchange.streams_events = kind.startswith("text/event-stream")
            self._head = message

    async def _body(self, message: Message) -> None:
        body = message.get("body", b"")
        if self._refusal is not None:
            self._refusal += body
            if not message.get("more_body", False):
                self.refused = _error_of(self._refusal)
            return
        if self._head is not None:
            head, self._head = self._head, None
            await self._pass_on(head)
            if self._exchange.stalled:
                return
        size = len(body)
        if self._behind:
            had, body = body[: self._behind], body[self._behind :]
            self._behind -= len(had)
            self._again.update(had)
            cut = self._behind > 0 and not message.get("more_body", False)
            if cut or (not self._behind and self._again.digest() != self._exchange.digest):
                self.differs, self._believed = True, False
                self._given_up.set_result(None)
                return
            message = {**message, "body": body}
        if body or not message.get("more_body", False) or not self._joins:
            self._joins &= not body
            await self._pass_on(message)
        self._note_taken(size)

    async def _pass_on(self, message: Message) -> None:
        await self._exchange.pass_on(message)
        if self._exchange.stalled:
            self._wake()

    def _note_taken(self, size: int) -> None:
        """Take note of what is at the client, or in buffers of a fixed size on its way there."""
        if not self._asks:
            return
        self._taken += size
        untold, now = self._taken - self._told, self._loop.time()
        if untold >= TELL_BYTES or (untold >= TELL_LEAST and now - self._told_at >= TELL_SECONDS):
            self._told, self._told_at = self._taken, now
            self._wake()

    def _wake(self) -> None:
        if not self._news.done():
            self._news.set_result(None)

    def _with_one_id(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the headers with the id that errors have in their bodies, in place of one that Serve made up."""
        given = [(name.lower(), value) for name, value in headers]
        servers = next((value for name, value in given if name == SERVERS_NAME.encode()), None)
        kept = [one for one in given if one[0] != SERVERS_NAME.encode()]
        if servers is None or self._exchange.named:
            return kept
        self._exchange.shown_id = servers.decode("latin-1")
        return [one for one in kept if one[0] != b"x-request-id"] + [(b"x-request-id", servers)]


def _look_at(task: asyncio.Future[None]) -> None:
    """Log what a proxy failed with; asyncio would tell it as something that nobody looked at."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the proxy failed under a request", exc_info=error)


def _is_repeated(scope: Mapping[str, Any]) -> bool:
    """Whether a request can be asked twice: it has no effect but its answer."""
    path, method = scope["path"][len(scope.get("root_path", "")) :], scope.get("method")
    return method in ("GET", "HEAD") or (method == "POST" and path in REPEATED)


def _error_of(body: bytes | bytearray) -> dict[str, Any]:
    """Return the error of a refusal."""
    try:
        error = json.decode(body)["error"]
    except (DecodeError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
