"""Turns the deltas of one choice into a message: the events of its stream, and its body.

Source: Anthropic API reference, "streaming messages" and "the message object".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from hashlib import blake2b
from json import dumps
from typing import Any

from msgspec import DecodeError, json
from pydantic_core import from_json

from cluster.anthropic.message_input import MessageCall
from cluster.openai.choices import Delta, TokenUsage
from cluster.openai.parsers.reader import CallDelta
from engine.request import Request

Emit = Callable[..., None]
Body = dict[str, Any]
INVALID = "INVALID_JSON"  # key of an input that is no JSON; source: Anthropic's page on fine-grained tool streaming
_encode = json.Encoder().encode


class MessageWriter:
    """One message. Whole and streamed answers come from the same events, so that they say the same.

    What it makes depends on the tokens alone, so that another router makes the same bytes; therefore the one `ping`
    is right behind the beginning. `take` returns the frames that were made since it was last called.
    """

    def __init__(self, asked: MessageCall, request: Request, model_id: str) -> None:
        """request: what the call has become, with the tokens of output that the context leaves."""
        self._call = asked.call
        self._model_id = model_id
        self._cut_by_context = (request.params.max_tokens or 0) < (asked.call.params.max_tokens or 0)
        thinking = asked.fields.thinking
        self._omits = thinking is not None and thinking.display in ("omitted", "updates")
        self._frames: list[bytes] = []
        self._content: list[Body] = []
        self._open: Block | None = None
        self._space: list[str] = []  # before a text; without one it is left out
        self.begun = False
        self._reason, self._stop_string = "", ""

    def begin(self, usage: TokenUsage) -> None:
        """Begin the message, unless it has begun. usage: what is known with the first delta."""
        if self.begun:
            return
        self.begun = True
        so_far = {**usage_body(usage), "output_tokens": 0}
        so_far.pop("output_tokens_details", None)
        self._emit("message_start", message=self._message([], so_far))
        self._emit("ping")

    def add(self, delta: Delta) -> None:
        """Take the next delta of the choice."""
        if delta.reasoning:
            self._thinking().add(delta.reasoning)
        if delta.text:
            self._add_text(delta.text)
        for call in delta.calls:
            self._add_call(call)
        self._reason = delta.finish_reason or self._reason
        self._stop_string = delta.stop_string or self._stop_string

    def end(self, usage: TokenUsage) -> Body:
        """Complete the message and return its body."""
        self.begin(usage)
        if self._space or not (self._open or self._content):  # clients read the first block, if only an empty text
            self._text().add("".join(self._space))
        last = self._open
        self._close()
        reason = self._stop_reason(last)
        stop = {"stop_reason": reason, "stop_sequence": self._stop_string if reason == "stop_sequence" else None}
        self._emit("message_delta", delta=stop, usage=usage_body(usage))
        self._emit("message_stop")
        return self._message(self._content, usage_body(usage), **stop)

    def take(self) -> bytes:
        """Return the frames made since the last call."""
        frames, self._frames = b"".join(self._frames), []
        return frames

    def _message(
        self, content: list[Body], usage: Body, stop_reason: str | None = None, stop_sequence: str | None = None
    ) -> Body:
        return {
            "id": self._call.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model_id,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }

    def _stop_reason(self, last: Block | None) -> str:
        if self._reason == "length":
            return "model_context_window_exceeded" if self._cut_by_context else "max_tokens"
        # A call that was cut short must not run.
        call = last if isinstance(last, ToolUseBlock) else None
        if self._stop_string and not (call is not None and call.is_whole):
            return "stop_sequence"
        return "tool_use" if self._reason == "tool_calls" and not (call is not None and call.is_cut) else "end_turn"

    def _thinking(self) -> ThinkingBlock:
        if not isinstance(self._open, ThinkingBlock):
            self._close()
            self._open = ThinkingBlock(self._emit, len(self._content), self._call.request_id, self._omits)
        return self._open

    def _text(self) -> TextBlock:
        if not isinstance(self._open, TextBlock):
            self._close()
            self._open = TextBlock(self._emit, len(self._content))
        return self._open

    def _add_text(self, text: str) -> None:
        """Add text; space between other blocks is how the model parts them, and no text."""
        if not isinstance(self._open, TextBlock):
            self._space.append(text)
            if text.isspace():
                return
            text, self._space = "".join(self._space), []
        self._text().add(text)

    def _add_call(self, call: CallDelta) -> None:
        block = self._open
        if not isinstance(block, ToolUseBlock) or block.number != call.index:
            self._close()
            self._space = []
            block = self._open = ToolUseBlock(self._emit, len(self._content), call)
        block.add(call.arguments)

    def _close(self) -> None:
        if self._open is not None:
            self._content.append(self._open.close())
            self._open = None

    def _emit(self, event: str, **fields: Any) -> None:
        if self._call.stream:
            data = _encode({"type": event, **fields})
            self._frames.append(b"event: " + event.encode() + b"\ndata: " + data + b"\n\n")


class Block(ABC):
    """One block of a message while it grows; every change is emitted as it is made. index: of the block."""

    def __init__(self, emit: Emit, index: int, opening: Body) -> None:
        self._emit = emit
        self._index = index
        self._pieces: list[str] = []
        emit("content_block_start", index=index, content_block=opening)

    def close(self) -> Body:
        """Complete the block and return it."""
        self._emit("content_block_stop", index=self._index)
        return self._body("".join(self._pieces))

    @abstractmethod
    def _body(self, whole: str) -> Body:
        """Return the block with its text."""

    def _add(self, piece: str, kind: str, name: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._delta(kind, name, piece)

    def _delta(self, kind: str, name: str, piece: str) -> None:
        self._emit("content_block_delta", index=self._index, delta={"type": kind, name: piece})


class TextBlock(Block):
    """What the model says."""

    def __init__(self, emit: Emit, index: int) -> None:
        super().__init__(emit, index, self._body(""))

    def add(self, text: str) -> None:
        """Add text."""
        self._add(text, "text_delta", "text")

    def _body(self, whole: str) -> Body:
        return {"type": "text", "text": whole}


class ThinkingBlock(Block):
    """What the model thinks. Clients send back only what is signed, so it is, with nothing to keep secret.

    omits: the text is left out.
    """

    def __init__(self, emit: Emit, index: int, message_id: str, omits: bool) -> None:
        self._signature = blake2b(f"{message_id}/{index}".encode(), digest_size=16).hexdigest()
        self._omits = omits
        super().__init__(emit, index, {"type": "thinking", "thinking": "", "signature": ""})

    def add(self, text: str) -> None:
        """Add text."""
        if not self._omits:
            self._add(text, "thinking_delta", "thinking")

    def close(self) -> Body:
        """See `Block.close`."""
        self._delta("signature_delta", "signature", self._signature)
        return super().close()

    def _body(self, whole: str) -> Body:
        return {"type": "thinking", "thinking": whole, "signature": self._signature}


class ToolUseBlock(Block):
    """A call of a tool."""

    def __init__(self, emit: Emit, index: int, call: CallDelta) -> None:
        self.number = call.index
        self._call = {"type": "tool_use", "id": call.id, "name": call.name}
        super().__init__(emit, index, {**self._call, "input": {}})

    def add(self, arguments: str) -> None:
        """Add a piece of the arguments."""
        self._add(arguments, "input_json_delta", "partial_json")

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are complete."""
        try:
            json.decode("".join(self._pieces) or "{}")
        except DecodeError:
            return False
        return True

    @property
    def is_cut(self) -> bool:
        """Whether the arguments have begun well, and are not complete: clients would take what there is for all."""
        return not self.is_whole and INVALID not in input_of("".join(self._pieces))

    def _body(self, whole: str) -> Body:
        return {**self._call, "input": input_of(whole)}


def input_of(arguments: str) -> Body:
    """Return the input of a call: as far as it came where it was cut, and what is no JSON as `INVALID`."""
    try:
        found = from_json(arguments or "{}", allow_partial="trailing-strings")
        dumps(found, allow_nan=False)  # there are numbers that JSON can write, and no client can hold
    except ValueError:
        return {INVALID: arguments}
    return found if isinstance(found, dict) else {INVALID: arguments}


def usage_body(usage: TokenUsage) -> Body:
    """Return the usage of a message. Tokens that a prefix cache spared are told apart; its filling costs nothing."""
    cached = usage.cached_tokens
    body: Body = {"input_tokens": usage.prompt_tokens - (cached or 0)}
    if cached is not None:
        body |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    body["output_tokens"] = usage.completion_tokens
    if usage.reasoning_tokens is not None:
        body["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return body
