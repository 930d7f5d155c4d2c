"""Requests and tokens per minute, requests at a time, and what a tenant is told of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import answer_log
from cluster.admission.keys import OPEN, Quota, Tenant
from cluster.admission.quotas import Quotas
from cluster.admission.tenants import Tenancy
from cluster.answer_log import AnswerLog
from cluster.errors import ApiError
from tests.cluster.admission.quotas_lab import set_clock


def tenant(**quota):
    return Tenant("t", Quota(**quota))


async def refusal(awaitable):
    with pytest.raises(ApiError) as refused:
        await awaitable
    return refused.value


async def test_requests_per_minute_are_counted_and_come_back(clock):
    quotas, one = Quotas(clock), tenant(requests_per_minute=3)
    for _ in range(3):
        await quotas.enter(one)
        quotas.leave(one)
    error = await refusal(quotas.enter(one))
    assert (error.status, error.code, error.retryable) == (429, "rate_limit_exceeded", True)
    assert "3 requests per minute" in error.message
    clock.now += error.retry_after - 2
    await refusal(quotas.enter(one))
    clock.now += 2
    await quotas.enter(one)


async def test_a_refused_request_is_not_counted(clock):
    quotas, one = Quotas(clock), tenant(requests_per_minute=2, max_concurrent=1)
    await quotas.enter(one)
    for _ in range(10):
        assert "1 requests at a time" in (await refusal(quotas.enter(one))).message
    quotas.leave(one)
    await quotas.enter(one)
    assert (await quotas.states(one)).requests.remaining == 0


async def test_requests_at_a_time_are_freed_one_by_one(clock):
    quotas, one = Quotas(clock), tenant(max_concurrent=2)
    await quotas.enter(one)
    await quotas.enter(one)
    assert (await refusal(quotas.enter(one))).retry_after >= 1
    quotas.leave(one)
    await quotas.enter(one)
    quotas.leave(one)
    quotas.leave(one)
    assert quotas.running(one) == 0


async def test_a_prompt_that_never_fits_is_told_so(clock):
    quotas, one = Quotas(clock), tenant(tokens_per_minute=100)
    error = await refusal(quotas.use_prompt(one, 101))
    assert (error.status, error.code, error.retryable, error.retry_after) == (
        400,
        "prompt_exceeds_quota",
        False,
        None,
    )
    await quotas.use_prompt(one, 100)
    assert (await refusal(quotas.use_prompt(one, 1))).code == "rate_limit_exceeded"


async def test_generated_tokens_are_a_debt_that_later_requests_wait_for(clock):
    quotas, one = Quotas(clock), tenant(tokens_per_minute=100)
    await quotas.use_prompt(one, 10)
    await quotas.use_output(one, 500)
    state = (await quotas.states(one)).tokens
    assert (state.limit, state.remaining) == (100, 0)
    error = await refusal(quotas.use_prompt(one, 10))
    assert error.retry_after > 60
    clock.now += error.retry_after
    await quotas.use_prompt(one, 10)


async def test_tenants_do_not_share_a_quota(clock):
    quotas = Quotas(clock)
    a, b = (Tenant(name, Quota(requests_per_minute=1, tokens_per_minute=5)) for name in "ab")
    await quotas.enter(a)
    await quotas.use_prompt(a, 5)
    await quotas.enter(b)
    await quotas.use_prompt(b, 5)


async def test_no_quota_is_no_limit_and_no_header():
    quotas, one = Quotas(), tenant()
    for _ in range(1000):
        await quotas.enter(one)
        await quotas.use_prompt(one, 10**9)
        await quotas.use_output(one, 10**9)
    states = await quotas.states(one)
    assert (states.requests, states.tokens) == (None, None)


async def test_a_clock_that_jumps_shuts_nobody_out(clock):
    quotas, one = Quotas(clock), tenant(tokens_per_minute=100)
    await quotas.use_prompt(one, 100)
    for jump in (-86_400 * 365, 86_400 * 730):
        clock.now += jump
        await quotas.use_prompt(one, 100)


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.floats(0, 45), st.integers(1, 200), st.integers(0, 400)), min_size=1, max_size=12),
    st.floats(0, 60),
)
async def test_retry_after_is_enough_and_not_two_seconds_too_long(limit, uses, offset):
    with pytest.MonkeyPatch.context() as patch:
        clock = set_clock(patch, 1_800_000_000.0 + offset)
        quotas, one = Quotas(clock), tenant(tokens_per_minute=limit)
        for pause, prompt, output in uses:
            clock.now += pause
            try:
                await quotas.use_prompt(one, min(prompt, limit))
            except ApiError as error:
                now = clock.now
                clock.now = now + error.retry_after - 2
                if clock.now > now:
                    await refusal(quotas.use_prompt(one, min(prompt, limit)))
                clock.now = now + error.retry_after
                await quotas.use_prompt(one, min(prompt, limit))
            await quotas.use_output(one, output)
            state = (await quotas.states(one)).tokens
            assert 0 <= state.remaining <= limit
            assert 0 <= state.reset <= 120


async def test_reset_is_when_everything_remains_again(clock):
    quotas, one = Quotas(clock), tenant(tokens_per_minute=100)
    await quotas.use_prompt(one, 60)
    state = (await quotas.states(one)).tokens
    assert state.remaining == 40
    clock.now += state.reset + 0.01
    after = (await quotas.states(one)).tokens
    assert (after.remaining, after.reset) == (100, 0.0)


async def test_rows_of_batches_leave_half_of_a_quota_to_the_tenants_requests(clock):
    quotas, one = Quotas(clock), tenant(requests_per_minute=10, tokens_per_minute=100)
    for _ in range(4):
        assert await quotas.row_waits_for(one, 10) is None
        await quotas.use_row(one, 12)
    assert await quotas.row_waits_for(one, 53) == "tokens_per_minute", "the prompt does not fit"
    await quotas.use_row(one, 2)
    assert await quotas.row_waits_for(one, 1) == "requests_per_minute"
    await quotas.enter(one)
    await quotas.use_prompt(one, 50)
    clock.now += 120
    assert await quotas.row_waits_for(one, 1) is None
    await quotas.use_row(one, 50)
    assert await quotas.row_waits_for(one, 1) == "tokens_per_minute"


async def test_a_row_whose_prompt_never_fits_is_told_so_and_the_smallest_quota_lets_rows_through(clock):
    quotas = Quotas(clock)
    error = await refusal(quotas.row_waits_for(tenant(tokens_per_minute=100), 101))
    assert (error.status, error.code) == (400, "prompt_exceeds_quota")
    assert await quotas.row_waits_for(tenant(requests_per_minute=1, tokens_per_minute=1), 1) is None
    assert await quotas.row_waits_for(tenant(), 10**9) is None


async def test_a_counter_of_prompts_never_falls_where_another_router_charges_them(monkeypatch):
    monkeypatch.setattr(answer_log, "SILENCE", 0.0)
    tenancy = Tenancy()
    counts = tenancy.counts_of("", OPEN)
    log = AnswerLog()
    async with await tenancy.visit(OPEN, log=log) as silent:
        log.spoke()
        await silent.charge_prompt(10)
        told = counts.prompt_tokens
    assert counts.prompt_tokens == told == 10
    async with await tenancy.visit(OPEN) as other:
        await other.charge_prompt(25)
    assert counts.prompt_tokens == 25
