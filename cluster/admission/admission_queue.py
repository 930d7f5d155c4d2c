"""In front of the replicas: bounded work goes in, the rest waits until its tenant's turn comes, or is refused.

The queue and the stream that it hands out share one file: each `enter` of the stream is answered by a `leave`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from cluster.accounts.flight_recorder import is_of
from cluster.admission.capacity import UNBOUNDED, DrainRate, OutputLength, QueueState, RecentRefusals
from cluster.admission.deadline import deadline_exceeded
from cluster.admission.fair_queue import FairQueue
from cluster.admission.inflight import Inflight, QueuedRequest
from cluster.admission.keys import DEFAULT_TENANT
from cluster.errors import ApiError
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk, TokenSource
from engine.errors import ConfigError
from engine.request import Request

_LAST_WAIT = 1.0  # seconds that one has at least for a replica that is let in, if it came while there was one
_CHECK_AGAIN = 0.2  # seconds after which the bounds are asked anew while requests wait: replicas come and go
_LONGEST_RETRY = 600  # seconds
# Why a request is refused: as many wait as may, or it would wait too long, or has.
MANY, LONG = "max_num_queued_reqs", "longest_wait"
REASONS = (MANY, LONG)


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds of the queue. Raises `ConfigError`.

    max_waiting: requests of one tenant that may wait. max_wait: seconds that one may. target_ttft: seconds to the
    first token that are aimed at: as long as that may the wait be at most, None = `max_wait`. absent_wait: seconds
    that one may wait for a replica that comes while there is none; None = as at any time.
    """

    max_waiting: int = 4096
    max_wait: float = 60.0
    target_ttft: float | None = None
    absent_wait: float | None = None

    def __post_init__(self) -> None:
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting must be at least 1, not {self.max_waiting}", "max_waiting")
        for name in ("max_wait", "target_ttft", "absent_wait"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0 seconds, not {value}", name)

    @property
    def longest_wait(self) -> float:
        """Seconds that a request may wait at most while there is a replica."""
        return self.max_wait if self.target_ttft is None else min(self.max_wait, self.target_ttft)


class AdmissionQueue:
    """Hands requests to `source`, whose turn it is first. Used on one event loop.

    bound: sequences that may be inside at once, asked for each request; token_bound: the same in tokens of prompts
    and expected output. A request may go over either, so that a large one is never passed over for ever. While there
    is room for more, no request waits. work_done: tokens of prompts and output that `source` has done, a counter, by
    which the queue's drain rate is measured; None = the work of requests that have ended. serving: whether there is a
    replica at all: time without one says nothing about the rate. Who came while there was one keeps the patience that
    it was promised when there is none for a while; who comes meanwhile has its own (`AdmissionConfig.absent_wait`).

    on_turned_away: called with each request that waited and did not get in, the seconds, and the code of its end.
    refusal: returns why no request is let in now, None where they are.
    """

    def __init__(
        self,
        source: TokenSource,
        bound: Callable[[], int],
        config: AdmissionConfig | None = None,
        token_bound: Callable[[], int] = lambda: UNBOUNDED,
        work_done: Callable[[], int] | None = None,
        serving: Callable[[], bool] = lambda: True,
        on_turned_away: Callable[[Request, float, str], None] = lambda *_: None,
    ) -> None:
        self.refusal: Callable[[], ApiError | None] = lambda: None
        self.source = source
        self.on_turned_away = on_turned_away
        self.rejections: Counter[str] = Counter()  # by `REASONS`
        self.shed: Counter[str] = Counter()  # tenant -> requests that were refused because too many wait, or too long
        self._inflight = Inflight(bound, token_bound)
        self._config = config or AdmissionConfig()
        self._queue: FairQueue[QueuedRequest] = FairQueue()
        self._lengths = OutputLength()
        self._drain = DrainRate()
        self._turned_away = RecentRefusals()
        self._ended_work = 0
        self._serving = serving
        self._work_done = work_done or (lambda: self._ended_work)
        self._check_timer: asyncio.TimerHandle | None = None

    @property
    def num_inside(self) -> int:
        """Sequences that were handed on and have not ended, without those that may wait for a compiler."""
        return self._inflight.sequences

    @property
    def tokens_inside(self) -> int:
        """Tokens of prompts and expected output of what was handed on, without what was found in prefix caches."""
        return self._inflight.tokens

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    def waiting(self) -> dict[str, int]:
        """Return how many requests of each tenant wait, of those that have any."""
        return self._queue.lengths()

    def waits_for(self, name: str, tenant: str | None = None) -> list[tuple[float, str]]:
        """Return, of the requests that their client knows as `name` and that wait: seconds so far, and for what.

        tenant: the requests must be this tenant's; None = any.
        """
        now = asyncio.get_running_loop().time()
        named = [queued for queued in self._queue.items() if is_of(queued.request.request_id, name)]
        found = [queued for queued in named if tenant in (None, queued.tenant)]
        ahead = {queued: self._queue.work_ahead(queued.tenant, queued.priority, queued.work) for queued in found}
        return [
            (
                now - queued.since,
                f"of tenant {queued.tenant}; at most {work} tokens of work, its own included, go first",
            )
            for queued, work in ahead.items()
        ]

    def state(self) -> QueueState:
        """Return what waits now."""
        oldest = self._queue.oldest()
        age = 0.0 if oldest is None else asyncio.get_running_loop().time() - oldest.since
        return QueueState(len(self._queue), self._queue.work, age, self._drain.per_second or 0.0)

    def demand(self) -> QueueState:
        """Return what waits and what was refused of late, which would wait if it were let."""
        waits = self.state()
        requests, work = self._turned_away.of_late(asyncio.get_running_loop().time())
        return replace(waits, requests=waits.requests + requests, tokens=waits.tokens + work)

    def generate(self, tenant: str, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        """Run a request of `tenant` once it is its turn; see `TokenSource.generate`. The iterator must be closed.

        Raises `ApiError`: `overloaded` (429) where too many of the tenant wait, or it would wait too long, or has;
        `no_replica` (503) where that is so, or will be, since there is no replica; `deadline_exceeded` (504).
        """
        return QueuedStream(self, QueuedRequest(tenant, request), context)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count one choice's generated tokens as used by a tenant, so that its later turns come later."""
        self._queue.charge(tenant, tokens)
        if tokens:  # refusals, vectors and whatever ended before its first token say nothing of how long answers are
            self._lengths.seen(tokens)

    def turn_away(self, error: Callable[[], ApiError]) -> None:
        """Refuse all that wait for their turn."""
        for queued in self._queue.items():
            self._drop(queued)
            if queued.called is not None and not queued.called.done():
                queued.called.set_exception(error())

    async def enter(self, queued: QueuedRequest) -> None:
        """Return when `queued` may go in; it must `leave` afterwards."""
        if (refusal := self.refusal()) is not None:
            raise refusal
        queued.work = queued.prompt + self._lengths.of(queued.request, queued.sequences)
        self._let_in()
        # Where there is room still, those that wait do so for a compiler, and block no other request.
        if self._inflight.has_room() and self._inflight.may_enter(queued):
            self._queue.pass_by(queued.tenant, queued.cost)
            self._inflight.enter(queued)
            return
        loop = asyncio.get_running_loop()
        queued.came_to_none = not self._serving()
        queued.since = loop.time()
        self._check_wait(queued)
        queued.waits = True
        queued.called = loop.create_future()
        self._queue.push(queued.tenant, queued, queued.cost, queued.priority, queued.work, kind=queued.compiles)
        self._let_in()
        await self._until_called(queued, queued.called)

    def go_on(self, queued: QueuedRequest) -> None:
        """Let in a request that comes with tokens, so it was in already; it must `leave` afterwards."""
        queued.work = queued.prompt + self._lengths.of(queued.request, queued.sequences)
        self._inflight.enter(queued)

    def leave(self, queued: QueuedRequest) -> None:
        """Take note that a request has ended; once for each that went in."""
        if not queued.inside:
            return
        self._inflight.leave(queued)
        self._ended_work += queued.work
        self._let_in()
        if self._inflight.is_empty() and not self._queue:
            self._queue.forget()

    def begun(self, queued: QueuedRequest) -> None:
        """Take note that a replica computes something for a request: from now on it takes up its room."""
        if queued.aside:
            self._inflight.begun(queued)
            self._let_in()

    def found_cached(self, queued: QueuedRequest, tokens: int) -> None:
        """Take note that so many tokens of a prompt need no room of their own."""
        if queued.inside:
            self._inflight.release(queued, tokens)
            self._let_in()

    def patience(self, queued: QueuedRequest) -> float:
        """Return the seconds that one who has waited may still wait inside, where no replica is there."""
        left = queued.since + self._longest_wait(queued) - asyncio.get_running_loop().time()
        return max(left, 0.0 if queued.came_to_none else _LAST_WAIT)

    def _longest_wait(self, queued: QueuedRequest) -> float:
        """Seconds that a request may wait in all, as things are now."""
        longest, absent = self._config.longest_wait, self._config.absent_wait
        serving = self._serving()
        if absent is None or (serving and not queued.came_to_none):
            return longest
        return absent if queued.came_to_none and not serving else max(longest, absent)

    def _check_wait(self, queued: QueuedRequest) -> None:
        """Refuse at once a request that waiting would not help; raises `ApiError`."""
        self._note_drain(queued.since)
        most = self._config.longest_wait
        if queued.came_to_none:  # the queue may move again in a moment, and then it has as long as the others
            most = max(most, self._config.absent_wait or 0.0)
        seconds = self._drain.foretold(self._queue.work_ahead(queued.tenant, queued.priority, queued.work))
        if seconds is not None and seconds > most:
            raise self._refusal(queued, f"the request would wait {seconds:.1f} s for its turn, {most:g} s at most")
        if queued.deadline is not None and queued.since + (seconds or 0.0) >= queued.deadline:
            raise deadline_exceeded("the request's deadline would pass while it waited for its turn")
        if self._queue.length(queued.tenant) < self._config.max_waiting:
            return
        priority, last = self._queue.last(queued.tenant)
        full = f"{self._config.max_waiting} requests of this tenant wait already"
        if priority <= queued.priority or last.called is None:
            raise self._overloaded(queued, full, MANY)
        self._drop(last)
        if not last.called.done():
            last.called.set_exception(self._overloaded(last, f"{full}, and a more urgent one came", MANY))

    def _drop(self, queued: QueuedRequest) -> None:
        if queued.waits:
            queued.waits = False
            self._queue.remove(queued.tenant, queued, queued.priority)

    async def _until_called(self, queued: QueuedRequest, called: asyncio.Future[None]) -> None:
        """Wait for the turn; raises `ApiError` when waiting is over before it comes."""
        clock, waited_until = asyncio.get_running_loop().time, float("-inf")
        try:
            # It is longer once a replica has come to those who came to none.
            while not called.done() and (latest := self._latest(queued)) > waited_until:
                await asyncio.wait((called,), timeout=max(0.0, latest - clock()))
                waited_until = latest
            if not called.done():
                raise self._too_late(queued)
            called.result()
        finally:
            self._drop(queued)

    def _latest(self, queued: QueuedRequest) -> float:
        """When a request's waiting ends at the latest."""
        latest = queued.since + self._longest_wait(queued)
        return latest if queued.deadline is None else min(latest, queued.deadline)

    def _too_late(self, queued: QueuedRequest) -> ApiError:
        most = self._longest_wait(queued)
        if queued.deadline is not None and queued.deadline < queued.since + most:
            return deadline_exceeded("the request's deadline passed while it waited for its turn")
        return self._refusal(queued, f"the request waited {most:g} s for its turn")

    def _let_in(self) -> None:
        if not self._queue:
            return
        loop = asyncio.get_running_loop()
        while self._queue and self._inflight.has_room():
            queued = self._queue.pop_of(self._inflight.may_enter)
            if queued is None:
                break
            queued.waits = False
            self._inflight.enter(queued)
            if queued.called is not None and not queued.called.done():
                queued.called.set_result(None)
        self._note_drain(loop.time())
        if self._queue and self._check_timer is None:
            self._check_timer = loop.call_later(_CHECK_AGAIN, self._check)

    def _check(self) -> None:
        self._check_timer = None
        self._let_in()

    def _note_drain(self, now: float) -> None:
        is_full = bool(self._queue) and not self._inflight.has_room()
        self._drain.note(self._work_done(), now, waiting=is_full and self._serving())

    def _refusal(self, queued: QueuedRequest, reason: str) -> ApiError:
        """Return the error of one that would wait too long, or has: for others, or for want of a replica."""
        error = self._overloaded(queued, reason, LONG)
        if self._config.absent_wait is None or self._serving():
            return error
        message = f"no replica is there to take the request; try again in {error.retry_after} s"
        return ApiError("no_replica", message, retry_after=error.retry_after)

    def _overloaded(self, queued: QueuedRequest, reason: str, kind: str) -> ApiError:
        """Retrying pays once those who wait now have had their turn, at the rate of late."""
        self.shed[queued.tenant] += 1
        self.rejections[kind] += 1
        self._turned_away.add(asyncio.get_running_loop().time(), queued.work)
        ahead = self._drain.seconds_for(self._queue.work_ahead(queued.tenant, queued.priority, queued.work))
        seconds = min(max(math.ceil(ahead or 0.0), 1), _LONGEST_RETRY)
        return ApiError("overloaded", f"{reason}; try again in {seconds} s", retry_after=seconds)


def _among_tenants(queued: QueuedRequest) -> Request:
    """Return the request as a replica gets it, where tenants run side by side and none is more urgent than others.

    It may be less urgent. The operator's own tenant, the only one where there is no file of keys, is not bound.
    """
    request = queued.request
    if request.priority >= 0 or queued.tenant == DEFAULT_TENANT:
        return request
    return replace(request, priority=0)


class QueuedStream:
    """The chunks of one request. Once inside, each is asked straight of the source: there is no cost per token."""

    def __init__(self, queue: AdmissionQueue, queued: QueuedRequest, context: CallContext) -> None:
        self._queue = queue
        self._queued = queued
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
            self._queue.leave(self._queued)

    def __del__(self) -> None:
        """A place must not be lost for good to a caller that forgot to close."""
        self._queue.leave(self._queued)

    async def _first(self) -> TokenChunk:
        if self._closed:
            raise StopAsyncIteration
        queue, queued = self._queue, self._queued
        try:
            if queued.request.resume is not None:
                queue.go_on(queued)
            else:
                await queue.enter(queued)
        except BaseException as error:
            context = self._call_context()
            if context.waited:
                outcome = error.code if isinstance(error, ApiError) else "aborted"
                queue.on_turned_away(queued.request, context.waited, outcome)
                if context.trace is not None:
                    context.trace.turned_away(queued.request, context.waited, error)
            raise
        # `TokenSource.generate` promises an iterator that can be closed.
        chunks = queue.source.generate(_among_tenants(queued), self._call_context())
        self._chunks = cast("AsyncGenerator[TokenChunk, None]", chunks)
        chunk = await self._chunks.__anext__()
        queue.begun(queued)
        if chunk.num_cached_tokens:
            queue.found_cached(queued, chunk.num_cached_tokens)
        return chunk

    def _call_context(self) -> CallContext:
        # Its place is free once the replicas are done with it: a client that reads slowly must not keep it. These
        # calls hold no reference to this stream, so that one which its caller dropped is collected at once.
        queue, queued = self._queue, self._queued
        context = replace(self._context, on_begin=partial(queue.begun, queued), on_end=partial(queue.leave, queued))
        if queued.called is None:
            return context
        waited = asyncio.get_running_loop().time() - queued.since
        return replace(context, waited=waited, patience=queue.patience(queued))
