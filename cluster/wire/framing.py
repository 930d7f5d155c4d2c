"""Frames over one TCP connection: four bytes of length, then the message. The length's high bit marks a goodbye.

A goodbye carries "code: message" and is the last frame. A connection that ends without one was lost.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import cast

from cluster.wire.link import CLOSED, DAMAGED, LOST, SLOW_CONSUMER, LinkClosedError, MessageTooLargeError
from cluster.wire.pipe import FramePipe

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

    def resume_writing(self) -> None:
        """Pass on what waited (called by asyncio)."""
        self._kernel_takes = True
        while self._backlog and self._kernel_takes and self._transport is not None:
            frame = self._backlog.popleft()
            self._backlog_bytes -= len(frame)
            self._transport.write(frame)
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

    async def receive(self) -> bytes:
        """Return the next frame, one caller at a time. Raises `LinkClosedError`."""
        frame = await self._inbox.get()
        if self._reading_paused and self._inbox.waiting_bytes <= INBOX_MARK // 2 and self._transport is not None:
            self._reading_paused = False
            self._transport.resume_reading()
        return frame

    def close(self, code: str = CLOSED, message: str = "") -> None:
        """Say goodbye after what was sent, and close when the peer has taken it, or soon. Can be called twice."""
        if self.ended is not None:
            return
        text = f"{code}: {message}".encode()[: self._max_frame]
        self._end(code, message)
        self._inbox.close(code, message, discard=True)
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
