"""A bounded queue of frames for one direction of a link, on one event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from cluster.wire.link import SLOW_CONSUMER, LinkClosedError, MessageTooLargeError


class FramePipe:
    """Frames in order; `put` never blocks, and closes the pipe when too many bytes wait.

    max_bytes: bound on what waits; max_frame: bound on one frame.
    """

    __slots__ = ("_ended", "_frames", "_max_bytes", "_max_frame", "_waiter", "_waiting_bytes")

    def __init__(self, max_bytes: int, max_frame: int) -> None:
        self._frames: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._max_bytes = max_bytes
        self._max_frame = max_frame
        self._waiter: asyncio.Future[None] | None = None
        self._ended: LinkClosedError | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait to be taken."""
        return self._waiting_bytes

    def put(self, frame: bytes) -> None:
        """Queue one frame. Raises `LinkClosedError` (also when it overflows) and `MessageTooLargeError`."""
        if self._ended is not None:
            raise LinkClosedError(self._ended.code, self._ended.message)
        if len(frame) > self._max_frame:
            raise MessageTooLargeError(f"a message of {len(frame)} bytes exceeds the link's {self._max_frame}")
        if self._waiting_bytes + len(frame) > self._max_bytes:
            message = f"more than {self._max_bytes} bytes wait for the peer"
            self.close(SLOW_CONSUMER, message, discard=True)
            raise LinkClosedError(SLOW_CONSUMER, message)
        self._frames.append(frame)
        self._waiting_bytes += len(frame)
        self._wake()

    async def get(self) -> bytes:
        """Return the next frame, one caller at a time. Raises `LinkClosedError` when closed and empty."""
        while not self._frames:
            if self._ended is not None:
                raise LinkClosedError(self._ended.code, self._ended.message)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        frame = self._frames.popleft()
        self._waiting_bytes -= len(frame)
        return frame

    def close(self, code: str, message: str = "", discard: bool = False) -> None:
        """End the pipe. What waits can still be taken unless it is discarded. The first reason stays."""
        if self._ended is None:
            self._ended = LinkClosedError(code, message)
        if discard:
            self._frames.clear()
            self._waiting_bytes = 0
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
