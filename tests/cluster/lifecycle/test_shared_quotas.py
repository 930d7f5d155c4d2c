"""Quotas over several routers, and over the death of one."""

import asyncio
import logging
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.admission.keys import Quota, Tenant
from cluster.admission.quotas import MINUTE, Quotas
from cluster.errors import ApiError
from cluster.lifecycle import control_store
from cluster.lifecycle.shared_quotas import COUNTS_SECONDS, KEPT_SECONDS, SharedQuotas
from tests.cluster.admission.quotas_lab import Clock, set_clock

THREE = Tenant("t", Quota(requests_per_minute=3))
TOKENS = Tenant("t", Quota(tokens_per_minute=100))


@pytest.fixture
def kept(monkeypatch):
    """What Ray's control store holds, by name."""
    kept = {}
    monkeypatch.setattr(control_store, "put", lambda key, value: kept.__setitem__(key.encode(), value))
    monkeypatch.setattr(control_store, "get", kept.get)
    monkeypatch.setattr(control_store, "delete", kept.pop)
    monkeypatch.setattr(
        control_store, "keys", lambda prefix: [key for key in kept if key.startswith(prefix.encode())]
    )
    return kept


class Router:
    """One life of a router, as far as quotas go."""

    def __init__(self, name, clock, app="squadron"):
        self.clock = clock
        self.quotas = Quotas(clock)
        self._shared = SharedQuotas(app, name, self.quotas, asyncio.get_running_loop(), clock)

    async def exchange(self):
        await asyncio.to_thread(self._shared.exchange)

    async def enters(self, tenant=THREE):
        """Whether a request is let in, which ends at once."""
        try:
            await self.quotas.enter(tenant)
        except ApiError:
            return False
        self.quotas.leave(tenant)
        return True

    async def remaining(self, tenant=THREE):
        states = await self.quotas.states(tenant)
        return (states.requests or states.tokens).remaining


async def test_who_comes_in_the_place_of_a_dead_router_knows_what_was_used_at_it(clock, kept):
    dead = Router("first", clock)
    assert [await dead.enters() for _ in range(4)] == [True, True, True, False]
    await dead.exchange()
    clock.now += 2
    newcomer = Router("second", clock)
    await newcomer.exchange()
    assert not await newcomer.enters()
    assert await newcomer.remaining() == 0
    clock.now += 2 * MINUTE
    assert await newcomer.enters()


async def test_a_quota_holds_over_all_routers_and_nothing_counts_twice(clock, kept):
    a, b = Router("a", clock), Router("b", clock)
    assert await a.enters() and await b.enters()
    for _ in range(3):
        await a.exchange()
        await b.exchange()
    assert (await a.remaining(), await b.remaining()) == (1, 1)
    assert await b.enters()
    await b.exchange()
    await a.exchange()
    assert not await a.enters() and not await b.enters()


async def test_tokens_of_prompts_and_answers_count_too_and_a_debt_is_everywhere(clock, kept):
    a, b = Router("a", clock), Router("b", clock)
    await a.quotas.use_prompt(TOKENS, 60)
    await a.quotas.use_output(TOKENS, 300)
    await a.exchange()
    await b.exchange()
    assert await b.remaining(TOKENS) == 0
    with pytest.raises(ApiError) as refused:
        await b.quotas.use_prompt(TOKENS, 1)
    assert refused.value.retry_after > 60, "more than a minute's worth was used"


async def test_what_is_taken_back_is_taken_back_everywhere(clock, kept):
    a, b = Router("a", clock), Router("b", clock)
    await a.quotas.use_prompt(TOKENS, 60)
    await a.exchange()
    await b.exchange()
    assert await b.remaining(TOKENS) == 40
    await a.quotas.use_output(TOKENS, -60)
    await a.exchange()
    await b.exchange()
    assert await b.remaining(TOKENS) == 100
    await a.quotas.use_prompt(TOKENS, 10)
    await a.exchange()
    await b.exchange()
    assert (await a.remaining(TOKENS), await b.remaining(TOKENS)) == (90, 90)


