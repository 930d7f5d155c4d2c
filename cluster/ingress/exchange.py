"""The client's side of one exchange, as the guard keeps it: what was asked, what the client has, what routers said.

It lasts over all routers that answer, one after the other (`cluster.ingress.attempt`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from cluster.accounts.tenant_bytes import TenantBytes
from cluster.admission.deadline import HEADER, timeout_of
from cluster.answer_log import CONTINUES, ELAPSED, KEEPS, NOTES
from cluster.error_forms import COUNT_TOKENS, MESSAGES, form_of
from cluster.errors import ApiError
from cluster.ingress.packed_notes import PackedNotes

STALLED = 600.0  # seconds; a client that takes nothing for so long is taken for gone
MOST_OF_ONE = 32 << 20  # bytes that are kept of one exchange, and of what its routers said, as the next one gets it
MOST_KEPT = 512 << 20  # bytes of all exchanges; what is beyond that is lost with its router
OF_MESSAGE = 256  # bytes that a kept one takes beside its content
QUIET = 5.0  # seconds without a byte for a client that waits for another router, until it gets a comment
END_OF_EVENT = b"\n\n"
COMMENT = b": waiting for another router\n\n"  # source: WHATWG HTML, server-sent events: clients pass over it
DEADLINE = "gateway.deadline"  # key of the scope, for this process alone: when the client waits no longer
CALL = "squadron.call"  # key of the scope of a call of gRPC: its `method`, `metadata`, `remaining` seconds
REPEATED_CALLS = frozenset({"Generate", "Chat", "Embed", "GetModelInfo", "Health", "GetLoad"})
KEY_HEADERS = (b"authorization", b"x-api-key", "authorization", "x-api-key")  # of HTTP, and in metadata of gRPC
TIMEOUT_HEADERS = (HEADER.encode(), HEADER)
STREAMS = ("text/event-stream", "application/grpc-web")  # what can be gone on with in the middle
REPEATED = frozenset(  # a POST that has no effect but its answer
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/score",
        "/score",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/invocations",
        MESSAGES,
        COUNT_TOKENS,
        "/tokenize",
        "/detokenize",
    }
)
ENDS_OF_REPEATED = tuple(REPEATED)
log = logging.getLogger(__name__)


class KeptBytes:
    """What all exchanges of a process keep, each client within its share. lost: exchanges that had no room.

    A client goes by the key that it sends, else by its address: a gateway knows no tenants.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.lost = 0
        self._bytes = TenantBytes(most, self._evict)
        self._exchanges: dict[str, dict[Exchange, None]] = {}

    def take(self, exchange: Exchange, size: int) -> bool:
        """Count `size` more bytes of an exchange, negative ones too; one that finds no room is to keep nothing.

        Room for it may be made of its own: it is the largest of its client.
        """
        if size > 0 and (exchange.num_kept + size > MOST_OF_ONE or not self._bytes.make_room(exchange.client, size)):
            return False
        if size > 0 and exchange.lost:
            return False
        self._bytes.take(exchange.client, size)
        return True

    def add(self, exchange: Exchange) -> None:
        """Take note of an exchange that keeps something."""
        self._exchanges.setdefault(exchange.client, {})[exchange] = None

    def remove(self, exchange: Exchange) -> None:
        """Forget an exchange."""
        mine = self._exchanges.get(exchange.client, {})
        mine.pop(exchange, None)
        if not mine:
            self._exchanges.pop(exchange.client, None)

    def _evict(self, client: str) -> bool:
        """Have the largest exchange of a client keep nothing any more."""
        largest = max(self._exchanges.get(client, ()), key=lambda one: one.num_kept, default=None)
        if largest is None or not largest.num_kept:
            return False
        largest.lose()
        return True


