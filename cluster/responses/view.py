"""The frames of an answer as they are made, for any number of clients that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from msgspec import Raw, Struct, json
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from cluster.answer_log import ANSWER_LOG, AnswerLog
from cluster.errors import ApiError
from cluster.openai.response_output import CANCELLED
from cluster.responses.record import End, Head, end_of

_FRAME_END = b"\n\n"
_CANCELLED = b"event: response.cancelled\n"
_STATES = tuple(  # events that hold the whole body
    f"event: response.{state}\n".encode()
    for state in ("created", "queued", "in_progress", "completed", "incomplete", "failed", "cancelled")
)
_ERRORS = (b'data: {"error":', b"event: error\n")
_FAILED = b"event: response.failed\n"
OF_FRAME = 40  # bytes that a kept one takes beside its content


class _Event(Struct):
    """What is read of the last event of an answer."""

    response: Raw = Raw()
    error: dict[str, Any] | None = None


class AnswerView:
    """What an endpoint sends, kept as numbered frames or as one whole body. Used on one event loop.

    status: 0 until it is decided. events: the frames of a stream. body: of an answer that is none. response: the
    latest body of a response. over: nothing more comes. current: nothing else is known of it
    elsewhere, as far as this process can tell. lost: it broke off without an end. begun: its request was
    accepted. log: of the answer.
    """

    def __init__(self, head: Head, log: AnswerLog, current: bool = True) -> None:
        self.current = current
        self.log = log
        self.status = 0
        self.streams = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.events: list[bytes] = []
        self.body = b""
        self.response = b""
        self.over = self.lost = self.begun = False
        self.size = 0
        self.exchange = {"id": head.name, "client_id": "", "tenant": head.tenant}
        self._failed_at: int | None = None  # number of the first event of the error that ended it
        self._passes = False  # another try may spare that error
        self._head = head
        self._left = b""
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

    def scope(self, **state: Any) -> Scope:
        """Return the scope of a request whose answer comes here."""
        return {
            "type": "http",
            "method": "POST",
            "path": self._head.path,
            "query_string": b"",
            "headers": [],
            "state": {"exchange": self.exchange, ANSWER_LOG: self.log, **state},
        }

    def receive(self) -> Receive:
        """Return what says what was asked, and never that the client has left."""
        asked: list[Message] = [{"type": "http.request", "body": self._head.body}]

        async def receive() -> Message:
            if not asked:
                await asyncio.Event().wait()
            return asked.pop()

        return receive

    async def send(self, message: Message) -> None:
        """Take a message of the endpoint's (ASGI)."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
            self.streams = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
        elif self.streams:
            *frames, self._left = (self._left + message.get("body", b"")).split(_FRAME_END)
            for frame in frames:
                self._add(frame + _FRAME_END)
        else:
            self.body += message.get("body", b"")
            self.size = len(self.body)
        self.tell()

    def catch_up(self) -> None:
        """Note that all is here that is known elsewhere."""
        self.current = True
        self.tell()

    def accept(self) -> None:
        """Note that the request was accepted."""
        self.begun = True
        self.tell()

    def finish(self, lost: bool = False, error: ApiError | None = None) -> None:
        """Note that nothing more comes. error: what its readers get, while the answer goes on elsewhere."""
        if not self.over:
            self.over, self.lost, self._error = True, lost, error
        self.tell()

    def tell(self) -> None:
        """Have all who wait look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self) -> None:
        """Return after the next change."""
        await self._changed.wait()

    def check(self) -> None:
        """Raise the `ApiError` of a view that goes on no more, while its answer does."""
        if self._error is not None:
            raise self._error

    async def whole(self) -> None:
        """Return once nothing more comes."""
        while not self.over:
            await self.changed()
        self.check()

    async def after(self, number: int) -> AsyncIterator[int]:
        """Yield the numbers of events behind `number`, the first is 0, as they come; at least those of an error.

        Of an answer that took too much fewer events are left than its clients may have had.
        """
        at, is_first = number + 1, True
        while True:
            if is_first and self._failed_at is not None:
                at = min(at, self._failed_at)
            while at < len(self.events):
                is_first = False
                yield at
                at += 1
            if self.over:
                self.check()
                return
            await self.changed()

    def numbered(self, number: int) -> bytes:
        """Return an event with its number as `id`.

        An error that another try may spare has none: the answer that goes on has other events under its numbers.
        """
        event = self.events[number]
        passes = self._passes and self._failed_at is not None and number >= self._failed_at
        return event if passes else b"id: %d\n%s" % (number, event)

    def end(self, at: int) -> End:
        """Return how it ended, as its last event says. at: seconds since 1970."""
        if self.events and (error := _told(self.events[-1]).error) is not None:
            known = None if self.log.kept is None else self.log.kept.error
            if known is not None and known.code == error.get("code"):
                return end_of(known, at)
            return End(at, str(error.get("code")), str(error.get("message")), error.get("param"))
        if self.events and self.events[-1].startswith(_CANCELLED):
            return End(at, CANCELLED)
        return End(at)

    def _add(self, frame: bytes) -> None:
        self.events.append(frame)
        self.size += len(frame) + OF_FRAME
        if frame.startswith(_STATES):
            self.response = bytes(_told(frame).response)
        elif frame.startswith(_ERRORS) and (error := _told(frame).error) is not None:
            last = len(self.events) - 1
            self._failed_at = last - 1 if last and self.events[last - 1].startswith(_FAILED) else last
            self._passes = error.get("retryable") is True


def _told(frame: bytes) -> _Event:
    """Return what an event says, nothing of one that is no JSON object."""
    data = frame.partition(b"data: ")[2]
    return json.decode(data, type=_Event) if data.startswith(b"{") else _Event()
