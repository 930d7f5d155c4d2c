"""One call while it runs: tokens of its requests in, deltas of its choices out, or one whole answer."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeVar, cast

from cluster.answer_log import AnswerFacts, AnswerLog, NoLog
from cluster.errors import ApiError
from cluster.openai.call import Call, build_requests
from cluster.openai.choices import (
    Choice,
    Collected,
    Delta,
    PromptResult,
    TokenUsage,
    answer_parser,
    openings,
)
from cluster.openai.frames import Frames
from cluster.openai.served_model import ServedModel
from cluster.openai.thinking_budget import BoundThinking
from cluster.openai.token_order import token_by_token
from cluster.telemetry.metrics import RequestTrack
from cluster.token_source import TokenChunk, TokenSource
from engine.request import Request
from engine.text.tokenizer import Tokenizer

T = TypeVar("T")
REPLAYED_AT_ONCE = 32  # chunks of an earlier router, whose frames take a few milliseconds
MANY_LOGPROBS = 512  # from so many tokens on, encoding their log-probabilities takes milliseconds: worth a thread


class Generation:
    """Runs the requests of one call at once. `deltas` may be walked once; closing it aborts what still runs.

    Choice `c` of request `r` is choice `r x n + c` of the call. prompts: what is known of each request's prompt;
    complete before the first delta of its choices. catches_up: whether more deltas that an earlier router has had
    come at once behind the last one: what is sent of them can wait for each other.
    """

    def __init__(
        self,
        call: Call,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        source: TokenSource,
        track: RequestTrack,
        log: AnswerLog | None = None,
    ) -> None:
        """log: of the answer; what an earlier router has had comes from there, and is not computed again."""
        self.catches_up = self._replays = False
        self._log = log or NoLog()
        # The earlier router may live, and have the request by its name still.
        again = f"@{secrets.token_hex(4)}" if self._log.continues else ""
        self._requests = [replace(one, request_id=one.request_id + again) for one in requests] if again else requests
        self._source = source
        if call.thinking_budget is not None and call.thinking is not None:
            self._source = BoundThinking(source, call.thinking_budget, call.thinking, tokenizer)
        self._track = track
        self._n = call.params.n
        self._counted = not call.echo_only
        self._tells_cache = call.tells_cache
        self._thinks = call.thinking is not None
        self.prompts = [PromptResult(request.prompt_token_ids) for request in requests]
        streams = [s for one in requests for s in tokenizer.text_streams(call.params, one.prompt_token_ids)]
        begun = zip(streams, openings(call, self.prompts, tokenizer), strict=True)
        self._choices = [
            Choice(i, stream, opening, answer_parser(call, requests[i // self._n], i, tokenizer), call.shows_thinking)
            for i, (stream, opening) in enumerate(begun)
        ]
        self._open = len(self._choices)
        scored = call.echo and call.params.logprobs is not None
        self._long_echo = scored and max(len(one.prompt_token_ids) for one in requests) > MANY_LOGPROBS
        self._cached: dict[int, int] = {}  # by request, as its first chunk says

    @property
    def num_choices(self) -> int:
        """Choices of the whole call."""
        return len(self._choices)

    @property
    def usage(self) -> TokenUsage:
        """Usage so far; complete after the last delta."""
        return TokenUsage(
            prompt_tokens=sum([len(request.prompt_token_ids) for request in self._requests]),
            completion_tokens=sum([choice.num_tokens for choice in self._choices]) if self._counted else 0,
            cached_tokens=self.cached_tokens if self._tells_cache else None,
            reasoning_tokens=sum([choice.reasoning_tokens for choice in self._choices]) if self._thinks else None,
        )

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were found in a prefix cache, whether reported to the client or not."""
        return sum(self._cached.values())

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield deltas as they come until every choice is done; raises the `ApiError` that ended the call."""
        reason = "abort"
        try:
            async with aclosing(self._ordered()) as chunks:
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
        self._cached.setdefault(number, chunk.num_cached_tokens)
        delta = choice.take(chunk)
        if delta.token_ids:
            self._track.tokens(index, len(delta.token_ids), again=self._replays)
        if delta.finish_reason is not None:
            self._open -= 1
            self._track.ended(index, "length" if delta.finish_reason == "length" else "stop")
            if chunk.finish_reason is None:
                self._source.finish_choice(self._requests[number].request_id, chunk.choice)
        return delta

    def _ordered(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """Return what comes; of an answer that is kept in an order that its tokens alone decide."""
        if self._log.kept is None:
            return self._chunks()
        order = [(number, choice) for number in range(len(self._requests)) for choice in range(self._n)]
        return token_by_token(
            self._chunks(), order, lambda number, choice: self._choices[number * self._n + choice].done
        )

    async def _chunks(self) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """Yield what an earlier router has had, then what comes."""
        past = self._log.past
        for i, (number, chunk) in enumerate(past, 1):
            self.catches_up, self._replays = i < len(past), True
            if i % REPLAYED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn: their clients wait, too
            yield number, chunk
        if self._log.kept is not None and self._log.kept.coming is not None:
            async with aclosing(_closable(self._log.kept.coming())) as coming:
                async for number, chunk in coming:
                    yield number, chunk
            return
        self._replays = False
        async with aclosing(self._new_chunks(self._unfinished())) as chunks:
            async for number, chunk in chunks:
                self._log.add(number, chunk)
                yield number, chunk

    async def _new_chunks(self, requests: dict[int, Request]) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        if len(requests) == 1:
            ((number, request),) = requests.items()
            async with aclosing(_closable(self._source.generate(request))) as chunks:
                async for chunk in chunks:
                    yield number, chunk
            return
        running = {number: self._source.generate(request) for number, request in requests.items()}
        async with aclosing(_merge(running)) as merged:
            async for item in merged:
                yield item

    def _unfinished(self) -> dict[int, Request]:
        """Return what is left to run, by number: of a request that has run, the choices that are not done."""
        if not self._log.past:
            return dict(enumerate(self._requests))
        logs = [defaultdict[int, list[int]](list) for _ in self._requests]
        for number, chunk in self._log.past:
            logs[number][chunk.choice] += chunk.token_ids
        left = {number: self._rest(number, log) for number, log in enumerate(logs)}
        return {number: request for number, request in left.items() if request is not None}

    def _rest(self, number: int, log: Mapping[int, list[int]]) -> Request | None:
        """Return request `number` as it goes on behind the output tokens of its choices, None where all are done."""
        first = number * self._n
        ended = {chunk.choice for of, chunk in self._log.past if of == number and chunk.finish_reason is not None}
        open_ones = [c for c in range(self._n) if not self._choices[first + c].done and c not in ended]
        if not open_ones:
            return None
        scored = len(self.prompts[number].logprobs)
        return replace(
            self._requests[number],
            resume={c: tuple(log.get(c, ())) for c in open_ones} if any(log.values()) else None,
            num_scored_tokens=scored + 1 if scored else 0,
            retried=True,
        )


def built(call: Call, model: ServedModel, log: AnswerLog) -> tuple[Call, list[Request]]:
    """Return a call and its requests with what its answer shows: as an earlier router has begun it, if one has.

    Raises `ApiError` (`model_changed`) where that one made something else of the request.
    """
    if (kept := log.kept) is not None:
        drawn = call.seed if kept.seed is None or call.params.seed is not None else kept.seed
        call = replace(call, request_id=kept.request_id, seed=drawn)
    if (begun := log.facts) is not None:
        call = replace(call, request_id=begun.request_id, created=begun.created, seed=begun.seed)
    requests = build_requests(call, model)
    facts = AnswerFacts(call.request_id, call.created, call.seed, _digest(requests))
    if log.begin(facts).asked not in (facts.asked, b""):
        message = "the routers were updated meanwhile, and make another prompt of the request; send it again"
        raise ApiError("model_changed", message)
    return call, requests


def _digest(requests: Sequence[Request]) -> bytes:
    """Return a digest of what is to be generated, by which two routers know that they mean the same."""
    digest = blake2b(digest_size=16)
    for request in requests:
        digest.update(array("q", request.prompt_token_ids).tobytes())
        digest.update(repr((request.params, request.seed)).encode())
    return digest.digest()


async def whole_body(call: Call, generation: Generation, deltas: AsyncIterator[Delta], frames: Frames) -> bytes:
    """Return the JSON body of a call's answer, once all its choices are done."""
    collected = [Collected() for _ in range(generation.num_choices)]
    async for delta in deltas:
        collected[delta.choice].add(delta)
    usage = generation.usage

    def body() -> bytes:
        return frames.body([frames.choice(i, *one.whole(i)) for i, one in enumerate(collected)], usage)

    many = _num_logprobs(call, usage) > MANY_LOGPROBS
    return await asyncio.to_thread(body) if many else body()


def _num_logprobs(call: Call, usage: TokenUsage) -> int:
    """Tokens of a whole answer whose log-probabilities are returned, at least; all of some where these are many."""
    output = usage.completion_tokens if call.params.logprobs is not None else 0
    if call.params.whole_rows:
        return MANY_LOGPROBS + 1
    return output + (usage.prompt_tokens if call.params.prompt_logprobs is not None else 0)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of one of the merged iterators."""

    error: BaseException | None


async def _merge(sources: Mapping[int, AsyncIterator[TokenChunk]]) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """Walk all iterators at once; the first error ends them all. The queue is short: a slow reader slows them."""
    queue: asyncio.Queue[tuple[int, TokenChunk | _End]] = asyncio.Queue(maxsize=2 * len(sources))
    tasks = [asyncio.create_task(_pump(i, source, queue)) for i, source in sources.items()]
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


def _closable(source: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """`TokenSource.generate`, and what follows an answer, promise iterators that can be closed."""
    return cast("AsyncGenerator[T, None]", source)
