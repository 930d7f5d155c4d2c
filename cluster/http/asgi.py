"""The few things of HTTP that endpoints need, straight on ASGI: bounded bodies, answers, clients that hang up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

from msgspec import json
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from cluster.admission.deadline import deadline_exceeded
from cluster.error_forms import OPENAI_FORM, ErrorForm, error_of
from cluster.errors import ApiError
from engine.scheduler.scheduler import DEADLINE_EXCEEDED

BODY_TIMEOUT = 60.0  # seconds for a client to send its body
READ_PATIENCE = 60.0  # seconds; a client that takes nothing for one to two such spans is taken for gone
_MAX_MESSAGE = 1000  # characters of an error message; clients may have put megabytes into what it quotes
_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # reverse proxies must pass each event on at once
)


class ClientGone(Exception):
    """The client disconnected: no answer can be sent."""


class ClientStalled(Exception):
    """The client holds its connection and reads no more."""


async def read_body(scope: Scope, receive: Receive, limit: int, deadline: float | None = None) -> bytes:
    """Return the request body; raises `ApiError` 413 before more than `limit` bytes are held, 415 for other types.

    deadline: of the whole request, on the event loop's clock (`deadline_exceeded`).
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("unsupported_media_type", f"Content-Type must be application/json, not {kind[:100]}")
    refuse_encoded(headers)
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    latest = asyncio.get_running_loop().time() + BODY_TIMEOUT
    try:
        async with asyncio.timeout_at(latest if deadline is None else min(latest, deadline)):
            return await _read(receive, limit)
    except TimeoutError:
        raise _too_late(deadline, latest, f"the body did not arrive in {BODY_TIMEOUT:g} s") from None


async def body_blocks(
    receive: Receive, block_bytes: int, timeout: float, deadline: float | None = None
) -> AsyncIterator[bytes]:
    """Yield a body in blocks of about `block_bytes`; no more than one is held.

    timeout: seconds for all of it; and none of its parts may take longer than `BODY_TIMEOUT`. deadline: as in
    `read_body`.
    """
    clock = asyncio.get_running_loop().time
    last, held, more = clock() + timeout, bytearray(), True
    while more:
        latest = min(last, clock() + BODY_TIMEOUT)
        try:
            async with asyncio.timeout_at(latest if deadline is None else min(latest, deadline)):
                part, more = await _part(receive)
        except TimeoutError:
            raise _too_late(deadline, latest, "the body arrives too slowly") from None
        held += part
        if held and (len(held) >= block_bytes or not more):
            yield bytes(held)
            held.clear()


def refuse_encoded(headers: Headers) -> None:
    """Raise `ApiError` (415) for a compressed body."""
    if headers.get("content-encoding", "identity") != "identity":
        raise ApiError("unsupported_media_type", "send the body without Content-Encoding")


def _too_late(deadline: float | None, latest: float, otherwise: str) -> ApiError:
    if deadline is not None and deadline < latest:
        return deadline_exceeded("the request's deadline passed before its body was there")
    return ApiError("request_timeout", otherwise, status=408)


async def _read(receive: Receive, limit: int) -> bytes:
    parts, size, more = [], 0, True
    while more:
        part, more = await _part(receive)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """Return the next part of a body, and whether there is more."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone("the client hung up before its request was complete")
    return message.get("body", b""), message.get("more_body", False)


def _too_large(limit: int) -> ApiError:
    return ApiError(
        "body_too_large", f"the request body is larger than {limit} bytes; the server's --max-body-bytes sets this"
    )


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, None], answer: Answer, patience: float = READ_PATIENCE
) -> None:
    """Run `work`, but cancel it when the client hangs up (`ClientGone`) or reads no more (`ClientStalled`).

    Call it after the body was read: from then on the only message a client can send is that it left. It reads no more
    when one and the same send of `answer` was under way at two looks, `patience` seconds apart.
    """
    answer.asked_whole = True
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(disconnected(receive))
    try:
        stuck = None
        while not (await asyncio.wait((task, left), timeout=patience, return_when=asyncio.FIRST_COMPLETED))[0]:
            if stuck is not None and answer.under_way == stuck:
                raise ClientStalled
            stuck = answer.under_way
        if not task.done():
            raise ClientGone("the client hung up before its answer was complete")
        task.result()
    finally:
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Return when the client has hung up, or has its answer to the last byte."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Answer:
    """The response of one exchange: a JSON body, a stream of events or a file, and after either nothing more.

    form: of its errors.
    """

    def __init__(self, send: Send, form: ErrorForm = OPENAI_FORM) -> None:
        self._to_client = send
        self._form = form
        self.status = 0  # 0 until it is decided
        self.is_whole = False  # its last byte is sent, or on its way
        self.asked_whole = False  # all of the request was read: a client can only leave
        self._streaming = False
        self._sends = 0
        self._sending = False

    @property
    def under_way(self) -> int | None:
        """Number of the send that waits for the client to read, None while none does."""
        return self._sends if self._sending else None

    async def json(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send a whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [_JSON, length, *headers])
        await self._send({"type": "http.response.body", "body": body})

    async def file(self, headers: Iterable[tuple[bytes, bytes]], blocks: AsyncIterator[bytes]) -> None:
        """Send a file. headers: its length among them, by which a client knows whether it got all of it."""
        await self._start(200, headers)
        async for block in blocks:
            await self._send({"type": "http.response.body", "body": block, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def events(self, data: bytes) -> None:
        """Send frames of a stream, which starts with the first call; waits while the client reads slowly."""
        if not self._streaming:
            self._streaming = True
            await self._start(200, _EVENTS)
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """Send the last frames of a stream and end it."""
        await self._send({"type": "http.response.body", "body": data})

    async def error(
        self, error: ApiError, headers: Iterable[tuple[bytes, bytes]] = (), patience: float = READ_PATIENCE
    ) -> None:
        """Send the one terminal error: as the answer, or as the last event of a stream that already runs.

        In the middle of a whole answer or a file there is no place for it: the server closes the connection short of
        the length. patience: seconds that sending may take.
        """
        if self.status and not self._streaming:
            return
        error.message = error.message[:_MAX_MESSAGE]
        try:
            async with asyncio.timeout(patience):
                await self._error(error, headers)
        except TimeoutError:
            return  # the server closes the connection of an answer that is not complete

    async def _error(self, error: ApiError, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self._streaming:
            await self.end(self._form.frame(error_of(error)))
            return
        retry = [] if error.retry_after is None else [(b"retry-after", str(error.retry_after).encode())]
        if error.code == DEADLINE_EXCEEDED:
            # OpenAI's clients repeat failed requests by themselves unless a header forbids it: with its time anew.
            retry.append((b"x-should-retry", b"false"))
        await self.json(error.status, json.encode(self._form.body(error_of(error))), [*retry, *headers])

    async def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def _send(self, message: Message) -> None:
        self._sends += 1
        self._sending = True
        self.is_whole = message["type"] == "http.response.body" and not message.get("more_body")
        await self._to_client(message)
        self._sending = False
