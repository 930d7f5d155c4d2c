"""Requests and tokens per minute, over all routers that share their counts, and requests at a time on this one.

A sliding minute of the `limits` library: what was used in the whole clock minute before counts in proportion to how
much of it still lies in the last sixty seconds. Its asyncio storage is used because the other one starts a thread
with nearly every request. Nothing is awaited there but uncontended locks, so that no call ever waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from cluster.admission.keys import Tenant
from cluster.errors import ApiError

MINUTE = 60
Usage = Mapping[int, Mapping[str, int]]  # clock minute, counted since the epoch -> limit and tenant -> what was used


@dataclass(frozen=True, slots=True)
class RateState:
    """One limit of a tenant now. reset: seconds until all of `limit` remains again, if nothing more is used."""

    limit: int
    remaining: int
    reset: float


@dataclass(frozen=True, slots=True)
class RateStates:
    """The limits that a tenant has, None where it has none."""

    requests: RateState | None = None
    tokens: RateState | None = None


class Quotas:
    """What every tenant has used. One for each router; state is two pairs of numbers for each tenant and limit.

    What counts is what was used at this router and, once they are `add`ed, at others
    (`cluster.lifecycle.shared_quotas`).
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._storage = MemoryStorage()
        self._limiter = SlidingWindowCounterRateLimiter(self._storage)
        self._running: dict[str, int] = {}
        self._used: dict[int, dict[str, int]] = {}  # at this router

    def used(self) -> Usage:
        """Return what was used at this router and counts still, a copy; may be called in any thread."""
        oldest = self._minute() - 1
        return {minute: dict(used) for minute, used in list(self._used.items()) if minute >= oldest}

    async def add(self, usage: Usage) -> None:
        """Count what was used elsewhere, beside what was added before."""
        oldest = self._minute() - 1
        for minute, used in usage.items():
            if minute >= oldest:
                for key, amount in used.items():
                    await self._count(key, minute, amount)

    def running(self, tenant: Tenant) -> int:
        """Requests of the tenant that run or wait."""
        return self._running.get(tenant.name, 0)

    async def enter(self, tenant: Tenant, continues: bool = False) -> None:
        """Count one request, which ends with `leave`. continues: it was counted at a router that is lost.

        Raises `ApiError` (`rate_limit_exceeded`); nothing is counted then.
        """
        most = tenant.quota.max_concurrent
        running = self.running(tenant)
        if continues:
            self._running[tenant.name] = running + 1
            return
        if most is not None and running >= most:
            raise _exceeded(f"at most {most} requests at a time are allowed; wait until one has ended", 1.0)
        item = _requests(tenant)
        if item is not None and not await self._limiter.hit(item, tenant.name):
            wait = await self._seconds_until(item, tenant, 1)
            raise _exceeded(f"the limit of {item.amount} requests per minute is reached", wait)
        if item is not None:
            self._note(item.key_for(tenant.name), 1)
        self._running[tenant.name] = running + 1

    def leave(self, tenant: Tenant) -> None:
        """End what `enter` counted."""
        left = self.running(tenant) - 1
        if left > 0:
            self._running[tenant.name] = left
        else:
            self._running.pop(tenant.name, None)

    async def use_prompt(self, tenant: Tenant, tokens: int) -> None:
        """Charge the prompts of one request.

        Raises `ApiError`: `prompt_exceeds_quota` (400) for one that would never fit, else `rate_limit_exceeded`;
        nothing is charged then.
        """
        item = _tokens(tenant)
        if item is None:
            return
        if await self._limiter.hit(item, tenant.name, cost=tokens):
            self._note(item.key_for(tenant.name), tokens)
            return
        _refuse_too_long(tokens, item)
        wait = await self._seconds_until(item, tenant, tokens)
        raise _exceeded(f"the limit of {item.amount} tokens per minute leaves no room for {tokens} now", wait)

    async def use_output(self, tenant: Tenant, tokens: int) -> None:
        """Charge generated tokens after the fact, whether they fit or not: later requests wait for it."""
        item = _tokens(tenant)
        if item is not None and tokens:
            await self._charge(item, tenant, tokens)

    async def row_waits_for(self, tenant: Tenant, prompt: int) -> str | None:
        """Return for which quota a row of a batch has to wait, None where it may begin now. prompt: its tokens.

        Rows leave half of each limit to the tenant's other requests. Raises `ApiError` (`prompt_exceeds_quota`).
        """
        item = _tokens(tenant)
        if item is not None:
            _refuse_too_long(prompt, item)
        states = await self.states(tenant)
        for name, state, needed in (("requests", states.requests, 1), ("tokens", states.tokens, prompt)):
            if state is not None and (2 * state.remaining <= state.limit or needed > state.remaining):
                return f"{name}_per_minute"
        return None

    async def use_row(self, tenant: Tenant, tokens: int) -> None:
        """Charge a row of a batch that begins: a request, and the tokens that it is likely to take."""
        for item, amount in ((_requests(tenant), 1), (_tokens(tenant), tokens)):
            if item is not None and amount:
                await self._charge(item, tenant, amount)

    async def states(self, tenant: Tenant) -> RateStates:
        """Return what remains, for the `x-ratelimit-` headers."""
        requests, tokens = _requests(tenant), _tokens(tenant)
        return RateStates(
            None if requests is None else await self._state(requests, tenant),
            None if tokens is None else await self._state(tokens, tenant),
        )

    async def _charge(self, item: RateLimitItem, tenant: Tenant, amount: int) -> None:
        key = item.key_for(tenant.name)
        self._note(key, amount)
        await self._count(key, self._minute(), amount)

    def _minute(self) -> int:
        return int(self._clock() // MINUTE)

    def _note(self, key: str, amount: int) -> None:
        minute = self._minute()
        used = self._used.get(minute)
        if used is None:
            self._used = {past: used for past, used in self._used.items() if past == minute - 1}
            used = self._used[minute] = {}
        used[key] = used.get(key, 0) + amount

    async def _count(self, key: str, minute: int, amount: int) -> None:
        _, window = self._storage.sliding_window_keys(key, MINUTE, minute * MINUTE)
        await self._storage.incr(window, 2 * MINUTE, amount=amount)

    async def _state(self, item: RateLimitItem, tenant: Tenant) -> RateState:
        window = await self._window(item, tenant)
        return RateState(item.amount, max(0, item.amount - math.floor(window.count)), window.seconds_until_below(1))

    async def _seconds_until(self, item: RateLimitItem, tenant: Tenant, cost: int) -> float:
        window = await self._window(item, tenant)
        return window.seconds_until_below(item.amount - cost + 1)

    async def _window(self, item: RateLimitItem, tenant: Tenant) -> _Window:
        key = item.key_for(tenant.name)
        before, _, now, seconds = await self._storage.get_sliding_window(key, MINUTE)
        return _Window(before, now, seconds - MINUTE)


@dataclass(frozen=True, slots=True)
class _Window:
    """What was used in the clock minute before and in this one, and the seconds until the next one begins."""

    before: int
    now: int
    seconds_left: float

    @property
    def count(self) -> float:
        """What counts as used in the last sixty seconds."""
        return self.before * self.seconds_left / MINUTE + self.now

    def seconds_until_below(self, room: int) -> float:
        """Return after how many seconds `count` will be `room` (at least 1) at most, if nothing more is used."""
        if self.count < room:
            return 0.0
        if self.now < room:
            return self.seconds_left - (room - self.now) * MINUTE / self.before
        return self.seconds_left + MINUTE - room * MINUTE / self.now


def _requests(tenant: Tenant) -> RateLimitItem | None:
    amount = tenant.quota.requests_per_minute
    return None if amount is None else RateLimitItemPerMinute(amount, namespace="requests")


def _tokens(tenant: Tenant) -> RateLimitItem | None:
    amount = tenant.quota.tokens_per_minute
    return None if amount is None else RateLimitItemPerMinute(amount, namespace="tokens")


def _refuse_too_long(prompt: int, item: RateLimitItem) -> None:
    if prompt > item.amount:
        raise ApiError(
            "prompt_exceeds_quota",
            f"the request has {prompt} prompt tokens, but {item.amount} tokens per minute are allowed: it would "
            "never be let in; shorten it or ask for a higher quota",
            status=400,
        )


def _exceeded(message: str, seconds: float) -> ApiError:
    """The library lets in what is below a bound, not on it: hence the second more where `seconds` is a whole one."""
    retry_after = math.floor(seconds) + 1
    return ApiError("rate_limit_exceeded", f"{message}; try again in {retry_after} s", retry_after=retry_after)
