"""A bound on thinking: after so many tokens its end is written in the model's place, and the model goes on behind it.

The model's own request ends there; the rest is asked for as one that goes on with a log of tokens, as after the loss
of a replica. What comes depends on the tokens alone, so that another router comes to the same.
Source: vLLM's `thinking_token_budget`; Anthropic API reference, "extended thinking".
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from cluster.openai.parsers.reasoning import ReasoningParser
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk, TokenSource
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer

_PROMPT_END = 16  # tokens of a prompt that show whether its answer starts with thinking
_ALL = SamplingParams(skip_special_tokens=False)


class BoundThinking:
    """A token source whose requests, of one choice each, think for `budget` tokens at most."""

    def __init__(self, source: TokenSource, budget: int, parser: type[ReasoningParser], tokenizer: Tokenizer) -> None:
        self._source = source
        self._budget = budget
        self._parser = parser
        self._tokenizer = tokenizer
        self._running: dict[str, str] = {}  # what a request goes by after its thinking was ended

    async def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncGenerator[TokenChunk, None]:
        """Yield the chunks of a request; see `TokenSource.generate`. Its `max_tokens` must be known."""
        log = list((request.resume or {}).get(0, ()))
        thinking = _Thinking(self._parser, self._tokenizer, request)
        thinking.add(log[: self._budget])
        if len(log) > self._budget or (not self._is_over(log, thinking) and len(log) == self._budget):
            thinking.close()  # it was looked at already
        last = TokenChunk(0, ())
        if not self._is_over(log, thinking):
            async with aclosing(_closable(self._source.generate(request, context))) as chunks:
                async for chunk in chunks:
                    last = chunk if len(log) >= self._budget else self._cut(chunk, self._budget - len(log))
                    log += last.token_ids
                    thinking.add(last.token_ids)
                    if last.finish_reason is None and self._is_over(log, thinking):
                        if last.token_ids:
                            yield last
                        break
                    yield chunk
                    if len(log) >= self._budget:  # the thinking ended before
                        thinking.close()
                else:
                    return
        room = (request.params.max_tokens or 0) - len(log)
        end = tuple(self._tokenizer.encode(self._parser.forced_end(), add_special_tokens=False)[:room])
        reason = "length" if len(end) == room else None
        yield TokenChunk(0, end, (), reason, last.num_cached_tokens, fingerprint=last.fingerprint)
        if reason is not None:
            return
        rest = replace(request, request_id=f"{request.request_id}@answer", resume={0: (*log, *end)}, retried=True)
        self._running[request.request_id] = rest.request_id
        same_model = context if last.fingerprint is None else replace(context, fingerprint=last.fingerprint)
        async with aclosing(_closable(self._source.generate(rest, same_model))) as chunks:
            async for chunk in chunks:
                yield chunk

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice; see `TokenSource.finish_choice`."""
        self._source.finish_choice(self._running.get(request_id, request_id), choice)

    def _is_over(self, log: list[int], thinking: _Thinking) -> bool:
        return len(log) >= self._budget and thinking.within

    def _cut(self, chunk: TokenChunk, room: int) -> TokenChunk:
        if len(chunk.token_ids) <= room:
            return chunk
        return replace(chunk, token_ids=chunk.token_ids[:room], finish_reason=None)


class _Thinking:
    """Whether the output of a request is still within its thinking."""

    def __init__(self, parser: type[ReasoningParser], tokenizer: Tokenizer, request: Request) -> None:
        end = tokenizer.decode(request.prompt_token_ids[-_PROMPT_END:], skip_special_tokens=False)
        self._parser = parser(parser.starts_within(end))
        (self._stream,) = tokenizer.text_streams(_ALL, request.prompt_token_ids)
        self._closed = False

    @property
    def within(self) -> bool:
        """Whether it is."""
        return not self._closed and self._parser.within

    def add(self, token_ids: tuple[int, ...] | list[int]) -> None:
        """Take the next tokens."""
        if not self._closed:
            self._parser.feed(self._stream.push(token_ids))

    def close(self) -> None:
        """It has ended before the budget did."""
        self._closed = True


def _closable(chunks: AsyncIterator[TokenChunk]) -> AsyncGenerator[TokenChunk, None]:
    return cast("AsyncGenerator[TokenChunk, None]", chunks)
