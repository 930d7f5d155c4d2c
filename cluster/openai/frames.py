"""Answers on the wire: SSE frames and whole bodies of completions and chat completions, with their log-probabilities.

A frame of a stream differs from the one before only in its text, so everything else is encoded once per choice.
Source: OpenAI API reference, "the chat completion chunk object" and its neighbours; the fields for token ids and for
log-probabilities of prompts are those of vLLM's server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Raw, json

from cluster.openai.call import Call
from cluster.openai.choices import Delta, PlacedLogprob, PromptResult, TokenUsage
from cluster.openai.parsers.reader import CallDelta, Parsed, joined
from engine.report import TokenLogprob
from engine.text.tokenizer import Tokenizer

LOWEST = -9999.0  # what OpenAI sends for a probability of zero: JSON has no infinity
DONE = b"data: [DONE]\n\n"
_encode = json.Encoder().encode


class Frames(ABC):
    """Encodes one call's answer. Deltas of a choice must come in order.

    prompts: what is known of the call's prompts, one per prompt.
    """

    object_name: str
    chunk_name: str
    text_end: bytes  # what closes the text of a choice

    def __init__(self, call: Call, model_id: str, tokenizer: Tokenizer, prompts: Sequence[PromptResult]) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._scores: dict[int, Raw] = {}  # of prompts, encoded once for all their choices
        self._heads: dict[int, bytes] = {}  # of the choices that were begun: a frame up to its text
        self._tells_ids = call.return_token_ids
        echoed = {"request_id": call.client_id} if call.client_id else {}
        self._head = {"created": call.created, "model": model_id, **echoed}
        opening = {"id": call.request_id, "object": self.chunk_name, **self._head}
        self._opening = b"data: " + _encode(opening)[:-1] + b',"choices":['
        self._opening_tail = b',"usage":null}\n\n' if call.include_usage else b"}\n\n"
        self._set_tail(self._opening_tail)

    def delta(self, delta: Delta) -> bytes:
        """Return the frames for one delta of a stream; b"" when there is nothing to show yet."""
        head = self._heads.get(delta.choice)
        if (
            head is None
            or delta.finish_reason is not None
            or delta.logprobs
            or self._tells_ids
            or delta.calls
            or delta.reasoning
        ):
            return self._frames(delta)
        return head + _encode(delta.text) + self._plain_end if delta.text else b""

    @abstractmethod
    def choice(self, index: int, text: str, whole: Delta) -> dict[str, Any]:
        """Return one choice of an answer that is not streamed; `whole` has all its tokens, calls and logprobs."""

    def report_usage(self, usage: TokenUsage, before: TokenUsage) -> None:
        """Put the usage so far into the frames that follow; into one without tokens that `before` them."""
        self._opening_tail = b',"usage":' + _encode(usage_body(before)) + b"}\n\n"
        self._set_tail(b',"usage":' + _encode(usage_body(usage)) + b"}\n\n")

    def usage(self, usage: TokenUsage) -> bytes:
        """Return the frame with the usage of the call, which has no choices."""
        return self._opening + b'],"usage":' + _encode(usage_body(usage)) + b"}\n\n"

    def body(self, choices: list[dict[str, Any]], usage: TokenUsage) -> bytes:
        """Return the JSON body of an answer that is not streamed."""
        named = {"id": self._call.request_id, "object": self.object_name, **self._head}
        return _encode({**named, "choices": choices, "usage": usage_body(usage), **self._whole_call()})

    def _set_tail(self, tail: bytes) -> None:
        """Set what follows the choices of a chunk, and with it all that ends a frame of plain text."""
        self._tail = tail
        self._closing = b"]" + tail
        self._plain_end = self.text_end + b',"logprobs":null,"finish_reason":null}' + self._closing

    @abstractmethod
    def _frames(self, delta: Delta) -> bytes:
        """Return the frames of any delta: first, last, or with more than text."""

    def _whole_call(self) -> dict[str, Any]:
        """Fields beside the choices."""
        return {}

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

    def _prompt_extras(self, number: int) -> dict[str, Any]:
        """Fields about the prompt, where the request asks for them."""
        extras: dict[str, Any] = {}
        if self._call.prompt_logprobs is not None:
            extras["prompt_logprobs"] = self._prompt_scores(number, self._call.prompt_logprobs)
        if self._call.return_token_ids:
            extras["prompt_token_ids"] = list(self._prompts[number].token_ids)
        return extras

    def _prompt_scores(self, number: int, top: int) -> Raw:
        if number not in self._scores:
            told = prompt_logprobs(self._prompts[number].logprobs, self._tokenizer, top)
            # Entry by entry, for other threads get no turn while one long text is encoded.
            self._scores[number] = Raw(b"[" + b",".join(map(_encode, told)) + b"]")
        return self._scores[number]

    def _has_more_than_text(self, delta: Delta) -> bool:
        return bool(delta.logprobs) or (self._call.return_token_ids and bool(delta.token_ids))

    @abstractmethod
    def _logprobs(self, delta: Delta) -> dict[str, Any]: ...


class CompletionFrames(Frames):
    """`text_completion` objects."""

    object_name = chunk_name = "text_completion"
    text_end = b""

    def _frames(self, delta: Delta) -> bytes:
        opening = b'%s{"index":%d,"text":' % (self._opening, delta.choice)
        frames = b""
        if delta.text or self._has_more_than_text(delta):
            extras = self._extras(delta)
            if self._tells_ids and delta.choice not in self._heads:
                extras += b"," + _encode(self._prompt_extras(delta.choice // self._call.params.n))[1:-1]
            frames = opening + _encode(delta.text) + extras + b',"finish_reason":null}' + self._closing
            self._heads[delta.choice] = opening
        if delta.finish_reason is not None:
            reason = delta.finish_reason.encode()
            frames += opening + b'"","logprobs":null,"finish_reason":"' + reason + b'"}' + self._closing
        return frames

    def choice(self, index: int, text: str, whole: Delta) -> dict[str, Any]:
        """See `Frames.choice`."""
        extras = {**self._whole_extras(whole), **self._prompt_extras(index // self._call.params.n)}
        return {"index": index, "text": text, **extras, "finish_reason": whole.finish_reason}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        call = self._call
        return completion_logprobs(delta.logprobs, self._tokenizer, call.params.num_told, call.tokens_as_ids)


class ChatFrames(Frames):
    """`chat.completion` and `chat.completion.chunk` objects. A choice's first frame has its role."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    text_end = b"}"

    def _frames(self, delta: Delta) -> bytes:
        opening = b'%s{"index":%d,"delta":' % (self._opening, delta.choice)
        frames = b""
        if delta.choice not in self._heads:
            frames = self._introduction(opening)
            self._heads[delta.choice] = opening + b'{"content":'
        if delta.calls or delta.reasoning:
            frames += self._parts(delta, opening)
        elif delta.text or self._has_more_than_text(delta):
            text = _encode(delta.text)
            extras = self._extras(delta)
            frames += opening + b'{"content":' + text + b"}" + extras + b',"finish_reason":null}' + self._closing
        if delta.finish_reason is not None:
            reason = delta.finish_reason.encode()
            frames += opening + b'{},"logprobs":null,"finish_reason":"' + reason + b'"}' + self._closing
        return frames

    def choice(self, index: int, text: str, whole: Delta) -> dict[str, Any]:
        """See `Frames.choice`."""
        spoken = text or not (whole.calls or whole.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": text if spoken else None, "refusal": None}
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        if whole.calls:
            message["tool_calls"] = [
                {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in joined([Parsed(calls=tuple(whole.calls))])[1]
            ]
        return {"index": index, "message": message, **self._whole_extras(whole), "finish_reason": whole.finish_reason}

    def _introduction(self, opening: bytes) -> bytes:
        """The first frame of a choice; the first of the call has the prompt's fields as well."""
        closing = b"]" + self._opening_tail
        if self._tells_ids and not self._heads:
            closing = b"]," + _encode(self._prompt_extras(0))[1:-1] + self._opening_tail
        return opening + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' + closing

    def _parts(self, delta: Delta, opening: bytes) -> bytes:
        """A frame each for thoughts, text and every call; what is said of the tokens comes with the first.

        OpenAI's chunks hold one entry of `tool_calls`, and some clients read no other.
        """
        parts: list[dict[str, Any]] = []
        if delta.reasoning:
            parts.append({"reasoning_content": delta.reasoning})
        if delta.text:
            parts.append({"content": delta.text})
        parts += [{"tool_calls": [_call_body(one)]} for one in delta.calls]
        extras, frames = self._extras(delta), []
        for part in parts:
            frames.append(opening + _encode(part) + extras + b',"finish_reason":null}' + self._closing)
            extras = b',"logprobs":null'
        return b"".join(frames)

    def _whole_call(self) -> dict[str, Any]:
        return self._prompt_extras(0)

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        call = self._call
        return chat_logprobs(delta.logprobs, self._tokenizer, call.params.num_told, call.tokens_as_ids)


def usage_body(usage: TokenUsage) -> dict[str, Any]:
    """Return the `usage` object of an answer."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        body["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


def _call_body(call: CallDelta) -> dict[str, Any]:
    """One call of a chunk: id, type and name come with its first piece."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def chat_logprobs(
    placed: Sequence[PlacedLogprob], tokenizer: Tokenizer, top: int, as_ids: bool = False
) -> dict[str, Any]:
    """Chat format: an entry for each token, each with its `top` best alternatives, and the bytes of all of them.

    as_ids: tokens are named by their ids.
    """
    content = []
    for one in placed:
        entry = _chat_entry(one.logprob.token_id, one.logprob.logprob, tokenizer, as_ids)
        best = one.logprob.top[:top]
        entry["top_logprobs"] = [_chat_entry(token, value, tokenizer, as_ids) for token, value in best]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(
    placed: Sequence[PlacedLogprob], tokenizer: Tokenizer, top: int, as_ids: bool = False
) -> dict[str, Any]:
    """Completions format: parallel lists. The chosen token is always among its own alternatives.

    The first token of an echoed prompt has null. With a `top` of 0 it is the only one there. as_ids: as above.
    """
    logprobs = [(one.logprob, one.told) for one in placed]
    return {
        "tokens": [_name(one.token_id, tokenizer, as_ids) for one, _ in logprobs],
        "token_logprobs": [_finite(one.logprob) if told else None for one, told in logprobs],
        "top_logprobs": [
            {
                _name(token, tokenizer, as_ids): _finite(value)
                for token, value in (*one.top[:top], (one.token_id, one.logprob))
            }
            if told
            else None
            for one, told in logprobs
        ],
        "text_offset": [one.text_offset for one in placed],
    }


def prompt_logprobs(
    scored: Sequence[TokenLogprob], tokenizer: Tokenizer, top: int
) -> Iterator[dict[str, Any] | None]:
    """vLLM's format: null for the first token of the prompt, then an object from ids to log-probabilities each.

    The prompt's own token comes first. rank: 1 is the most likely; of equals each has the last place.
    """
    yield None
    for one in scored:
        yield _ranked(one, tokenizer, top)


def _ranked(one: TokenLogprob, tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    best = {token: (value, rank) for rank, (token, value) in enumerate(one.top[:top], 1)}
    own = {one.token_id: best.get(one.token_id, (one.logprob, one.rank))}
    return {
        str(token): {
            "logprob": _finite(value),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token).decode(errors="replace"),
        }
        for token, (value, rank) in {**own, **best}.items()
    }


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer, as_ids: bool = False) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id)
    name = f"token_id:{token_id}" if as_ids else spelled.decode(errors="replace")
    return {"token": name, "logprob": _finite(logprob), "bytes": list(spelled)}


def _name(token_id: int, tokenizer: Tokenizer, as_ids: bool) -> str:
    """The token's text, or its id; one that is half a character is spelled `bytes:\\xf0\\x9f`, as OpenAI does."""
    if as_ids:
        return f"token_id:{token_id}"
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in spelled])


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST
