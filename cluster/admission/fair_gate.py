"""In front of the replicas: bounded work goes in, the rest waits until its tenant's turn comes, or is refused."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from cluster.admission.deadline import deadline_exceeded
from cluster.admission.drain_rate import DrainRate
from cluster.admission.fair_queue import FairQueue
from cluster.admission.figures import QueueFigures
from cluster.admission.gate_config import FairGateConfig
from cluster.admission.output_length import OutputLength
from cluster.admission.room import UNBOUNDED
from cluster.admission.turn import Turn
from cluster.admission.turned_away import TurnedAway
from cluster.errors import ApiError
from cluster.token_source import NO_CONTEXT, CallContext, TokenChunk, TokenSource
from engine.request import Request
from engine.telemetry.flight import is_of

_LAST_WAIT = 1.0  # seconds that one has at least for a replica that is let in, if it came while there was one
_LOOK_AGAIN = 0.5  # seconds after which the bounds are asked anew while requests wait: replicas come and go
_LONGEST_RETRY = 600  # seconds
# Of the bound, the share of one tenant's and of all requests that may be in a replica without taking up room, since
# what their output must match may have to be compiled there; and how many of one tenant's may in any case.
_SHARE_ASIDE, _ALL_ASIDE, _LEAST_ASIDE = 8, 2, 4


class FairGate:
    """Hands requests to `source`, whose turn it is first. Used on one event loop.

    bound: sequences that may be inside at once, asked for each request; token_bound: the same in tokens of prompts
    and expected output. A request may go over either, so that a large one is never passed over for ever. While there
    is room for more, nobody waits. work_done: tokens of prompts and output that `source` has got done, a counter, by
    which the queue's drain rate is measured; None = the work of requests that have ended. serving: whether there is a
    replica at all: time without one says nothing about the rate. Who came while there was one keeps the patience that
    it was promised when there is none for a while; who comes meanwhile has its own (`FairGateConfig.absent_wait`).

    on_turned_away: told each request that waited and did not get in, how many seconds, and the code of its end.
    """

    def __init__(
        self,
        source: TokenSource,
        bound: Callable[[], int],
        config: FairGateConfig | None = None,
        token_bound: Callable[[], int] = lambda: UNBOUNDED,
        work_done: Callable[[], int] | None = None,
        serving: Callable[[], bool] = lambda: True,
    ) -> None:
        self.source = source
        self.on_turned_away: Callable[[Request, float, str], None] = lambda *_: None
        self.shed: Counter[str] = Counter()  # tenant -> requests that were refused because too many wait, or too long
        self._bound = bound
        self._token_bound = token_bound
        self._config = config or FairGateConfig()
        self._queue: FairQueue[Turn] = FairQueue()
        self._lengths = OutputLength()
        self._drain = DrainRate()
        self._turned_away = TurnedAway()
        self._ended_work = 0
        self._serving = serving
        self._work_done = work_done or (lambda: self._ended_work)
        self._inside = 0
        self._tokens = 0
        self._aside: Counter[str] = Counter()  # tenant -> its requests inside that take up no room yet
        self._look_again: asyncio.TimerHandle | None = None

    @classmethod
    def unbounded(cls, source: TokenSource) -> FairGate:
        """Return one that lets in as many requests at a time as come."""
        return cls(source, lambda: UNBOUNDED)

    @property
    def num_inside(self) -> int:
        """Sequences that were handed on and have not ended, without those that may wait for a compiler."""
        return self._inside

    @property
    def tokens_inside(self) -> int:
        """Tokens of prompts and expected output of what was handed on, without what was found in prefix caches."""
        return self._tokens

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    def waiting(self) -> dict[str, int]:
        """Return how many requests of each tenant wait, of those that have any."""
        return self._queue.lengths()

    def waits_for(self, name: str, tenant: str | None = None) -> list[tuple[float, str]]:
        """Return, of the requests that their client knows as `name` and that wait: seconds so far, and for what.

        tenant: whose they must be, None = anybody's.
        """
        now = asyncio.get_running_loop().time()
        named = [turn for turn in self._queue.items() if is_of(turn.request.request_id, name)]
        turns = [turn for turn in named if tenant in (None, turn.tenant)]
        ahead = {turn: self._queue.work_ahead(turn.tenant, turn.priority, turn.work) for turn in turns}
        return [
            (now - turn.since, f"of tenant {turn.tenant}; at most {work} tokens of work, its own included, go first")
            for turn, work in ahead.items()
        ]

    def figures(self) -> QueueFigures:
        """Return what waits now."""
        oldest = self._queue.oldest()
        age = 0.0 if oldest is None else asyncio.get_running_loop().time() - oldest.since
        return QueueFigures(len(self._queue), self._queue.work, age, self._drain.per_second or 0.0)

    def demand(self) -> QueueFigures:
        """Return what waits and what was refused of late, which would wait if it were let."""
        waits = self.figures()
        requests, work = self._turned_away.of_late(asyncio.get_running_loop().time())
        return replace(waits, requests=waits.requests + requests, tokens=waits.tokens + work)

    def generate(self, tenant: str, request: Request, context: CallContext = NO_CONTEXT) -> AsyncIterator[TokenChunk]:
        """Run a request of `tenant` once it is its turn; see `TokenSource.generate`. The iterator must be closed.

        Raises `ApiError`: `overloaded` (429) where too many of the tenant wait, or it would wait too long, or has;
        `no_replica` (503) where that is so, or will be, since there is no replica; `deadline_exceeded` (504).
        """
        return Turn(self, tenant, request, context)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count one choice's generated tokens as used by a tenant, so that its later turns come later."""
        self._queue.charge(tenant, tokens)
        if tokens:  # refusals, vectors and whatever ended before its first token say nothing of how long answers are
            self._lengths.seen(tokens)

    async def enter(self, turn: Turn) -> None:
        """Return when `turn` may go in; whoever went in must `leave`."""
        turn.work = turn.prompt + self._lengths.of(turn.request, turn.sequences)
        self._let_in()
        # Where there is room still, whoever waits does so for a compiler, and is in nobody's way.
        if self._has_room() and self._may_enter(turn):
            self._queue.pass_by(turn.tenant, turn.cost)
            self._take_in(turn)
            return
        loop = asyncio.get_running_loop()
        turn.came_to_none = not self._serving()
        turn.since = loop.time()
        self._check_wait(turn)
        turn.waits = True
        turn.called = loop.create_future()
        self._queue.push(turn.tenant, turn, turn.cost, turn.priority, turn.work, kind=turn.compiles)
        self._let_in()
        await self._until_called(turn, turn.called)

    def leave(self, turn: Turn) -> None:
        """Take note that a request has ended."""
        turn.inside = False
        if turn.aside:
            self._no_more_aside(turn)
        else:
            self._inside -= turn.sequences
            self._tokens -= turn.held
        self._ended_work += turn.work
        self._let_in()
        if not self._inside and not self._aside and not self._queue:
            self._queue.forget()

    def begun(self, turn: Turn) -> None:
        """Take note that a replica computes something for a request: from now on it takes up its room."""
        if turn.aside:
            self._no_more_aside(turn)
            self._inside += turn.sequences
            self._tokens += turn.held
            self._let_in()

    def found_cached(self, turn: Turn, tokens: int) -> None:
        """Take note that so many tokens of a prompt need no room of their own."""
        found = min(tokens, turn.held)
        turn.held -= found
        self._tokens -= found
        self._let_in()

    def _has_room(self) -> bool:
        return self._inside < self._bound() and self._tokens < self._token_bound()

    def _is_full(self) -> bool:
        return bool(self._queue) and not self._has_room()

    def _may_enter(self, turn: Turn) -> bool:
        """Whether a turn may go in where there is room: those that a compiler may keep waiting are few at a time.

        They take up no room meanwhile, or a tenant's slow grammars would keep everybody out; and once they do, they
        go over the bound by no more than so many.
        """
        if not turn.compiles:
            return True
        bound = self._bound()
        most = max(_LEAST_ASIDE, bound // _SHARE_ASIDE)
        return self._aside[turn.tenant] < most and self._aside.total() < max(most, bound // _ALL_ASIDE)

    def _no_more_aside(self, turn: Turn) -> None:
        turn.aside = False
        self._aside[turn.tenant] -= 1
        if not self._aside[turn.tenant]:
            del self._aside[turn.tenant]

    def _take_in(self, turn: Turn) -> None:
        turn.inside = True
        turn.held = turn.work
        if turn.compiles:
            turn.aside = True
            self._aside[turn.tenant] += 1
            return
        self._inside += turn.sequences
        self._tokens += turn.held

    def patience(self, turn: Turn) -> float:
        """Return the seconds that one who has waited may still wait inside, where no replica is there."""
        left = turn.since + self._longest_wait(turn) - asyncio.get_running_loop().time()
        return max(left, 0.0 if turn.came_to_none else _LAST_WAIT)

    def _longest_wait(self, turn: Turn) -> float:
        """Seconds that a request may wait in all, as things are now."""
        longest, absent = self._config.longest_wait, self._config.absent_wait
        serving = self._serving()
        if absent is None or (serving and not turn.came_to_none):
            return longest
        return absent if turn.came_to_none and not serving else max(longest, absent)

    def _check_wait(self, turn: Turn) -> None:
        """Refuse at once whom waiting would not help; raises `ApiError`."""
        self._note_drain(turn.since)
        most = self._config.longest_wait
        if turn.came_to_none:  # the queue may move again in a moment, and then it has as long as the others
            most = max(most, self._config.absent_wait or 0.0)
        seconds = self._drain.seconds_for(self._queue.work_ahead(turn.tenant, turn.priority, turn.work))
        if seconds is not None and seconds > most:
            raise self._refusal(turn, f"the request would wait {seconds:.1f} s for its turn, {most:g} s at most")
        if turn.deadline is not None and turn.since + (seconds or 0.0) >= turn.deadline:
            raise deadline_exceeded("the request's deadline would pass while it waited for its turn")
        if self._queue.length(turn.tenant) < self._config.max_waiting:
            return
        priority, last = self._queue.last(turn.tenant)
        full = f"{self._config.max_waiting} requests of this tenant wait already"
        if priority <= turn.priority or last.called is None:
            raise self._overloaded(turn, full)
        self._drop(last)
        if not last.called.done():
            last.called.set_exception(self._overloaded(last, f"{full}, and a more urgent one came"))

    def _drop(self, turn: Turn) -> None:
        if turn.waits:
            turn.waits = False
            self._queue.remove(turn.tenant, turn, turn.priority)

    async def _until_called(self, turn: Turn, called: asyncio.Future[None]) -> None:
        """Wait for the turn; raises `ApiError` when waiting is over before it comes."""
        clock, waited_until = asyncio.get_running_loop().time, float("-inf")
        try:
            # It is longer once a replica has come to those who came to none.
            while not called.done() and (latest := self._latest(turn)) > waited_until:
                await asyncio.wait((called,), timeout=max(0.0, latest - clock()))
                waited_until = latest
            if not called.done():
                raise self._too_late(turn)
            called.result()
        finally:
            self._drop(turn)

    def _latest(self, turn: Turn) -> float:
        """When a request's waiting ends at the latest."""
        latest = turn.since + self._longest_wait(turn)
        return latest if turn.deadline is None else min(latest, turn.deadline)

    def _too_late(self, turn: Turn) -> ApiError:
        most = self._longest_wait(turn)
        if turn.deadline is not None and turn.deadline < turn.since + most:
            return deadline_exceeded("the request's deadline passed while it waited for its turn")
        return self._refusal(turn, f"the request waited {most:g} s for its turn")

    def _let_in(self) -> None:
        if not self._queue:
            return
        loop = asyncio.get_running_loop()
        while self._queue and self._has_room():
            turn = self._queue.pop_of(self._may_enter)
            if turn is None:
                break
            turn.waits = False
            self._take_in(turn)
            if turn.called is not None and not turn.called.done():
                turn.called.set_result(None)
        self._note_drain(loop.time())
        if self._queue and self._look_again is None:
            self._look_again = loop.call_later(_LOOK_AGAIN, self._look)

    def _look(self) -> None:
        self._look_again = None
        self._let_in()

    def _note_drain(self, now: float) -> None:
        self._drain.note(self._work_done(), now, waiting=self._is_full() and self._serving())

    def _refusal(self, turn: Turn, reason: str) -> ApiError:
        """Return the error of one that would wait too long, or has: for others, or for want of a replica."""
        error = self._overloaded(turn, reason)
        if self._config.absent_wait is None or self._serving():
            return error
        message = f"no replica is there to take the request; try again in {error.retry_after} s"
        return ApiError("no_replica", message, retry_after=error.retry_after)

    def _overloaded(self, turn: Turn, reason: str) -> ApiError:
        """Retrying pays once those who wait now have had their turn, at the rate of late."""
        self.shed[turn.tenant] += 1
        self._turned_away.add(asyncio.get_running_loop().time(), turn.work)
        ahead = self._drain.seconds_for(self._queue.work_ahead(turn.tenant, turn.priority, turn.work))
        seconds = min(max(math.ceil(ahead or 0.0), 1), _LONGEST_RETRY)
        return ApiError("overloaded", f"{reason}; try again in {seconds} s", retry_after=seconds)
