"""One router's answer to an exchange, on its way to the client.

Each router makes the answer from its beginning, in the same bytes; what the client has already is dropped here, after
a look at whether it is the same. A router that says nothing for a while is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from msgspec import DecodeError, json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from cluster.answer_log import ASKS, KEPT, LEASE, LETS_GO, LISTENS, NO_ROUTER, ROUTER_WAIT, TICK, UNKEPT
from cluster.client_id import SERVERS_NAME
from cluster.ingress.exchange import Exchange

ASKS_TAKEN = "squadron.tell_taken"  # beside the status of an answer whose router asks for the next
TAKEN = "squadron.taken"  # type of the message that reports what the client has taken: `bytes` of the body, so far
TELL_BYTES = 1 << 18  # after so many it is reported, or
ROUTER_WAIT_UNTOLD = 60.0  # seconds; before a router has said how long its answers may wait for another one
TELL_LEAST, TELL_SECONDS = 1 << 15, 5.0  # after these, when the last report is so long ago
log = logging.getLogger(__name__)


@dataclass
class Habits:
    """What is known of a guard's routers. beats: they say something now and then. alone: nobody else answers.

    wait: seconds that an answer may wait for another router, as they say.
    """

    beats: bool
    alone: bool
    wait: float = ROUTER_WAIT_UNTOLD


class Attempt:
    """One router's answer to an exchange. learning: a 404 of the proxy itself is no answer, for it knows no app yet.

    habits: of the routers; this one's are added to them. unknown: it was such a 404. heard: whether it has said
    anything. differs: it made other bytes than those that the client has. silent: it was given up as it said
    nothing. let_go: it leaves, as was planned. refused: the error with which it would not go on with an answer that
    was begun.
    """

    def __init__(self, exchange: Exchange, habits: Habits, learning: bool = False) -> None:
        self.unknown = False
        self.differs = False
        self.silent = False
        self.let_go = False
        self.refused: dict[str, Any] | None = None
        self._exchange = exchange
        self._learning = learning
        self._habits = habits
        self._loop = asyncio.get_running_loop()
        self._asked = exchange.asked()[::-1]  # what the client sent before, the first one last
        self._head: Message | None = None  # goes to the client with the first of its body
        self._news = self._loop.create_future()  # done when the router is to be told something
        self._told_lost = not exchange.keeps
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
        self._asked_at: float | None = None  # when the router asked whether it was left, until it is told
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
                beats = self._habits.beats and (self._habits.alone or self._exchange.of_api)
                self.silent = late or (beats and self._quiet >= LEASE)
                if self.silent:
                    log.warning("a router says nothing: it is left")
                    return
                if self._exchange.lost and not self._told_lost:
                    self._wake()
                if self._joins:
                    await self._exchange.comment()
        finally:
            self._believed = False
            task.cancel()

    async def _ends(self, task: asyncio.Future[None]) -> bool:
        done, _ = await asyncio.wait((task, self._given_up), timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    async def _receive(self) -> Message:
        """Return what comes first: of the client, how much it has taken, or that the router is believed."""
        exchange = self._exchange
        if self._asked:
            return self._asked.pop()
        arriving = exchange.arriving()
        await asyncio.wait((arriving, self._news), return_when=asyncio.FIRST_COMPLETED)
        if exchange.stalled:
            return {"type": "http.disconnect"}
        if self._asked_at is not None:
            message, self._asked_at = {"type": LISTENS, "asked_at": self._asked_at}, None
            return message
        if exchange.lost and not self._told_lost:
            self._told_lost = True
            return {"type": UNKEPT}
        if not arriving.done():
            self._news = self._loop.create_future()
            return {"type": TAKEN, "bytes": self._taken}
        return exchange.take_in()

    async def _send(self, message: Message) -> None:
        if not self._believed or self._exchange.stalled:
            return
        self._quiet = 0
        if message["type"] == NO_ROUTER:
            return
        self._take_note(message)
        self._sending = True
        if message["type"] == "http.response.start":
            self._start(message)
        elif message["type"] == "http.response.body" and not self._unanswered:
            await self._body(message)
        self._sending = False
        self.heard |= not self._unanswered

    def _take_note(self, message: Message) -> None:
        note, wait, asked_at = message.pop(KEPT, None), message.pop(ROUTER_WAIT, None), message.pop(ASKS, None)
        self.let_go |= message.pop(LETS_GO, False)
        if note is not None:
            self._exchange.keep(note)
        if asked_at is not None:
            self._asked_at = asked_at
            self._wake()
        if wait is not None:
            self._habits.beats, self._habits.wait = True, wait

    def _start(self, message: Message) -> None:
        exchange = self._exchange
        self._asks = message.pop(ASKS_TAKEN, False)
        kind = Headers(raw=message["headers"]).get("content-type", "").partition(";")[0]
        status = message["status"]
        plain = kind == "text/plain"  # as Serve's own words are, and no router's
        self.unknown = plain and self._learning and status == 404
        self._unanswered = self.unknown or (plain and status == 503)
        if exchange.started:
            if not self._unanswered and (status != 200 or kind != exchange.kind):
                self._refusal = bytearray()
        elif not self._unanswered:
            message["headers"] = self._with_one_id(message["headers"])
            exchange.kind = kind
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


def _error_of(body: bytes | bytearray) -> dict[str, Any]:
    """Return the error of a refusal."""
    try:
        error = json.decode(body)["error"]
    except (DecodeError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}
