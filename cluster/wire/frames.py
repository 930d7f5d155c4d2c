"""Frames over one TCP connection, on the event loop's own thread, and who listens for them.

The server takes a secret of its own making, in a first frame that is short and due within seconds; a stranger on the
port is told `unauthenticated` and nothing else. A peer that vanishes without a word is noticed by who uses the
connection, by what the peer says every second or so.

A frame is four bytes of length, then the message. The length's high bit marks a goodbye: it carries "code: message"
and is the last frame. A connection that ends without one was lost.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import cast

from cluster.wire.link import (
    CLOSED,
    DAMAGED,
    LOST,
    OTHER_PROTOCOL,
    REFUSED,
    SLOW_CONSUMER,
    FramePipe,
    LinkAddress,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    MessageTooLargeError,
    OtherProtocolError,
)

logger = logging.getLogger(__name__)

GREETING = b"squadron "  # followed by the secret
GREETING_BYTES = 1024  # longest frame before the handshake is done
MOST_UNKNOWN = 64  # connections before the handshake; beyond that the oldest is closed, if it has had its time,
PROMPT = 1.0  # which is so many seconds: peers may come by the hundred at once,
MOST_AT_ALL = 2048  # but not more
HELLO_TIMEOUT = 5.0  # seconds for the first words of either side
HEADER = 4  # bytes
GOODBYE = 1 << 31
INBOX_MARK = 4 * 2**20  # bytes read and not taken from which on no more is read
LINGER = 1.0  # seconds that a closing connection gives the peer to take what was sent


class FrameStream(asyncio.Protocol):
    """One connection. What the kernel does not take waits here, up to `max_waiting` bytes; then the peer is cut off.

    max_frame: longest frame that may be sent. max_received: longest that is accepted; a server keeps it small until
    it knows whom it talks to.
    """

    def __init__(self, max_waiting: int, max_frame: int, max_received: int) -> None:
        self.max_received = max_received
        self.ended: LinkClosedError | None = None  # why the connection is over for this end
        self.over = asyncio.Event()  # the socket is closed
        self._max_frame = max_frame
        self._max_waiting = max_waiting
        self._inbox = FramePipe(INBOX_MARK + 2 * max_frame + 2**20, max_frame)
        self._received = bytearray()
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._kernel_takes = True
        self._reading_paused = False
        self._transport: asyncio.Transport | None = None
        self._roomy = asyncio.Event()  # set while the kernel takes more, and when it never will again
        self._roomy.set()

    @property
    def is_connected(self) -> bool:
        """Whether it has had a socket."""
        return self._transport is not None

    @property
    def closed(self) -> bool:
        """Whether this end said or heard goodbye, or the connection broke."""
        return self.ended is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over a new connection (called by asyncio)."""
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self.ended is not None:  # turned away before asyncio came to it
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Cut what arrived into frames (called by asyncio)."""
        if self.ended is not None:
            return
        received = self._received
        received += data
        at = 0
        while self.ended is None and len(received) - at >= HEADER:
            head = int.from_bytes(received[at : at + HEADER], "big")
            length = head & ~GOODBYE
            if length > self.max_received:
                self.close(DAMAGED, f"a frame of {length} bytes is longer than {self.max_received}")
                break
            if len(received) - at < HEADER + length:
                break
            frame = bytes(received[at + HEADER : at + HEADER + length])
            at += HEADER + length
            if head >= GOODBYE:
                self._hear_goodbye(frame)
            else:
                self._inbox.put(frame)
        del received[:at]
        if self._inbox.waiting_bytes > INBOX_MARK and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the connection (called by asyncio)."""
        self._end(LOST, f"the connection broke{f': {exc}' if exc else ''}")
        self._backlog.clear()
        self.over.set()

    def pause_writing(self) -> None:
        """Keep frames here from now on (called by asyncio)."""
        self._kernel_takes = False
        if self.ended is None:
            self._roomy.clear()

    def resume_writing(self) -> None:
        """Pass on what waited (called by asyncio)."""
        self._kernel_takes = True
        while self._backlog and self._kernel_takes and self._transport is not None:
            frame = self._backlog.popleft()
            self._backlog_bytes -= len(frame)
            self._transport.write(frame)
        if self._kernel_takes:
            self._roomy.set()
        if self.ended is not None and not self._backlog and self._transport is not None:
            self._transport.close()

    def send(self, frame: bytes) -> None:
        """Send one frame, now or when the kernel takes it. Raises `LinkClosedError` and `MessageTooLargeError`."""
        if self.ended is not None:
            raise LinkClosedError(self.ended.code, self.ended.message)
        if len(frame) > self._max_frame:
            raise MessageTooLargeError(f"a message of {len(frame)} bytes exceeds the link's {self._max_frame}")
        if self._backlog_bytes + len(frame) > self._max_waiting:
            message = f"more than {self._max_waiting} bytes wait for the peer"
            self._backlog.clear()
            self.close(SLOW_CONSUMER, message)
            raise LinkClosedError(SLOW_CONSUMER, message)
        self._write(len(frame).to_bytes(HEADER, "big") + frame)

    @property
    def is_full(self) -> bool:
        """Whether what is sent now waits here for the kernel."""
        return not self._roomy.is_set()

    async def room(self) -> None:
        """Return once the kernel takes what was sent, or the connection is over. Any number may wait."""
        await self._roomy.wait()

    async def receive(self) -> bytes:
        """Return the next frame, one caller at a time. Raises `LinkClosedError`."""
        frame = await self._inbox.get()
        if self._reading_paused and self._inbox.waiting_bytes <= INBOX_MARK // 2 and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()
        return frame

    def close(self, code: str = CLOSED, message: str = "", discard: bool = True) -> None:
        """Say goodbye after what was sent, and close when the peer has taken it, or soon. Can be called twice.

        discard: what has come and was not taken; else it can still be taken.
        """
        if self.ended is not None:
            return
        text = f"{code}: {message}".encode()[: self._max_frame]
        self._end(code, message)
        self._inbox.close(code, message, discard=discard)
        if self._transport is not None and not self._transport.is_closing():
            self._write((GOODBYE | len(text)).to_bytes(HEADER, "big") + text)
            self._shut(self._transport)

    def _hear_goodbye(self, frame: bytes) -> None:
        code, _, message = frame.decode(errors="replace").partition(": ")
        self._end(code, message)
        self._backlog.clear()
        if self._transport is not None:
            self._shut(self._transport)

    def _shut(self, transport: asyncio.Transport) -> None:
        if not self._backlog:
            transport.close()
        asyncio.get_running_loop().call_later(LINGER, transport.abort)

    def _write(self, data: bytes) -> None:
        if self._kernel_takes and self._transport is not None:
            self._transport.write(data)
        else:
            self._backlog.append(data)
            self._backlog_bytes += len(data)

    def _end(self, code: str, message: str) -> None:
        if self.ended is None:
            self.ended = LinkClosedError(code, message)
        self._inbox.close(code, message)
        self._roomy.set()


