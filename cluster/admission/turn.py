"""One request at the gate: it waits for its turn, and then its chunks come straight from the source."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Protocol, cast

from cluster.errors import ApiError
from cluster.token_source import CallContext, TokenChunk, TokenSource
from engine.request import Request


class Gate(Protocol):
    """What a turn asks of its gate (`cluster.admission.fair_gate`)."""

    source: TokenSource
    on_turned_away: Callable[[Request, float, str], None]

    async def enter(self, turn: Turn) -> None:
        """Return when `turn` may go in."""

    def leave(self, turn: Turn) -> None:
        """Take note that a request has ended."""

    def patience(self, turn: Turn) -> float:
        """Return the seconds that one who has waited may still wait inside, where no replica is there."""
        ...

    def begun(self, turn: Turn) -> None:
        """Take note that a replica computes something for a request."""

    def found_cached(self, turn: Turn, tokens: int) -> None:
        """Take note that so many tokens of a prompt need no room of their own."""


class Turn:
    """The chunks of one request. Once inside, each is asked straight of the source: there is no cost per token.

    cost: what its tenant is charged when it goes in. work: tokens to be computed for it, as far as can be told.
    held: tokens of room that it takes up inside. waits: whether it stands in the queue, since `since`.
    came_to_none: whether there was no replica then. compiles: whether what its output must match may have to be
    compiled first, in the replica. aside: whether it went in and takes up no room yet, since that may be so.
    """

    def __init__(self, gate: Gate, tenant: str, request: Request, context: CallContext) -> None:
        self.tenant = tenant
        self.request = request
        self.prompt = len(request.prompt_token_ids)
        self.sequences = len(request.resume) if request.resume else request.params.n
        self.cost = self.prompt + self.sequences
        self.priority = request.priority
        self.deadline = request.deadline
        self.work = self.cost
        self.held = 0
        self.since = 0.0
        self.called: asyncio.Future[None] | None = None
        self.waits = False
        self.came_to_none = False
        self.inside = False
        self.compiles = request.params.structured is not None
        self.aside = False
        self._gate = gate
        self._context = context
        self._chunks: AsyncGenerator[TokenChunk, None] | None = None
        self._closed = False

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self

    def __anext__(self) -> Awaitable[TokenChunk]:
        if self._chunks is not None:
            return self._chunks.__anext__()
        return self._first()

    async def aclose(self) -> None:
        """End the request, wherever it is; can be called twice."""
        self._closed = True
        try:
            if self._chunks is not None:
                await self._chunks.aclose()
        finally:
            self._leave()

    def __del__(self) -> None:
        """A place must not be lost for good to a caller that forgot to close."""
        self._leave()

    def _leave(self) -> None:
        if self.inside:
            self._gate.leave(self)

    def _begun(self) -> None:
        if self.aside:
            self._gate.begun(self)

    async def _first(self) -> TokenChunk:
        if self._closed:
            raise StopAsyncIteration
        try:
            await self._gate.enter(self)
        except BaseException as error:
            context = self._told()
            if context.waited:
                outcome = error.code if isinstance(error, ApiError) else "aborted"
                self._gate.on_turned_away(self.request, context.waited, outcome)
                if context.trace is not None:
                    context.trace.turned_away(self.request, context.waited, error)
            raise
        # `TokenSource.generate` promises an iterator that can be closed.
        chunks = self._gate.source.generate(self.request, self._told())
        self._chunks = cast("AsyncGenerator[TokenChunk, None]", chunks)
        chunk = await self._chunks.__anext__()
        self._begun()
        if chunk.num_cached_tokens and self.inside:
            self._gate.found_cached(self, chunk.num_cached_tokens)
        return chunk

    def _told(self) -> CallContext:
        # Its place is free once the replicas are done with it: a client that reads slowly must not keep it. The
        # source holds no turn alive, or one that its caller dropped would never be known to be dropped.
        turn = weakref.ref(self)

        def on_begin() -> None:
            if (begun := turn()) is not None:
                begun._begun()

        def on_end() -> None:
            if (ended := turn()) is not None:
                ended._leave()

        context = replace(self._context, on_begin=on_begin, on_end=on_end)
        if self.called is None:
            return context
        waited = asyncio.get_running_loop().time() - self.since
        return replace(context, waited=waited, patience=self._gate.patience(self))
