"""Answers with log-probabilities of many tokens: so many at a time as links and routers can hold.

Links break where a peer does not take what is sent, and nothing holds a replica back. So what such answers may bring
together is bounded before they begin.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.admission.deadline import deadline_exceeded
from engine.request import Request
from engine.sampling_params import MOST_LOGPROBS


class LogprobRoom:
    """Lets requests in one after the other, as there is room for all that they may bring. Used on one event loop."""

    def __init__(self, most: int = MOST_LOGPROBS) -> None:
        self._most = most
        self._inside = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def of(self, request: Request, vocab_size: int) -> AsyncIterator[None]:
        """Hold the room that a request needs; raises `ApiError` where its deadline passes before there is any."""
        size = min(self._size(request, vocab_size), self._most)
        await self._enter(size, request.deadline)
        try:
            yield
        finally:
            self._inside -= size
            self._let_in()

    def _size(self, request: Request, vocab_size: int) -> int:
        params = request.params
        tokens = self._most if params.max_tokens is None else params.max_tokens
        return params.n * tokens * params.num_alternatives(vocab_size)

    async def _enter(self, size: int, deadline: float | None) -> None:
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, called))
        self._let_in()
        try:
            async with asyncio.timeout_at(deadline):
                await called
        except BaseException as error:
            if called.done() and not called.cancelled():
                self._inside -= size
            called.cancel()
            self._let_in()
            if isinstance(error, TimeoutError):
                raise deadline_exceeded(
                    "the request's deadline passed before there was room for its logprobs"
                ) from error
            raise

    def _let_in(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._inside + self._waiting[0][0] <= self._most):
            size, called = self._waiting.popleft()
            if not called.done():
                self._inside += size
                called.set_result(None)
