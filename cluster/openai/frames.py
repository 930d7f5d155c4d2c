"""Answers on the wire: SSE frames and whole bodies of completions and chat completions.

A frame of a stream differs from the one before only in its text, so everything else is encoded once per choice.
Source: OpenAI API reference, "the chat completion chunk object" and its neighbours.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from msgspec import json

from cluster.openai.call import Call
from cluster.openai.generation import Delta, Usage
from cluster.openai.logprobs import chat_logprobs, completion_logprobs
from engine.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_encode = json.Encoder().encode


class Frames(ABC):
    """Encodes one call's answer. Deltas of a choice must come in order."""

    object_name: str
    chunk_name: str

    def __init__(self, call: Call, model_id: str, tokenizer: Tokenizer) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._head = {"id": call.request_id, "created": int(time.time()), "model": model_id}
        opening = {"id": call.request_id, "object": self.chunk_name, "created": self._head["created"]}
        self._opening = b"data: " + _encode({**opening, "model": model_id})[:-1] + b',"choices":['
        self._closing = b'],"usage":null}\n\n' if call.include_usage else b"]}\n\n"

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """Return the frames for one delta of a stream; b"" when there is nothing to show yet."""

    @abstractmethod
    def choice(self, index: int, text: str, whole: Delta) -> dict[str, Any]:
        """Return one choice of an answer that is not streamed; `whole` has all its tokens and logprobs."""

    def usage(self, usage: Usage) -> bytes:
        """Return the frame with the usage of the call, which has no choices."""
        return self._opening + b'],"usage":' + _encode(_usage(usage)) + b"}\n\n"

    def body(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        """Return the JSON body of an answer that is not streamed."""
        named = {"id": self._head["id"], "object": self.object_name, **self._head}
        return _encode({**named, "choices": choices, "usage": _usage(usage)})

    def _extras(self, delta: Delta) -> bytes:
        """Fields of a choice that only some requests ask for, as JSON without braces."""
        logprobs = _encode(self._logprobs(delta)) if delta.logprobs else b"null"
        tokens = b',"token_ids":' + _encode(list(delta.token_ids)) if self._call.return_token_ids else b""
        return b',"logprobs":' + logprobs + tokens

    def _whole_extras(self, whole: Delta) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": self._logprobs(whole) if whole.logprobs else None}
        if self._call.return_token_ids:
            extras["token_ids"] = list(whole.token_ids)
        return extras

    def _has_more_than_text(self, delta: Delta) -> bool:
        return bool(delta.logprobs) or (self._call.return_token_ids and bool(delta.token_ids))

    @abstractmethod
    def _logprobs(self, delta: Delta) -> dict[str, Any]: ...


class CompletionFrames(Frames):
    """`text_completion` objects."""

    object_name = chunk_name = "text_completion"

    def delta(self, delta: Delta) -> bytes:
        """See `Frames.delta`."""
        opening = b'%s{"index":%d,"text":' % (self._opening, delta.choice)
        frames = b""
        if delta.text or self._has_more_than_text(delta):
            extras = self._extras(delta)
            frames = opening + _encode(delta.text) + extras + b',"finish_reason":null}' + self._closing
        if delta.finish_reason is not None:
            reason = delta.finish_reason.encode()
            frames += opening + b'"","logprobs":null,"finish_reason":"' + reason + b'"}' + self._closing
        return frames

    def choice(self, index: int, text: str, whole: Delta) -> dict[str, Any]:
        """See `Frames.choice`."""
        return {"index": index, "text": text, **self._whole_extras(whole), "finish_reason": whole.finish_reason}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return completion_logprobs(delta.logprobs, self._tokenizer, self._call.params.logprobs or 0)


class ChatFrames(Frames):
    """`chat.completion` and `chat.completion.chunk` objects. A choice's first frame tells its role."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, call: Call, model_id: str, tokenizer: Tokenizer) -> None:
        super().__init__(call, model_id, tokenizer)
        self._introduced: set[int] = set()

    def delta(self, delta: Delta) -> bytes:
        """See `Frames.delta`."""
        opening = b'%s{"index":%d,"delta":' % (self._opening, delta.choice)
        frames = b""
        if delta.choice not in self._introduced:
            self._introduced.add(delta.choice)
            frames = (
                opening + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' + self._closing
            )
        if delta.text or self._has_more_than_text(delta):
            text = _encode(delta.text)
            extras = self._extras(delta)
            frames += opening + b'{"content":' + text + b"}" + extras + b',"finish_reason":null}' + self._closing
        if delta.finish_reason is not None:
            reason = delta.finish_reason.encode()
            frames += opening + b'{},"logprobs":null,"finish_reason":"' + reason + b'"}' + self._closing
        return frames

    def choice(self, index: int, text: str, whole: Delta) -> dict[str, Any]:
        """See `Frames.choice`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, **self._whole_extras(whole), "finish_reason": whole.finish_reason}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(delta.logprobs, self._tokenizer, self._call.params.logprobs or 0)


def error_frame(body: dict[str, Any]) -> bytes:
    """Return the frame that ends a stream which failed after its start: no `[DONE]` follows it."""
    return b"data: " + _encode(body) + b"\n\n"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