async def open_stream(address: LinkAddress, limits: LinkLimits) -> FrameStream:
    """Connect to a `FrameServer` and send its secret. Raises `OSError`; give it a time limit."""
    stream = FrameStream(limits.max_up_bytes, limits.max_message_bytes, limits.max_message_bytes)
    try:
        await asyncio.get_running_loop().create_connection(lambda: stream, address.host, address.port)
        stream.send(GREETING + address.secret.encode())
    except BaseException:
        stream.close()
        raise
    return stream


class FrameServer:
    """Listens; `serve(stream)` is awaited once for each connection that knows the secret. what: it is, in errors."""

    def __init__(
        self, serve: Callable[[FrameStream], Awaitable[None]], limits: LinkLimits | None = None, what: str = "server"
    ) -> None:
        self._serve = serve
        self._what = what
        self._limits = limits or LinkLimits()
        self._secret = secrets.token_urlsafe(32)
        self._greeting = GREETING + self._secret.encode()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], FrameStream] = {}
        self._unknown: OrderedDict[FrameStream, float] = OrderedDict()  # when each came

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> LinkAddress:
        """Listen and return the address that peers need; port 0 lets the system choose."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port)
        return LinkAddress(host, self._server.sockets[0].getsockname()[1], self._secret)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening)
            # Once it is closed asyncio makes no transport of what it has just accepted, and tells nobody.
            await asyncio.sleep(0)
            self._server.close()
        for stream in self._connections.values():
            stream.close(CLOSED, f"the {self._what} stops")
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self) -> FrameStream:
        limits = self._limits
        stream = FrameStream(limits.max_down_bytes, limits.max_message_bytes, GREETING_BYTES)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run(stream))
        self._connections[task] = stream
        self._unknown[stream] = loop.time()
        oldest, came = next(iter(self._unknown.items()))
        late = loop.time() - came > PROMPT
        if len(self._unknown) > (MOST_UNKNOWN if late else MOST_AT_ALL):
            del self._unknown[oldest]
            oldest.close(REFUSED, "unauthenticated, and too many others are")
        task.add_done_callback(self._connections.pop)
        return stream

    async def _run(self, stream: FrameStream) -> None:
        try:
            greeting = await asyncio.wait_for(stream.receive(), HELLO_TIMEOUT)
            if not hmac.compare_digest(greeting, self._greeting):
                raise LinkRefusedError("unauthenticated: wrong or missing secret")
            stream.max_received = self._limits.max_message_bytes
            self._unknown.pop(stream, None)
            await self._serve(stream)
        except TimeoutError:
            stream.close(REFUSED, f"the first message must come within {HELLO_TIMEOUT:g} s")
        except LinkRefusedError as error:
            stream.close(OTHER_PROTOCOL if isinstance(error, OtherProtocolError) else REFUSED, str(error))
        except LinkClosedError:
            return  # gone before it said who it is, or while it was served
        except Exception:
            logger.exception("a link could not be served")
            stream.close(DAMAGED, "the link could not be served")
        finally:
            self._unknown.pop(stream, None)
            stream.close(CLOSED, f"the {self._what} serves the link no more")
            if stream.is_connected:
                await stream.over.wait()
