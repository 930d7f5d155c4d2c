"""Batches of several tenants on one server: they share its replicas, pay their quotas, and end with their keys."""

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from cluster.admission.keys import OPEN, FixedKeys, KeyEntry, KeyRing, Quota, Tenant, hash_key
from cluster.admission.quotas import Quotas
from cluster.batch.server import one_batch
from cluster.batch.server.batch_runner import REVOKED_SECONDS, Runner, by_turns
from cluster.batch.server.limits import CompletionWindows, RowQuotas
from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from cluster.deployments.batches import holders_of
from cluster.router.dispatcher import Dispatcher
from tests.cluster.batch.batch_lab import cut_off
from tests.cluster.batch.batch_server_lab import PATIENT, TENANT, Server, at_work, created, lines, rows, told
from tests.cluster.cluster_lab import Lab, until


@pytest.fixture
def store(tmp_path):
    return Store(open_root(str(tmp_path / "store")), 10**6)


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr("cluster.batch.server.one_batch.WATCH_SECONDS", 0.02)
    monkeypatch.setattr("cluster.batch.server.limits.PAUSE", 0.002)


@asynccontextmanager
async def all_at_work(server, *batch_ids):
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(at_work(server, one)) for one in batch_ids]


# --- whose turn it is


async def test_ten_rows_do_not_wait_for_another_tenants_large_batch(model, store, tmp_path):
    large = created(store, rows(2000, max_tokens=60))
    async with Lab(PATIENT) as lab:
        await lab.start("a", pace=0.001)
        server = Server(lab, store, model, tmp_path / "ledgers")
        async with at_work(server, large):
            await until(lambda: store.batch(large, TENANT).request_counts.completed > 5)
            small = created(store, rows(10), tenant="other")
            await server.one.run(small)
            assert store.batch(small, "other").status == "completed"
            assert store.batch(large, TENANT).status == "in_progress"
            assert store.batch(large, TENANT).request_counts.completed < 1000
    assert [line["custom_id"] for line in lines(store, store.batch(small, "other").output_file_id, "other")] == [
        f"r{i}" for i in range(10)
    ]


async def test_batches_that_run_side_by_side_are_taken_over_with_no_row_lost_or_doubled(model, store, tmp_path):
    batches = {one: created(store, rows(30, max_tokens=60), tenant=one) for one in ("acme", "other")}
    drawn = 0
    for life in range(3):
        async with Lab(PATIENT) as lab:
            await lab.start(f"replica-{life}", pace=0.002)
            server = Server(lab, store, model, tmp_path / "ledgers")
            async with all_at_work(server, *batches.values()) as work:
                await until(lambda lab=lab, work=work: lab.dispatcher.counters.tokens > 900 or work[0].done())
                if life == 2:
                    await asyncio.gather(*work)
            drawn += lab.dispatcher.counters.tokens
    for tenant, batch_id in batches.items():
        batch = store.batch(batch_id, tenant)
        assert batch.status == "completed"
        assert [one["custom_id"] for one in lines(store, batch.output_file_id, tenant)] == [
            f"r{i}" for i in range(30)
        ]
    assert drawn == 2 * 30 * 60


