"""Turns the deltas of one choice into a response: the events of its stream, and its body.

Source: OpenAI API reference, "streaming events" of responses and "the response object".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec import Raw, json

from cluster.answer_log import Kept
from cluster.errors import ApiError
from cluster.openai.choices import Delta, PlacedLogprob, TokenUsage
from cluster.openai.frames import chat_logprobs
from cluster.openai.parsers.reader import CallDelta
from cluster.openai.response_input import ResponseCall
from cluster.openai.response_items import CallItem, MessageItem, OpenItem, Place, ReasoningItem
from engine.text.tokenizer import Tokenizer

Item = dict[str, Any]
CANCELLED = "response_cancelled"
_encode = json.Encoder().encode


def response_cancelled() -> ApiError:
    """Return what ends a response that its client wants no more."""
    return ApiError(CANCELLED, "the response was cancelled", status=409, retryable=False)


class ResponseWriter:
    """One response. Whole and streamed answers come from the same events, so that they say the same.

    `take` returns the frames that were made since it was last called; a whole answer has no use for them and is
    not made to encode them.
    """

    def __init__(self, asked: ResponseCall, model_id: str, tokenizer: Tokenizer, kept: Kept | None = None) -> None:
        """kept: of a response that the server keeps: it is streamed in any case."""
        self._streaming = asked.call.stream or kept is not None
        self._queued = kept is not None and kept.background
        self._top = asked.call.params.num_told
        self._tokenizer = tokenizer
        self._body = ResponseBody(asked, model_id, kept)
        self._frames: list[bytes] = []
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._placed: list[PlacedLogprob] = []  # of tokens whose text is still to come
        self._tokens = 0
        self._reasoning_tokens = 0
        self._cut = False
        if self._queued:
            self._emit("response.created", response=self._body.queued())
            self._emit("response.queued", response=self._body.queued())
        else:
            self._emit("response.created", response=self._body.running())
            self._emit("response.in_progress", response=self._body.running())

    def add(self, delta: Delta) -> None:
        """Take the next delta of the choice."""
        if self._queued:
            self._queued = False
            self._emit("response.in_progress", response=self._body.running())
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

    def end(self, usage: TokenUsage) -> dict[str, Any]:
        """Complete the response and return its body."""
        if self._open is None:
            self._message()  # there is always something to show, if only an empty text
        self._close(self._cut)
        body = self._body.ended(self._items, usage_body(usage, self._reasoning_tokens), self._cut)
        self._emit("response.incomplete" if self._cut else "response.completed", response=body)
        return body

    def fail(self, error: ApiError) -> None:
        """End the stream with an error; clients that know none of the events find it as in other streams."""
        if error.code == CANCELLED:
            self._emit("response.cancelled", response=self._body.cancelled(self._items))
            return
        self._emit("response.failed", response=self._body.failed(self._items, error))
        told = {"code": error.code, "message": error.message, "param": error.param}
        self._emit("error", **told, **error.body())

    def take(self) -> bytes:
        """Return the frames made since the last call."""
        frames, self._frames = b"".join(self._frames), []
        return frames

    def _place(self) -> Place:
        return Place(self._emit, len(self._items), self._body.response_id)

    def _reasoning(self) -> ReasoningItem:
        if isinstance(self._open, ReasoningItem):
            return self._open
        self._close()
        item = ReasoningItem(self._place())
        self._open = item
        return item

    def _message(self) -> MessageItem:
        if isinstance(self._open, MessageItem):
            return self._open
        self._close()
        item = MessageItem(self._place(), self._logprobs)
        self._open = item
        return item

    def _call(self, call: CallDelta) -> None:
        item = self._open
        if not isinstance(item, CallItem) or item.number != call.index:
            self._close()
            item = CallItem(self._place(), call)
            self._open = item
        if call.arguments:
            item.add(call.arguments)

    def _close(self, cut: bool = False) -> None:
        if self._open is not None:
            self._open.close(cut)
            self._items.append(self._open.item)
            self._open = None

    def _logprobs(self, placed: Sequence[PlacedLogprob]) -> list[Raw]:
        """Encoded one by one as they come: the last events repeat all of them, and must not take long."""
        return [Raw(_encode(entry)) for entry in chat_logprobs(placed, self._tokenizer, self._top)["content"]]

    def _emit(self, event: str, **fields: Any) -> None:
        if self._streaming:
            data = _encode({"type": event, "sequence_number": self._sequence, **fields})
            self._frames.append(b"event: " + event.encode() + b"\ndata: " + data + b"\n\n")
            self._sequence += 1


class ResponseBody:
    """Makes the bodies of one response as it goes on."""

    def __init__(self, asked: ResponseCall, model_id: str, kept: Kept | None = None) -> None:
        self._asked = asked
        self._kept = kept
        self.response_id = asked.call.request_id
        self._head = {
            "id": self.response_id,
            "object": "response",
            "created_at": asked.call.created,
            "model": model_id,
        }

    def running(self) -> dict[str, Any]:
        """Return the body before anything is known."""
        return self._body("in_progress", [], None)

    def queued(self) -> dict[str, Any]:
        """Return the body before it has begun."""
        return self._body("queued", [], None)

    def cancelled(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return the last body of a response that its client wants no more."""
        return self._body("cancelled", items, None)

    def ended(self, items: Sequence[Item], usage: dict[str, Any], cut: bool) -> dict[str, Any]:
        """Return the last body. cut: the output reached its limit."""
        body = self._body("incomplete" if cut else "completed", items, usage)
        if cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            at = None if self._kept is None else self._kept.completed_at
            body["completed_at"] = int(time.time()) if at is None else at
        return body

    def failed(self, items: Sequence[Item], error: ApiError) -> dict[str, Any]:
        """Return the last body of a response that failed after its start."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        return self._body("failed", items, None) | {"error": {"code": code, "message": error.message}}

    def _body(self, status: str, items: Sequence[Item], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(items),
            "usage": usage,
            **self._settings(),
        }

    def _settings(self) -> dict[str, Any]:
        """What the client sent, with defaults filled in."""
        fields, params = self._asked.fields, self._asked.call.params
        wanted = fields.text.format if fields.text else None
        return {
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}},
            "tools": [tool.model_dump() for tool in fields.tools or ()],
            "tool_choice": _choice(fields.tool_choice),
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
            "top_logprobs": fields.top_logprobs or 0,
            "truncation": "disabled",
            "metadata": fields.metadata or {},
            "user": fields.user,
            "safety_identifier": fields.safety_identifier,
            "prompt_cache_key": fields.prompt_cache_key,
            "background": bool(fields.background),
            "store": bool(fields.store or fields.background),
            "previous_response_id": fields.previous_response_id,
            "service_tier": "default",
        }


def usage_body(usage: TokenUsage, reasoning_tokens: int) -> dict[str, Any]:
    """Return the usage of a response. Nothing is billed for what is written to the cache, so it is reported as 0."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _choice(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump() if choice is not None else "auto"
