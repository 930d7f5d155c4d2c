"""One HTTP/1.1 exchange read byte by byte, and whether what came is whole as the protocol sees it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

READ_BYTES = 65536


@dataclass
class Exchange:
    """What a client has of its answer.

    framed: the body is complete by its own framing (Content-Length or the last chunk). ended: `time.monotonic()` of
    the last byte or the end of the connection; None = it hung.
    """

    status: int = 0
    body: bytes = b""
    framed: bool = False
    ended: float | None = None
    _raw: bytes = field(default=b"", repr=False)

    @property
    def error(self) -> dict[str, Any] | None:
        """The typed error: of a whole refusal, or of the last event."""
        last = self.body.rstrip().rpartition(b"\ndata: ")[2].removeprefix(b"data: ")  # a text may hold it, too
        try:
            error = json.loads(last)["error"]
        except (ValueError, KeyError, TypeError):
            return None
        return error if isinstance(error, dict) else None

    def take(self, data: bytes) -> None:
        """Add what was received."""
        self._raw += data
        head, blank, rest = self._raw.partition(b"\r\n\r\n")
        if not blank:
            return
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.status = int(lines[0].split()[1])
        if headers.get("transfer-encoding") == "chunked":
            self.body, self.framed = _dechunked(rest)
        elif "content-length" in headers:
            self.body, self.framed = rest, len(rest) == int(headers["content-length"])
        else:
            self.body = rest  # ends with the connection, so that nobody can tell that it is whole


def _dechunked(rest: bytes) -> tuple[bytes, bool]:
    body = b""
    while True:
        size, line_end, rest = rest.partition(b"\r\n")
        if not line_end:
            return body, False
        length = int(size, 16)
        if length == 0:
            return body, rest == b"\r\n"
        body += rest[:length]
        if len(rest) < length + 2:
            return body, False
        rest = rest[length + 2 :]


async def post(
    port: int,
    path: str,
    asked: dict[str, Any],
    on_data: Callable[[], None] = lambda: None,
    key: str | None = None,
    timeout: float = 60,
) -> Exchange:
    """Ask and read to the end, whatever end that is. A connection that is refused or reset is an end too."""
    body = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n"
    head += f"Authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
    exchange = Exchange()
    try:
        async with asyncio.timeout(timeout):
            await _exchange(port, head.encode() + body, exchange, on_data)
    except TimeoutError:
        return exchange
    except ConnectionError:
        pass
    exchange.ended = time.monotonic()
    return exchange


async def _exchange(port: int, request: bytes, exchange: Exchange, on_data: Callable[[], None]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        while not exchange.framed and (data := await reader.read(READ_BYTES)):
            exchange.take(data)
            on_data()
    finally:
        writer.close()


async def stalled(
    port: int, asked: dict[str, Any], prefix: str = "", key: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream of completions on a connection whose client reads nothing, and whose kernel takes little."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    body = json.dumps(asked | {"stream": True}).encode()
    head = f"POST {prefix}/v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def last_error(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[str, Any]:
    """Read on to the end of a chunked stream of events and return the error that is its last one."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    tail = b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        some = await asyncio.wait_for(reader.read(READ_BYTES), 60)
        assert some, f"the connection was closed after {tail!r}"
        tail = (tail + some)[-4096:]
    error: dict[str, Any] = json.loads(tail.rpartition(b"\ndata: ")[2].partition(b"\n\n")[0])["error"]
    return error
