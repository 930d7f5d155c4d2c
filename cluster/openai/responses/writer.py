"""Turns the deltas of one choice into a response: its items, and the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Raw, json

from cluster.errors import ApiError
from cluster.openai.deltas import Delta, PlacedLogprob, Usage
from cluster.openai.logprobs import chat_logprobs
from cluster.openai.responses.body import ResponseBody, usage_body
from cluster.openai.responses.output import CallItem, MessageItem, OpenItem, ReasoningItem
from cluster.openai.responses.parse import Asked
from cluster.openai.tools.deltas import CallDelta
from engine.text.tokenizer import Tokenizer

_encode = json.Encoder().encode


class ResponseWriter:
    """One response. Whole and streamed answers come from the same events, so that they say the same.

    `take` returns the frames that were made since it was last called; a whole answer has no use for them and is
    not made to encode them.
    """

    def __init__(self, asked: Asked, model_id: str, tokenizer: Tokenizer) -> None:
        self._streaming = asked.call.stream
        self._top = asked.call.params.logprobs or 0
        self._tokenizer = tokenizer
        self._body = ResponseBody(asked, model_id)
        self._frames: list[bytes] = []
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._placed: list[PlacedLogprob] = []  # of tokens whose text is still to come
        self._tokens = 0
        self._reasoning_tokens = 0
        self._cut = False
        self._emit("response.created", response=self._body.running())
        self._emit("response.in_progress", response=self._body.running())

    def add(self, delta: Delta) -> None:
        """Take the next delta of the choice."""
        self._tokens += len(delta.token_ids)
        self._cut = delta.finish_reason == "length"
        if delta.reasoning:
            self._reasoning().add(delta.reasoning)
            self._reasoning_tokens = self._tokens
        self._placed.extend(delta.logprobs)
        if delta.text:
            self._message().add(delta.text, self._placed)
        if delta.text or delta.reasoning or delta.calls:
            self._placed = []
        for call in delta.calls:
            self._call(call)

    def end(self, usage: Usage) -> dict[str, Any]:
        """Complete the response and return its body."""
        if self._open is None:
            self._message()  # there is always something to show, if only an empty text
        self._close(self._cut)
        body = self._body.ended(self._items, usage_body(usage, self._reasoning_tokens), self._cut)
        self._emit("response.incomplete" if self._cut else "response.completed", response=body)
        return body

    def fail(self, error: ApiError) -> None:
        """End the stream with an error; clients that know none of the events find it as in other streams."""
        self._emit("response.failed", response=self._body.failed(self._items, error))
        told = {"code": error.code, "message": error.message, "param": error.param}
        self._emit("error", **told, **error.body())

    def take(self) -> bytes:
        """Return the frames made since the last call."""
        frames, self._frames = b"".join(self._frames), []
        return frames

    def _reasoning(self) -> ReasoningItem:
        if isinstance(self._open, ReasoningItem):
            return self._open
        self._close()
        item = ReasoningItem(self._emit, len(self._items))
        self._open = item
        return item

    def _message(self) -> MessageItem:
        if isinstance(self._open, MessageItem):
            return self._open
        self._close()
        item = MessageItem(self._emit, len(self._items), self._logprobs)
        self._open = item
        return item

    def _call(self, call: CallDelta) -> None:
        item = self._open
        if not isinstance(item, CallItem) or item.number != call.index:
            self._close()
            item = CallItem(self._emit, len(self._items), call)
            self._open = item
        if call.arguments:
            item.add(call.arguments)

    def _close(self, cut: bool = False) -> None:
        if self._open is not None:
            self._open.close(cut)
            self._items.append(self._open.item)
            self._open = None

    def _logprobs(self, placed: Sequence[PlacedLogprob]) -> list[Raw]:
        """Encoded one by one as they come: the last events tell all of them again, and must not take long."""
        return [Raw(_encode(entry)) for entry in chat_logprobs(placed, self._tokenizer, self._top)["content"]]

    def _emit(self, event: str, **fields: Any) -> None:
        if self._streaming:
            data = _encode({"type": event, "sequence_number": self._sequence, **fields})
            self._frames.append(b"event: " + event.encode() + b"\ndata: " + data + b"\n\n")
            self._sequence += 1
