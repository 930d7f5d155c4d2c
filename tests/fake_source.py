"""A token source without an engine: says what a test tells it to say, and remembers what was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk
from engine.report import TokenLogprob
from engine.request import Request

Script = Callable[[Request, int], Sequence[int]]


@dataclass
class FakeSource:
    """Implements `TokenSource`. `script` gives the tokens of a choice, `eos` ends them with reason "stop".

    hold: tokens of each choice after which the source waits for `go`. error: raised after `hold` tokens.
    """

    script: Script
    eos: int | None = None
    chunk: int = 1
    hold: int | None = None
    error: Exception | None = None
    cached: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[Request] = field(default_factory=list)
    contexts: list[CallContext] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)

    async def generate(self, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        """Yield the script's tokens, the choices taking turns."""
        self.requests.append(request)
        self.contexts.append(context)
        try:
            if request.pooling is not None:
                state = (float(len(request.prompt_token_ids)), 1.0)
                yield TokenChunk(0, (), finish_reason="stop", embedding=state)
                return
            for chunk in self._prompt_chunks(request):
                yield chunk
            plans = {choice: self._plan(request, choice) for choice in self._choices(request)}
            sent = 0
            while plans:
                if self.hold is not None and sent >= self.hold:
                    await self._pause()
                for choice in list(plans):
                    if (request.request_id, choice) in self.ended:
                        del plans[choice]
                        continue
                    yield self._chunk(request, choice, plans)
                sent += self.chunk
                await asyncio.sleep(0)
        finally:
            self.closed.append(request.request_id)

    def _prompt_chunks(self, request: Request) -> list[TokenChunk]:
        """The prompt's log-probabilities, where they are wanted, two at a time."""
        top = request.params.prompt_logprobs
        if top is None:
            return []
        scored = [replace(self._logprob(token, top), rank=token + 1) for token in request.prompt_token_ids[1:]]
        return [TokenChunk(0, (), prompt_logprobs=tuple(scored[i : i + 2])) for i in range(0, len(scored), 2)]

    def finish_choice(self, request_id: str, choice: int) -> None:
        """End one choice."""
        self.ended.append((request_id, choice))

    async def _pause(self) -> None:
        if self.error is not None:
            raise self.error
        await self.go.wait()

    def _choices(self, request: Request) -> list[int]:
        return list(request.resume or range(request.params.n))

    def _plan(self, request: Request, choice: int) -> list[int]:
        tokens = list(self.script(request, choice))
        limit = request.params.max_tokens
        return tokens if limit is None else tokens[:limit]

    def _chunk(self, request: Request, choice: int, plans: dict[int, list[int]]) -> TokenChunk:
        ids, rest = plans[choice][: self.chunk], plans[choice][self.chunk :]
        reason = None
        if rest:
            plans[choice] = rest
        else:
            del plans[choice]
            reason = "stop" if ids and ids[-1] == self.eos else "length"
        logprobs = tuple(self._logprob(token, request.params.logprobs) for token in ids)
        asked = request.params.logprobs is not None
        return TokenChunk(choice, tuple(ids), logprobs if asked else (), reason, self.cached)

    def _logprob(self, token: int, top: int | None) -> TokenLogprob:
        alternatives = tuple((token + i, -0.5 - i) for i in range(top or 0))
        return TokenLogprob(token, -0.5, alternatives)