async def test_another_apps_quotas_are_its_own(clock, kept):
    a, other = Router("a", clock), Router("b", clock, app="other")
    for _ in range(3):
        await a.enters()
    await a.exchange()
    await other.exchange()
    assert await other.enters()


async def test_what_was_used_long_ago_counts_no_more_and_is_forgotten_in_the_end(clock, kept):
    a = Router("a", clock)
    await a.enters()
    await a.exchange()
    clock.now += COUNTS_SECONDS + 1
    b = Router("b", clock)
    await b.exchange()
    assert await b.remaining() == 3
    assert kept
    clock.now += KEPT_SECONDS
    await b.exchange()
    assert not kept


async def test_a_clock_that_jumps_shuts_nobody_out(clock, kept):
    a, b = Router("a", clock), Router("b", clock)
    clock.now += 86_400
    assert [await a.enters() for _ in range(3)] == [True] * 3
    await a.exchange()
    clock.now -= 86_400
    await b.exchange()
    assert await b.enters()


@pytest.mark.parametrize("ahead", [-7200.0, -150.0, 150.0, 7200.0])
async def test_a_quota_holds_over_routers_whose_clocks_differ(clock, kept, ahead, monkeypatch):
    """Once both are there: how old that is which was used before, the clocks alone can tell."""
    a, b = Router("a", Clock(clock.now)), Router("b", Clock(clock.now + ahead))
    for spender, tokens in ((a, 1), (b, 1), *[(a, 10), (b, 10)] * 3):
        for turn, one in enumerate((spender, a, b, a)):
            a.clock.now, b.clock.now = a.clock.now + 1, b.clock.now + 1
            monkeypatch.setattr("limits.aio.storage.memory.time", types.SimpleNamespace(time=one.clock))
            await (one.exchange() if turn else one.quotas.use_output(TOKENS, tokens))
            left = await one.remaining(TOKENS)
    assert left in range(38, 41)


async def test_without_the_control_store_each_router_goes_on_alone_and_says_so_once(clock, monkeypatch, caplog):
    rounds = asyncio.Event()

    def gone(_):
        rounds.loop.call_soon_threadsafe(rounds.set)
        raise RuntimeError("the store is gone")

    rounds.loop = asyncio.get_running_loop()
    monkeypatch.setattr(control_store, "keys", gone)
    monkeypatch.setattr("cluster.lifecycle.shared_quotas.EXCHANGE_SECONDS", 0.001)
    a = Router("a", clock)
    with caplog.at_level(logging.WARNING):
        a._shared.start()
        for _ in range(3):
            rounds.clear()
            await asyncio.wait_for(rounds.wait(), 10)
    assert await a.enters()
    assert len([one for one in caplog.records if "not shared among routers" in one.message]) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.booleans(), st.booleans()), max_size=25))
def test_whatever_is_used_and_whoever_dies_all_come_to_the_same_sum(uses):
    async def play(clock, kept):
        routers, born = [Router(str(i), clock) for i in range(3)], 3
        for who, tokens, tells, dies in uses:
            await routers[who].quotas.use_output(TOKENS, tokens)
            if tells or dies:
                await routers[who].exchange()
            if dies:
                routers[who] = Router(str(born), clock)
                born += 1
        for _ in range(2):
            for router in routers:
                await router.exchange()
        total = sum(tokens for _, tokens, _, _ in uses)
        for router in routers:
            assert await router.remaining(TOKENS) == max(0, 100 - total)

    with pytest.MonkeyPatch.context() as patch:
        clock, store = set_clock(patch), {}
        patch.setattr(control_store, "put", lambda key, value: store.__setitem__(key.encode(), value))
        patch.setattr(control_store, "get", store.get)
        patch.setattr(control_store, "keys", lambda prefix: list(store))
        asyncio.run(play(clock, store))
