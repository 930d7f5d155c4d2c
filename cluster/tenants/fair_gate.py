"""In front of the replicas: a bounded number of sequences goes in, the rest wait until their tenant's turn comes."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from cluster.admission.deadline import deadline_exceeded
from cluster.errors import ApiError
from cluster.generation import NO_CONTEXT, CallContext, TokenChunk, TokenSource
from cluster.tenants.fair_queue import FairQueue
from engine.errors import ConfigError
from engine.request import Request

UNBOUNDED = 2**62
_LOOK_AGAIN = 0.5  # seconds after which the bound is asked anew while requests wait: replicas come and go
_LONGEST_RETRY = 60  # seconds
_PACE_WEIGHT = 0.1  # of the last interval in the mean time between two turns


@dataclass(frozen=True, slots=True)
class FairGateConfig:
    """max_waiting: requests of one tenant that may wait. max_wait: seconds that one may. Raises `ConfigError`."""

    max_waiting: int = 4096
    max_wait: float = 60.0

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting must be at least 1, not {self.max_waiting}", "max_waiting")
        if self.max_wait <= 0:
            raise ConfigError(f"max_wait must be above 0 seconds, not {self.max_wait}", "max_wait")


class FairGate:
    """Hands requests to `source`, whose turn it is first. Used on one event loop.

    bound: sequences that may be inside at once, asked for each request. A request with several may go over it, so
    that a large one is never passed over for ever. While fewer are inside, nobody waits.
    """

    def __init__(self, source: TokenSource, bound: Callable[[], int], config: FairGateConfig | None = None) -> None:
        self.source = source
        self.shed: Counter[str] = Counter()  # tenant -> requests that were refused because too many wait, or too long
        self._bound = bound
        self._config = config or FairGateConfig()
        self._queue: FairQueue[_Turn] = FairQueue()
        self._inside = 0
        self._look_again: asyncio.TimerHandle | None = None
        self._pace = 0.0  # seconds between two turns while requests wait
        self._last_turn = 0.0

    @classmethod
    def unbounded(cls, source: TokenSource) -> FairGate:
        """Return one that lets in as many requests at a time as come."""
        return cls(source, lambda: UNBOUNDED)

    @property
    def num_inside(self) -> int:
        """Sequences that were handed on and have not ended."""
        return self._inside

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    def waiting(self) -> dict[str, int]:
        """Return how many requests of each tenant wait, of those that have any."""
        return self._queue.lengths()

    def generate(self, tenant: str, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        """Run a request of `tenant` once it is its turn; see `TokenSource.generate`. The iterator must be closed.

        Raises `ApiError` (`overloaded`, 429) where too many of the tenant wait, or it waited too long.
        """
        return _Turn(self, tenant, request, context)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count generated tokens as used by a tenant, so that its later turns come later."""
        self._queue.charge(tenant, tokens)

    async def enter(self, turn: _Turn) -> None:
        """Return when `turn` may go in; whoever went in must `leave`."""
        if not self._queue and self._inside < self._bound():
            self._queue.pass_by(turn.tenant, turn.cost)
            self._inside += turn.sequences
            turn.inside = True
            return
        if self._queue.length(turn.tenant) >= self._config.max_waiting:
            raise self._overloaded(turn, f"{self._config.max_waiting} requests of this tenant wait already")
        loop = asyncio.get_running_loop()
        turn.called = loop.create_future()
        latest = loop.time() + self._config.max_wait
        self._queue.push(turn.tenant, turn, turn.cost)
        self._let_in()
        try:
            async with asyncio.timeout_at(latest if turn.deadline is None else min(latest, turn.deadline)):
                await turn.called
        except TimeoutError:
            if turn.deadline is not None and turn.deadline < latest:
                raise deadline_exceeded("the request's deadline passed while it waited for its turn") from None
            raise self._overloaded(turn, f"the request waited {self._config.max_wait:g} s for its turn") from None
        finally:
            if not turn.inside:
                self._queue.remove(turn.tenant, turn)

    def leave(self, turn: _Turn) -> None:
        """Take note that a request has ended."""
        turn.inside = False
        self._inside -= turn.sequences
        self._let_in()
        if not self._inside and not self._queue:
            self._queue.forget()

    def _let_in(self) -> None:
        if not self._queue:
            return
        loop = asyncio.get_running_loop()
        bound = self._bound()
        while self._queue and self._inside < bound:
            turn = self._queue.pop()
            self._inside += turn.sequences
            turn.inside = True
            self._note_pace(loop.time())
            if turn.called is not None and not turn.called.done():
                turn.called.set_result(None)
        if self._queue and self._look_again is None:
            self._look_again = loop.call_later(_LOOK_AGAIN, self._look)

    def _look(self) -> None:
        self._look_again = None
        self._let_in()

    def _note_pace(self, now: float) -> None:
        self._pace += _PACE_WEIGHT * (min(now - self._last_turn, _LONGEST_RETRY) - self._pace)
        self._last_turn = now

    def _overloaded(self, turn: _Turn, reason: str) -> ApiError:
        """Retrying pays once those who wait now have had their turn, at the pace of late."""
        self.shed[turn.tenant] += 1
        seconds = min(max(math.ceil(self._pace * len(self._queue)), 1), _LONGEST_RETRY)
        return ApiError("overloaded", f"{reason}; try again in {seconds} s", retry_after=seconds)


class _Turn:
    """The chunks of one request. Once inside, each is asked straight of the source: there is no cost per token."""

    def __init__(self, gate: FairGate, tenant: str, request: Request, context: CallContext) -> None:
        self.tenant = tenant
        self.sequences = len(request.resume) if request.resume else request.params.n
        self.cost = len(request.prompt_token_ids) + self.sequences
        self.deadline = request.deadline
        self.called: asyncio.Future[None] | None = None
        self.inside = False
        self._gate = gate
        self._request = request
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
            if self.inside:
                self._gate.leave(self)

    def __del__(self) -> None:
        """A place must not be lost for good to a caller that forgot to close."""
        if self.inside:
            self._gate.leave(self)

    async def _first(self) -> TokenChunk:
        if self._closed:
            raise StopAsyncIteration
        await self._gate.enter(self)
        # `TokenSource.generate` promises an iterator that can be closed.
        chunks = self._gate.source.generate(self._request, self._context)
        self._chunks = cast("AsyncGenerator[TokenChunk, None]", chunks)
        return await self._chunks.__anext__()
