"""What a connection to Serve's own proxy may take before a request is there: time, bytes, and other connections.

uvicorn, which the proxy runs, waits for headers without end and keeps any number of them. The limits here are those
of HAProxy: 408 after 20 s without whole headers, 431 beyond 101 of them or 16 kB. Where 4,096 connections are open,
or 2,048 of one address, the longest idle ones are closed for the next; 503 where none is idle. Bodies have limits of
their own, in the app (`cluster.http.asgi`).
"""

from __future__ import annotations

import asyncio
from heapq import nsmallest
from http import HTTPStatus
from typing import Any

from msgspec import json
from typing_extensions import override
from uvicorn import config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.config_values import MAX_CONNECTIONS
from cluster.errors import ApiError

HEADERS_TIMEOUT = 20.0  # seconds from the connection, or from a request's first byte, to the last of its headers
MAX_HEADERS = 101
MAX_HEAD_BYTES = 16 << 10  # of request line and headers
CLOSED_AT_ONCE = 32  # idle connections, so that not each new one looks at all
MAX_AHEAD = 16  # requests that a client may send before the answer to the one before them is out
_CODES = {408: "request_timeout", 431: "headers_too_large", 503: "overloaded"}


def bound_http() -> None:
    """Have every uvicorn server that this process starts from now on keep these limits."""
    config.HTTP_PROTOCOLS["auto"] = f"{BoundedHttp.__module__}:{BoundedHttp.__name__}"


class HeadTooLarge(Exception):
    """A request has more headers, or longer ones, than are taken."""


class TooFarAhead(Exception):
    """A client sends more requests than are kept while an answer is under way."""


class BoundedHttp(HttpToolsProtocol):
    """One connection of a client. Of a request that is refused here the app hears nothing."""

    transport: Any

    def __init__(self, *args: Any, max_connections: int = MAX_CONNECTIONS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._idle_since = self.loop.time()
        self._too_late: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0  # that came while headers were awaited
        self._fields = 0
        self._field_bytes = 0

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._finds_room():
            most = self._max_connections
            held = f"{most} connections are held at most, {most // 2} of one address (--max-connections of gateways)"
            self._refuse(503, f"{held}, and none is idle: try again")
            return
        self._await_headers()

    def _finds_room(self) -> bool:
        """Close the longest idle connections where there are too many of this one's address, or of all."""
        most = self._max_connections // 2
        if len(self.connections) <= most:
            return True
        everyone = [one for one in self.connections if isinstance(one, BoundedHttp)]
        mine = [one for one in everyone if one._host == self._host]
        crowd = mine if len(mine) > most else everyone if len(everyone) > self._max_connections else []
        idle = [one for one in crowd if one is not self and one._idle and not one.transport.is_closing()]
        for one in nsmallest(min(CLOSED_AT_ONCE, most), idle, key=lambda one: one._idle_since):
            one.transport.close()
        return bool(idle) or not crowd

    @property
    def _host(self) -> str:
        return self.client[0] if self.client else ""

    @override
    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self.transport.is_closing():
            return
        # A header that has not ended yet lies in the parser, where it is not counted.
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._idle and self.timeout_keep_alive_task is None and self._too_late is None:
            # Empty lines, or what is left of a body whose answer is out: uvicorn stopped its own clock for them.
            self._await_headers()

    @override
    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_AHEAD:  # a request of 18 bytes takes 1.1 kB until its turn comes
            raise TooFarAhead
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._fields = self._field_bytes = 0
        if self._too_late is None:
            self._await_headers()

    @override
    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; those that follow a chunked body come here too."""
        self._fields += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refused, or what was refused here while it parsed.

        While an answer to another request is under way this one would stand in its middle: then it is cut.
        """
        if not self._idle:
            self._stop_timer()
            self.transport.close()
        elif self._over():
            self._refuse_head()
        else:
            super().send_400_response(msg)

    @property
    def _idle(self) -> bool:
        """Whether no answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _count(self, size: int) -> None:
        self._field_bytes += size
        if self._over():
            raise HeadTooLarge  # ends the parser's work; uvicorn then sends a 400

    def _over(self) -> bool:
        return self._fields > MAX_HEADERS or self._field_bytes > MAX_HEAD_BYTES

    def _await_headers(self) -> None:
        self._too_late = self.loop.call_later(HEADERS_TIMEOUT, self._refuse_late)

    def _stop_timer(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _refuse_late(self) -> None:
        self._too_late = None
        if not self._idle:  # the next request may take its time while the answer to this one is under way
            self._await_headers()
            return
        self._refuse(408, f"the headers of a request did not arrive in {HEADERS_TIMEOUT:g} s")

    def _refuse_head(self) -> None:
        self._refuse(431, f"a request has {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes of them at most")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, where no answer to another request is under way, and close."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self._idle:
            error = ApiError(_CODES[status], message, status=status)
            body = json.encode(error.body())
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            if error.retry_after is not None:
                head += f"retry-after: {error.retry_after}\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