class Exchange:
    """The client's side of one exchange, which lasts over all routers that answer it.

    over: answered to the end, or the client is gone. started: whether the client has the head of an answer. kind: its
    content type. last: what of the body came last. between_events: whether what was sent of a stream ends an event,
    so that another one may follow. sent: bytes of the body that the client has or that are
    on their way to it. shown_id: the router's id of the answer, where the answer shows that one. named: whether the
    client has a name of its own for the request. error_form: of the route. client: who shares room for what is kept.
    num_kept: bytes that are kept of it. lost: whether there was no room for it, so that it ends with its router.
    deadline: when the client waits no longer, on the event loop's clock; None = it has not said so.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, kept: KeptBytes, named: bool) -> None:
        self.over = False
        self.started = False
        self.kind = ""
        self.last = b""
        self.between_events = True
        self.sent = 0
        self.shown_id: str | None = None
        self.stalled = False
        self.named = named
        self.error_form = form_of(scope)
        self.client = _client_of(scope)
        self.num_kept = 0
        self.lost = False
        self._scope = dict(scope)
        self._receive = receive
        self._send = send
        self._kept = kept
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        timeout = _timeout_of(scope)
        self.deadline = None if timeout is None else self._began + timeout
        self._arriving: asyncio.Future[Message] | None = None  # what the client sends next
        self._asked: list[Message] = []  # what it has sent
        self._notes = PackedNotes()
        self._keeps = _is_repeated(scope)
        self._name = secrets.token_hex(16)
        self._digest = blake2b(digest_size=16)
        self._sent_at = self._began

    @property
    def keeps(self) -> bool:
        """Whether another router could be asked what was asked."""
        return self._keeps

    @property
    def continuable(self) -> bool:
        """Whether another router can give the rest of the answer."""
        return self._keeps and (not self.started or (self.kind in STREAMS and self._notes.count > 0))

    @property
    def prefix(self) -> str | None:
        """What its path has before that of the API; None where it has none of that."""
        path: str = self._scope["path"]
        before, of_api, _ = path.partition("/v1/")
        if of_api:
            return before
        return next((path.removesuffix(end) for end in ENDS_OF_REPEATED if path.endswith(end)), None)

    @property
    def streams_events(self) -> bool:
        """Whether the answer is a stream of server-sent events."""
        return self.kind == STREAMS[0]

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        return self.deadline is not None and self._loop.time() >= self.deadline

    @property
    def progress(self) -> tuple[int, int]:
        """What has come so far; grows."""
        return self.sent, self._notes.count

    @property
    def digest(self) -> bytes:
        """Of all bytes of the body that the client has."""
        return self._digest.digest()

    def scope_of(self, again: bool) -> Scope:
        """Return the scope for a router. again: it is not the first that gets the request."""
        scope = {**self._scope, "headers": list(self._scope["headers"]), KEEPS: self._name if self._keeps else ""}
        scope[DEADLINE] = self.deadline
        if again:
            scope[CONTINUES] = {NOTES: self._notes.notes(), ELAPSED: self._loop.time() - self._began}
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
        if self._keeps:
            before = self._notes.size
            self._notes.add(note)
            if self._notes.length > MOST_OF_ONE:  # the next router would be given more than a message may have
                self.lose()
            self._keep(self._notes.size - before)

    async def pass_on(self, message: Message) -> None:
        """Send to the client; one that stalls for too long has left, as far as the others can see."""
        self.started = True
        if message["type"] == "http.response.body":
            body = message.get("body", b"")
            if body:
                self.between_events = (self.last[-1:] + body).endswith(END_OF_EVENT)
                self.last = body
            self.sent += len(body)
            self._digest.update(body)
            self.over |= not message.get("more_body", False)
        await self._send_in_time(message)

    async def comment(self) -> None:
        """Show a client of a stream that has waited for a while that its connection lives."""
        if self.streams_events and self.between_events and self._loop.time() - self._sent_at >= QUIET:
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
        if self.deadline is not None:
            seconds = max(0.0, min(seconds, self.deadline - self._loop.time()))
        await asyncio.wait((arriving,), timeout=seconds)
        if arriving.done():
            self.take_in()

    def close(self) -> None:
        """Wait for nothing more, and keep nothing."""
        if self._arriving is not None:
            self._arriving.cancel()
        self._forget()

    def lose(self) -> None:
        """Keep nothing any more: there is no room, and the answer ends with its router."""
        if self.lost:
            return
        self._kept.lost += 1
        if self._kept.lost & (self._kept.lost - 1) == 0:  # each time that they have doubled
            log.warning("no room to keep a request beside its router: %d so far end with theirs", self._kept.lost)
        self.lost = True
        self._forget()

    def _keep(self, size: int) -> bool:
        if not self._keeps:
            return False
        if not self._kept.take(self, size):
            self.lose()
            return False
        if not self.num_kept:
            self._kept.add(self)
        self.num_kept += size
        return True

    def _forget(self) -> None:
        self._kept.take(self, -self.num_kept)
        self._kept.remove(self)
        self.num_kept, self._keeps = 0, False
        self._asked.clear()
        self._notes.clear()


def _client_of(scope: Mapping[str, Any]) -> str:
    """Return what tells clients apart: a digest of their key, or their address."""
    key = next((value for name, value in _given(scope) if name in KEY_HEADERS), None)
    if key is None:
        return str((scope.get("client") or ("",))[0])
    return blake2b(key.encode() if isinstance(key, str) else key, digest_size=16).hexdigest()


def _given(scope: Mapping[str, Any]) -> Iterable[tuple[bytes | str, bytes | str]]:
    """Return the headers of a request, or the metadata of a call."""
    return scope[CALL]["metadata"] if CALL in scope else scope.get("headers", ())


def _timeout_of(scope: Scope) -> float | None:
    """Return the seconds that the client waits, None where it does not say so, or in words that a router refuses."""
    values = [value for name, value in _given(scope) if name in TIMEOUT_HEADERS]
    try:
        return timeout_of([value.decode("latin-1") if isinstance(value, bytes) else value for value in values])
    except ApiError:
        return None


def _is_repeated(scope: Mapping[str, Any]) -> bool:
    """Whether a request can be asked twice: it has no effect but its answer.

    Before its path there may be a prefix (`--root-path`), which is known to the routers alone.
    """
    if CALL in scope:
        return scope[CALL]["method"].rpartition("/")[2] in REPEATED_CALLS
    method = scope.get("method")
    return method in ("GET", "HEAD") or (method == "POST" and scope["path"].endswith(ENDS_OF_REPEATED))
