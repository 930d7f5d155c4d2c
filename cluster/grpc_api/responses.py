"""Deltas of a call as protocol buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from google.protobuf.message import Message

from cluster.grpc_api.squadron.v1 import inference_pb2 as pb
from cluster.openai.call import Call
from cluster.openai.deltas import Delta, PlacedLogprob, Usage
from engine.text.tokenizer import Tokenizer

_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}


class Responses(ABC):
    """Makes the responses of one call. Deltas of a choice must come in order. text / tokens: what is told."""

    def __init__(self, call: Call, tokenizer: Tokenizer, text: bool, tokens: bool) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._text = text
        self._tokens = tokens

    @abstractmethod
    def first(self) -> Message:
        """Return the response that names the request."""

    @abstractmethod
    def delta(self, delta: Delta) -> Message | None:
        """Return the response for one delta, None when there is nothing to show yet."""

    @abstractmethod
    def last(self, usage: Usage) -> Message:
        """Return the response with the usage of the call."""

    def _ids(self, delta: Delta) -> Sequence[int]:
        return delta.token_ids if self._tokens else ()

    def _shows_nothing(self, delta: Delta, text: str) -> bool:
        """Tokens that end within a character give no text yet."""
        return not text and not delta.logprobs and not self._tokens and delta.finish_reason is None

    def _logprobs(self, placed: Sequence[PlacedLogprob]) -> list[pb.TokenLogprob]:
        top = self._call.params.logprobs or 0
        return [
            pb.TokenLogprob(
                token_id=one.logprob.token_id,
                logprob=one.logprob.logprob,
                token=self._tokenizer.token_bytes(one.logprob.token_id),
                top=[
                    pb.TopLogprob(token_id=token, logprob=value, token=self._tokenizer.token_bytes(token))
                    for token, value in one.logprob.top[:top]
                ],
            )
            for one in placed
        ]


class GenerateResponses(Responses):
    """Of `Generate`."""

    def first(self) -> pb.GenerateResponse:
        """See `Responses.first`."""
        return pb.GenerateResponse(request_id=self._call.request_id)

    def delta(self, delta: Delta) -> pb.GenerateResponse | None:
        """See `Responses.delta`."""
        text = delta.text if self._text else ""
        if self._shows_nothing(delta, text):
            return None
        one = pb.GenerateDelta(
            choice=delta.choice,
            text=text,
            token_ids=self._ids(delta),
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=_REASONS[delta.finish_reason],
        )
        return pb.GenerateResponse(deltas=[one])

    def last(self, usage: Usage) -> pb.GenerateResponse:
        """See `Responses.last`."""
        return pb.GenerateResponse(usage=usage_message(usage))


class ChatResponses(Responses):
    """Of `Chat`."""

    def first(self) -> pb.ChatResponse:
        """See `Responses.first`."""
        return pb.ChatResponse(request_id=self._call.request_id)

    def delta(self, delta: Delta) -> pb.ChatResponse | None:
        """See `Responses.delta`."""
        content = delta.text if self._text else ""
        reasoning = delta.reasoning if self._text else ""
        if not delta.calls and self._shows_nothing(delta, content or reasoning):
            return None
        one = pb.ChatDelta(
            choice=delta.choice,
            content=content,
            reasoning_content=reasoning,
            tool_calls=[
                pb.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
                for call in delta.calls
            ],
            token_ids=self._ids(delta),
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=_REASONS[delta.finish_reason],
        )
        return pb.ChatResponse(deltas=[one])

    def last(self, usage: Usage) -> pb.ChatResponse:
        """See `Responses.last`."""
        return pb.ChatResponse(usage=usage_message(usage))


def usage_message(usage: Usage) -> pb.Usage:
    """Return the usage of a call."""
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