def test_a_tenant_with_many_batches_keeps_nobody_away(store, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.batch_runner.MAX_AT_ONCE", 3)
    for tenant in ("a", "a", "a", "a", "b", "a", "b"):
        created(store, rows(1), tenant=tenant)
    first, rest = by_turns(list(store.batches.unended()))
    assert [one.tenant for one in first] == ["a", "b", "a"]
    assert [one.tenant for one in rest] == ["b", "a", "a", "a"]
    for tenant in "cdef":
        created(store, rows(1), tenant=tenant)
    first, rest = by_turns(list(store.batches.unended()))
    assert sorted(one.tenant for one in first) == list("abcdef"), "of each the first one"


async def test_a_runner_takes_up_another_tenants_batch_beside_many_of_one(store, monkeypatch):
    monkeypatch.setattr("cluster.batch.server.batch_runner.MAX_AT_ONCE", 2)

    async def run_one(batch_id):
        record = store.batches.read(batch_id)
        if record.status == "validating":
            told(store, batch_id, lambda one: one.begun(one.created_at, 1, "tiny"))
        await asyncio.Event().wait()

    many = [created(store, rows(1)) for _ in range(4)]
    runner = Runner(store, run_one, CompletionWindows(store.root))
    work = asyncio.create_task(runner.run())

    def runs(*ids):
        runner.wake()
        return set(runner.running) == set(ids)

    await until(lambda: runs(*many[:2]))
    other = created(store, rows(1), tenant="other")
    await until(lambda: runs(many[0], other))
    await cut_off(work)


async def test_inputs_of_one_tenant_that_are_slow_to_read_keep_no_other_waiting(model, store, tmp_path, monkeypatch):
    slow, go = [created(store, rows(1)) for _ in range(40)], threading.Event()
    check = one_batch.check_input

    def slow_for_one(source, tasks, folder):
        if folder.name in slow:
            assert go.wait(60)
        return check(source, tasks, folder)

    monkeypatch.setattr(one_batch, "check_input", slow_for_one)
    other = created(store, rows(3), tenant="other")
    async with Lab(PATIENT) as lab:
        await lab.start("a")
        server = Server(lab, store, model, tmp_path / "ledgers")
        async with all_at_work(server, *slow) as work:
            try:
                await until(lambda: all((tmp_path / "ledgers" / one).exists() for one in slow))
                await server.one.run(other)
                assert store.batch(other, "other").status == "completed"
                assert not any(one.done() for one in work)
            finally:
                go.set()


# --- quotas


def limited(clock, **quota):
    quotas = Quotas(clock)
    return quotas, RowQuotas(quotas, lambda name: Tenant(name, Quota(**quota)))


@pytest.mark.parametrize("quota", ["tokens_per_minute", "requests_per_minute"])
async def test_a_batch_over_its_quota_waits_says_so_and_goes_on(model, store, tmp_path, clock, quota):
    most = {"tokens_per_minute": 10 * 22, "requests_per_minute": 10}[quota]
    quotas, row_quotas = limited(clock, **{quota: most})
    batch_id = created(store, rows(12))
    async with Lab(PATIENT) as lab:
        await lab.start("a")
        server = Server(lab, store, model, tmp_path / "ledgers", quotas=row_quotas)
        async with at_work(server, batch_id) as work:
            await until(lambda: store.batch(batch_id, TENANT).waits_for)
            batch = store.batch(batch_id, TENANT)
            assert (batch.status, batch.ended) == ("in_progress", False)
            assert f"the quota {quota} of tenant {TENANT}" in batch.shown()["waits_for"]
            await until(lambda: store.batch(batch_id, TENANT).request_counts.completed == 5)
            assert not work.done()
            clock.now += 120
            await until(lambda: store.batch(batch_id, TENANT).request_counts.completed == 10)
            state = getattr(await quotas.states(Tenant(TENANT, Quota(**{quota: most}))), quota.partition("_")[0])
            assert state.remaining == most // 2, "all that the five rows took is charged, and no more"
            clock.now += 120
            await work
    batch = store.batch(batch_id, TENANT)
    assert (batch.status, batch.request_counts.completed, batch.waits_for) == ("completed", 12, None)
    assert "waits_for" not in batch.shown()


async def test_rows_are_charged_what_they_took_whatever_was_expected(model, store, tmp_path, clock):
    quotas, row_quotas = limited(clock, tokens_per_minute=100_000)
    requests = rows(40, ignore_eos=False, max_tokens=100)
    async with Lab(PATIENT) as lab:
        await lab.start("a")
        server = Server(lab, store, model, tmp_path / "ledgers", quotas=row_quotas)
        first = created(store, requests)
        await server.one.run(first)
        second = created(store, requests)
        await server.one.run(second)
    used = sum(
        usage.input_tokens + usage.output_tokens
        for usage in (store.batch(one, TENANT).usage for one in (first, second))
    )
    charged = sum(sum(by.values()) for by in quotas.used().values())
    assert used <= charged <= used + 40 * 102, "but for what the last rows paid for and did not take"
    await row_quotas.of(TENANT).pay(Long(), 10)
    assert charged == sum(sum(by.values()) for by in quotas.used().values()), "which the next rows have"


class Long:
    """A row with a prompt of so many tokens."""

    num_prompt_tokens = 1


async def test_a_row_that_can_never_fit_fails_alone(model, store, tmp_path, clock):
    _, row_quotas = limited(clock, tokens_per_minute=60)
    requests = rows(2, max_tokens=1)
    requests[0]["body"]["prompt"] = [5] * 61
    batch_id = created(store, requests)
    async with Lab(PATIENT) as lab:
        await lab.start("a")
        await Server(lab, store, model, tmp_path / "ledgers", quotas=row_quotas).one.run(batch_id)
    batch = store.batch(batch_id, TENANT)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1)
    (error,) = lines(store, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("r0", 400)
    assert error["response"]["body"]["error"]["code"] == "prompt_exceeds_quota"


async def test_a_batch_that_waits_for_its_quota_keeps_no_other_tenants_away(model, store, tmp_path, clock):
    quotas = Quotas(clock)
    own = {TENANT: Quota(tokens_per_minute=40)}
    row_quotas = RowQuotas(quotas, lambda name: Tenant(name, own.get(name, Quota())))
    poor, rich = created(store, rows(10)), created(store, rows(10), tenant="other")
    async with Lab(PATIENT) as lab:
        await lab.start("a")
        server = Server(lab, store, model, tmp_path / "ledgers", quotas=row_quotas)
        async with at_work(server, poor):
            await until(lambda: store.batch(poor, TENANT).waits_for)
            await server.one.run(rich)
            assert store.batch(poor, TENANT).status == "in_progress"
    assert store.batch(rich, "other").status == "completed"


# --- keys


def keys(*names, **more):
    return FixedKeys(KeyRing([KeyEntry(hash_key(one), Tenant(one), **more) for one in names]))


def test_who_holds_a_key_is_told_by_the_keys_that_are_valid_now():
    now = [0.0]
    ring = KeyRing([KeyEntry(hash_key("k"), Tenant("a", Quota(max_concurrent=3)), 10.0)], lambda: now[0])
    assert ring.holder("a").quota.max_concurrent == 3
    assert ring.holder("b") is None
    now[0] = 10.0
    assert ring.holder("a") is None
    assert holders_of(None)("anybody") is OPEN
    assert holders_of(keys("b"))("b") == Tenant("b")


async def test_a_tenant_without_a_key_has_no_row_begun_and_its_batch_cancelled_with_what_was_done(
    model, store, tmp_path, monkeypatch
):
    held, now = keys(TENANT, "other"), [0.0]
    holder = holders_of(held)
    begun = []
    generate = Dispatcher.generate
    monkeypatch.setattr(Dispatcher, "generate", lambda *given: (begun.append(given[1].tenant), generate(*given))[1])
    batch_id = created(store, rows(100))
    async with Lab(PATIENT) as lab:
        replica = await lab.start("a", steps=40)
        server = Server(lab, store, model, tmp_path / "ledgers", quotas=RowQuotas(None, holder))
        runner = Runner(
            store,
            server.one.run,
            CompletionWindows(store.root),
            lambda: now[0],
            lambda name: holder(name) is not None,
        )
        work = asyncio.create_task(runner.run())
        await until(lambda: store.batch(batch_id, TENANT).request_counts.completed > 5)
        held.ring = keys("other").ring
        replica.executor.allow(10**6)
        await until(lambda: store.batch(batch_id, TENANT).waits_for and not lab.dispatcher.num_live)
        before = len(begun)
        assert "a valid key of tenant acme" in store.batch(batch_id, TENANT).waits_for
        runner.wake()
        await until(lambda: runner._keyless)
        assert store.batch(batch_id, TENANT).status == "in_progress", "the key may come back, or not be here yet"
        now[0] += REVOKED_SECONDS
        runner.wake()
        await until(lambda: store.batch(batch_id, TENANT).ended)
        assert len(begun) == before
        await cut_off(work)
    batch = store.batch(batch_id, TENANT)
    assert batch.status == "cancelled"
    (why,) = batch.shown()["errors"]["data"]
    assert (why["code"], "tenant acme has no valid API key" in why["message"]) == ("key_revoked", True)
    output, errors = lines(store, batch.output_file_id), lines(store, batch.error_file_id)
    assert len(output) == batch.request_counts.completed > 5
    assert len(output) + len(errors) == 100
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert "no valid API key" in errors[0]["error"]["message"]


async def test_a_key_that_comes_back_in_time_has_its_batch_go_on(store):
    held, now = keys("other"), [0.0]

    async def run_one(_):
        await asyncio.Event().wait()

    batch_id = created(store, rows(1))
    runner = Runner(
        store,
        run_one,
        CompletionWindows(store.root),
        lambda: now[0],
        lambda name: holders_of(held)(name) is not None,
    )
    work = asyncio.create_task(runner.run())
    await until(lambda: runner._keyless)
    held.ring = keys(TENANT).ring
    runner.wake()
    await until(lambda: not runner._keyless)
    held.ring = keys("other").ring
    now[0] += REVOKED_SECONDS
    runner.wake()
    await until(lambda: runner._keyless)
    assert store.batch(batch_id, TENANT).status == "validating", "counted anew"
    await cut_off(work)
