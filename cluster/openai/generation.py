"""One call while it runs: tokens of its requests in, text of its choices out, stop strings and usage on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

from cluster.openai.call import Call
from cluster.openai.deltas import Delta, PlacedLogprob, Usage
from cluster.openai.echo import Opening, PromptResult, openings
from cluster.openai.tools.answer import AnswerParser
from cluster.openai.tools.deltas import merged
from cluster.telemetry.metrics import RequestTrack
from cluster.token_source import TokenChunk, TokenSource
from engine.request import Request
from engine.text.detokenizer import TextStream
from engine.text.tokenizer import Tokenizer

MANY_LOGPROBS = 512  # from so many tokens on, telling their log-probabilities takes milliseconds: worth a thread
_PROMPT_END = 16  # tokens of a prompt that tell whether its answer starts with thinking


class Choice:
    """Turns the token chunks of one choice into deltas."""

    def __init__(
        self, index: int, stream: TextStream, opening: Opening | None = None, parser: AnswerParser | None = None
    ) -> None:
        self.done = False
        self.reasoning_tokens = 0
        self._index = index
        self._stream = stream
        self._opening = opening
        self._parser = parser

    def prepare(self) -> None:
        """Work out what the first delta will tell of an echoed prompt, so that `take` does not take long."""
        if self._opening is not None:
            self._opening.placed()

    @property
    def num_tokens(self) -> int:
        """Tokens used so far."""
        return self._stream.num_tokens

    def take(self, chunk: TokenChunk) -> Delta:
        """Return what `chunk` adds; sets `done` with the last delta."""
        if self._parser is None or len(chunk.token_ids) < 2:
            return self._take(chunk)
        # Token by token: which of them were thinking, and which came after the last call, does not depend on the cut.
        delta = Delta(self._index, "", ())
        for one in _cut(chunk):
            _join(delta, self._take(one))
            if self.done:
                break
        return delta

    def _take(self, chunk: TokenChunk) -> Delta:
        stream, ids = self._stream, chunk.token_ids
        before = stream.num_tokens
        stop_token = chunk.finish_reason == "stop" and bool(ids)
        if chunk.logprobs:
            text, placed = self._push_placed(chunk, stop_token)
        else:
            text, placed = stream.push(ids, stop_token), []
        reason = chunk.finish_reason
        if reason is not None and not stream.stopped:
            text += stream.flush()
        if stream.stopped:
            reason = "stop"
            ids = ids[: stream.num_tokens - before]
        self.done = reason is not None
        delta = Delta(self._index, text, ids, placed, reason)
        if self._parser is not None:
            return self._parsed(delta, self._parser)
        return delta if self._opening is None else self._opening.take(delta)

    def _parsed(self, delta: Delta, parser: AnswerParser) -> Delta:
        """Sort the text into thinking, content and calls; the choice is done when its one call is complete."""
        found = parser.feed(delta.text)
        delta.reasoning, delta.text, delta.calls = found.reasoning, found.content, found.calls
        if found.reasoning:
            self.reasoning_tokens = self.num_tokens  # thinking comes first, so all tokens so far were of it
        if delta.finish_reason is not None:
            rest = parser.finish()
            if parser.within_thinking:
                self.reasoning_tokens = self.num_tokens
            delta.reasoning += rest.reasoning
            delta.text += rest.content
            delta.calls = merged((*found.calls, *rest.calls))
        elif parser.done:
            self.done = True
            delta.finish_reason = "stop"
        delta.finish_reason = delta.finish_reason and parser.finish_reason(delta.finish_reason)
        return delta

    def _push_placed(self, chunk: TokenChunk, stop_token: bool) -> tuple[str, list[PlacedLogprob]]:
        """Push token by token, noting where in the text each begins."""
        text, placed = "", []
        last = len(chunk.token_ids) - 1
        for i, (token_id, logprob) in enumerate(zip(chunk.token_ids, chunk.logprobs, strict=True)):
            placed.append(PlacedLogprob(logprob, self._stream.num_chars))
            text += self._stream.push((token_id,), stop_token and i == last)
            if self._stream.stopped:
                break
        return text, placed


def _cut(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """Yield the chunk token by token."""
    last = len(chunk.token_ids) - 1
    for i, token in enumerate(chunk.token_ids):
        reason = chunk.finish_reason if i == last else None
        yield replace(chunk, token_ids=(token,), logprobs=chunk.logprobs[i : i + 1], finish_reason=reason)


def _join(delta: Delta, more: Delta) -> None:
    """Put what follows into `delta`."""
    delta.text += more.text
    delta.reasoning += more.reasoning
    delta.token_ids = (*delta.token_ids, *more.token_ids)
    delta.logprobs = (*delta.logprobs, *more.logprobs)
    delta.calls = merged((*delta.calls, *more.calls))
    delta.finish_reason = more.finish_reason


class Generation:
    """Runs the requests of one call at once. `deltas` may be walked once; closing it aborts what still runs.

    Choice `c` of request `r` is choice `r x n + c` of the call. prompts: what is known of each request's prompt;
    complete before the first delta of its choices.
    """

    def __init__(
        self, call: Call, requests: Sequence[Request], tokenizer: Tokenizer, source: TokenSource, track: RequestTrack
    ) -> None:
        self._requests = requests
        self._source = source
        self._track = track
        self._n = call.params.n
        self._counted = not call.echo_only
        self._tells_cache = call.tells_cache
        self._thinks = call.thinking is not None
        self.prompts = [PromptResult(request.prompt_token_ids) for request in requests]
        streams = [s for one in requests for s in tokenizer.text_streams(call.params, one.prompt_token_ids)]
        begun = zip(streams, openings(call, self.prompts, tokenizer), strict=True)
        self._choices = [
            Choice(i, stream, opening, _answer_parser(call, requests[i // self._n], i, tokenizer))
            for i, (stream, opening) in enumerate(begun)
        ]
        self._open = len(self._choices)
        scored = call.echo and call.params.logprobs is not None
        self._long_echo = scored and max(len(one.prompt_token_ids) for one in requests) > MANY_LOGPROBS
        self._cached = [0] * len(requests)

    @property
    def num_choices(self) -> int:
        """Choices of the whole call."""
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        """Usage so far; complete after the last delta."""
        return Usage(
            prompt_tokens=sum([len(request.prompt_token_ids) for request in self._requests]),
            completion_tokens=sum([choice.num_tokens for choice in self._choices]) if self._counted else 0,
            cached_tokens=self.cached_tokens if self._tells_cache else None,
            reasoning_tokens=sum([choice.reasoning_tokens for choice in self._choices]) if self._thinks else None,
        )

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were found in a prefix cache, told to the client or not."""
        return sum(self._cached)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield deltas as they come until every choice is done; raises the `ApiError` that ended the call."""
        reason = "abort"
        try:
            async with aclosing(self._chunks()) as chunks:
                async for number, chunk in chunks:
                    if chunk.prompt_logprobs:
                        self.prompts[number].logprobs += chunk.prompt_logprobs
                    if self._long_echo and (chunk.token_ids or chunk.finish_reason):
                        await asyncio.to_thread(self._choices[number * self._n + chunk.choice].prepare)
                    delta = self._take(number, chunk)
                    if delta is not None:
                        yield delta
                    if not self._open:
                        return
            raise RuntimeError("the token source ended before every choice had finished")
        except Exception:
            reason = "error"
            raise
        finally:
            self._track.close(reason)

    def _take(self, number: int, chunk: TokenChunk) -> Delta | None:
        """Return what a chunk brings to a choice, None for nothing or when a stop string ended it already."""
        index = number * self._n + chunk.choice
        choice = self._choices[index]
        if chunk.prompt_logprobs and not chunk.token_ids and chunk.finish_reason is None:
            return None
        if choice.done:
            return None
        self._cached[number] = chunk.num_cached_tokens
        delta = choice.take(chunk)
        if delta.token_ids:
            self._track.tokens(index, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._open -= 1
            self._track.ended(index, "length" if delta.finish_reason == "length" else "stop")
            if chunk.finish_reason is None:
                self._source.finish_choice(self._requests[number].request_id, chunk.choice)
        return delta

    async def _chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        if len(self._requests) == 1:
            async with aclosing(_closable(self._source.generate(self._requests[0]))) as chunks:
                async for chunk in chunks:
                    yield 0, chunk
            return
        async with aclosing(_merge([self._source.generate(request) for request in self._requests])) as merged:
            async for item in merged:
                yield item


def _answer_parser(call: Call, request: Request, choice: int, tokenizer: Tokenizer) -> AnswerParser | None:
    """Return the parser of one choice, None where all text is content."""
    if call.tool_use is None and call.thinking is None:
        return None
    thinking = None
    if call.thinking is not None:
        end = tokenizer.decode(request.prompt_token_ids[-_PROMPT_END:], skip_special_tokens=False)
        thinking = call.thinking(call.thinking.starts_within(end))
    tools = None if call.tool_use is None else call.tool_use.new_parser(f"{call.request_id}-{choice}")
    return AnswerParser(thinking, tools)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of one of the merged iterators."""

    error: BaseException | None


async def _merge(sources: Sequence[AsyncIterator[TokenChunk]]) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """Walk all iterators at once; the first error ends them all. The queue is short: a slow reader slows them."""
    queue: asyncio.Queue[tuple[int, TokenChunk | _End]] = asyncio.Queue(maxsize=2 * len(sources))
    tasks = [asyncio.create_task(_pump(i, source, queue)) for i, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if not isinstance(item, _End):
                yield number, item
                continue
            if item.error is not None:
                raise item.error
            running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    number: int, source: AsyncIterator[TokenChunk], queue: asyncio.Queue[tuple[int, TokenChunk | _End]]
) -> None:
    error: BaseException | None = None
    try:
        async with aclosing(_closable(source)) as chunks:
            async for chunk in chunks:
                await queue.put((number, chunk))
    except Exception as caught:
        error = caught
    await queue.put((number, _End(error)))


def _closable(source: AsyncIterator[TokenChunk]) -> AsyncGenerator[TokenChunk, None]:
    """`TokenSource.generate` promises an iterator that can be closed."""
    return cast("AsyncGenerator[TokenChunk, None]", source)
