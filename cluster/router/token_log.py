"""What the router remembers of a live request: all that is needed to go on with it on another replica."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from cluster.errors import ApiError
from cluster.token_source import TokenChunk
from engine.report import TokenLogprob
from engine.request import Request


class ChoiceLog:
    """One choice: its output tokens so far, and how many of them the consumer has taken.

    check_at: the output position from which on the dispatcher looks at the choice more closely (first token of an
    attempt, slow consumer), so that the rows between cost nothing.
    """

    __slots__ = ("check_at", "choice", "delivered", "finish_reason", "finish_told", "log", "logprobs", "tokens")

    def __init__(self, log: TokenLog, choice: int, tokens: tuple[int, ...]) -> None:
        self.log = log
        self.choice = choice
        self.tokens = list(tokens)
        self.logprobs: list[TokenLogprob] = []  # one per token beyond those the request came with, if it wants any
        self.delivered = len(tokens)
        self.check_at = len(tokens)
        self.finish_reason: str | None = None
        self.finish_told = False

    @property
    def pending(self) -> int:
        """Tokens that the consumer has not taken."""
        return len(self.tokens) - self.delivered

    @property
    def has_news(self) -> bool:
        """Whether `take` would bring tokens or the end."""
        return self.delivered < len(self.tokens) or (self.finish_reason is not None and not self.finish_told)

    def finish(self, reason: str) -> None:
        """Note that the choice has ended; the first reason stays."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.log.num_open -= 1

    def discard(self) -> None:
        """End the choice on behalf of the consumer, who wants nothing more of it."""
        self.finish("stop")
        self.finish_told = True
        self.delivered = len(self.tokens)
        self.logprobs.clear()

    def take(self) -> TokenChunk:
        """Return what is new as one chunk."""
        tokens = tuple(self.tokens[self.delivered :])
        self.delivered += len(tokens)
        logprobs: tuple[TokenLogprob, ...] = ()
        if self.logprobs:
            logprobs = tuple(self.logprobs)
            self.logprobs.clear()
        self.finish_told = self.finish_reason is not None
        log = self.log
        return TokenChunk(
            self.choice, tokens, logprobs, self.finish_reason, log.num_cached_tokens, fingerprint=log.fingerprint
        )


class TokenLog:
    """The choices of one request, and the one consumer that waits for them. Used on one event loop.

    num_open: choices that have not ended. num_cached_tokens: prompt tokens from the first replica's prefix cache.
    news: whether something came since the last `take`. num_scored: prompt tokens whose log-probabilities came.
    embedding: the pooled state, once it came. fingerprint: of the model whose tokens these are, or that they are to
    be of; None before the first token of any.
    """

    __slots__ = (
        "_prompt_logprobs",
        "_waiter",
        "choices",
        "embedding",
        "error",
        "fingerprint",
        "news",
        "num_cached_tokens",
        "num_open",
        "num_scored",
        "request",
    )

    def __init__(self, request: Request, fingerprint: str | None = None) -> None:
        self.request = request
        self.fingerprint = fingerprint
        logs = request.resume if request.resume is not None else dict.fromkeys(range(request.params.n), ())
        self.choices = {choice: ChoiceLog(self, choice, tokens) for choice, tokens in logs.items()}
        self.num_open = len(self.choices)
        self.num_cached_tokens = 0
        self.num_scored = request.num_scored_tokens
        self.embedding: tuple[float, ...] | None = None
        self._prompt_logprobs: list[TokenLogprob] = []
        self.error: ApiError | None = None
        self.news = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self.num_open == 0

    @property
    def longest(self) -> int:
        """Output tokens of the longest choice."""
        return max((len(choice.tokens) for choice in self.choices.values()), default=0)

    def unfinished(self) -> list[ChoiceLog]:
        """Return the choices that still run."""
        return [choice for choice in self.choices.values() if choice.finish_reason is None]

    def resume(self) -> dict[int, tuple[int, ...]] | None:
        """Return what another replica needs to go on: unfinished choice -> output tokens so far.

        None where no token came: begun anew, the choices share their prompt, and none runs ahead of what it reports.
        """
        logs = {choice.choice: tuple(choice.tokens) for choice in self.unfinished()}
        return logs if any(choice.tokens for choice in self.choices.values()) else None

    def take(self) -> list[TokenChunk]:
        """Return one chunk for every choice that has news."""
        self.news = False
        chunks = [choice.take() for choice in self.choices.values() if choice.has_news]
        if self._prompt_logprobs:
            told, self._prompt_logprobs = tuple(self._prompt_logprobs), []
            bare = TokenChunk(next(iter(self.choices)), (), num_cached_tokens=self.num_cached_tokens)
            chunks[:1] = [replace(chunks[0] if chunks else bare, prompt_logprobs=told)]
        if self.embedding is not None:
            chunks[:1] = [replace(chunk, embedding=self.embedding) for chunk in chunks[:1]]
        return chunks

    def add_prompt_logprobs(self, first: int, logprobs: Sequence[TokenLogprob]) -> bool:
        """Take in log-probabilities of the prompt from position `first` on; False if others should have come."""
        if first != max(self.num_scored, 1) or not logprobs:
            return False
        self._prompt_logprobs += logprobs
        self.num_scored = first + len(logprobs)
        self.wake()
        return True

    def fail(self, error: ApiError) -> None:
        """End the request with its one typed error; the first one stays, and a whole answer is not taken back."""
        if self.error is None and not self.finished:
            self.error = error
        self.wake()

    def wake(self) -> None:
        """Let the consumer look again."""
        self.news = True
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def next_news(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return what ends with the next `wake`. For the consumer, when there are no news."""
        self._waiter = loop.create_future()
        return self._waiter
