"""What tenants and requests used, from the engine through links and routers to a scrape."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.accounts import costs as engine_costs
from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.capacity import UNBOUNDED
from cluster.admission.keys import Tenant
from cluster.admission.tenants import Tenancy
from cluster.replica.sessions import ReplicaTimes
from cluster.router.metrics import CostCollector
from cluster.telemetry.metrics import Metrics
from cluster.wire.parts import ReplicaCosts, ResourceUsage
from cluster.wire.translation import costs_of
from engine.request import Request
from tests.cluster.cluster_lab import Lab, long_request, until
from tests.cluster.replica.test_grammar_replica import Grammars, structured
from tests.cluster.telemetry.test_metrics import samples

TIMES = ReplicaTimes(heartbeat=0.05, costs=0.05)


def scrape(lab: Lab) -> dict:
    metrics = Metrics()
    metrics.register(CostCollector("demo", lab.dispatcher.replicas, lab.dispatcher.counters))
    return samples(metrics)


def of(found: dict, name: str, **labels: str) -> float:
    return found[(f"squadron_{name}", *sorted({"model_name": "demo", **labels}.items()))]


def told(lab: Lab) -> dict[str, ReplicaCosts]:
    return {view.replica_id: view.costs for view in lab.dispatcher.replicas() if view.costs is not None}


async def ask_for(lab: Lab, one: Request) -> None:
    async for _ in lab.dispatcher.generate(one):
        pass


async def ask(lab: Lab, tenant: str, name: str, **params) -> None:
    """Have a tenant's request answered, as an ingress does."""
    async with await Tenancy().visit(Tenant(tenant)) as visit:
        visit.ask("demo", AdmissionQueue(lab.dispatcher, lambda: UNBOUNDED))
        async for _ in visit.source.generate(long_request(name, **params)):
            pass


async def test_scrape_adds_up_for_each_replica_and_names_the_tenants():
    async with Lab() as lab:
        for name in "ab":
            await lab.start(name, times=TIMES, pace=0.002)
        for i in range(4):
            await ask(lab, f"team-{i % 2}", f"r{i}")
        await until(lambda: {t for costs in told(lab).values() for t in costs.tenants} == {"team-0", "team-1"})
        used = lab.dispatcher.counters.device_seconds.total
        await until(
            lambda: sum(u.device_seconds for c in told(lab).values() for u in c.tenants.values()) >= used - 1e-6
        )
        found = scrape(lab)
    for name in ("device_seconds_total", "kv_block_seconds_total"):
        for replica in "ab":
            tenants = [value for key, value in found.items() if key[0] == f"squadron_tenant_{name}"
                       and ("replica", replica) in key]  # fmt: skip
            whole = of(found, name, replica=replica)
            assert whole > 0
            assert sum(tenants) + of(found, f"idle_{name}", replica=replica) == pytest.approx(whole, rel=1e-12)
    assert of(found, "request_device_seconds_count") == 4
    assert of(found, "request_device_seconds_sum") == pytest.approx(
        sum(value for key, value in found.items() if key[0] == "squadron_tenant_device_seconds_total"), rel=1e-9
    )
    assert of(found, "request_kv_block_seconds_count") == 4
    assert of(found, "request_kv_block_seconds_bucket", le="+Inf") == 4


async def test_what_a_tenants_grammars_took_is_told_beside_what_its_requests_used():
    grammars = Grammars()
    async with Lab() as lab:
        await lab.start("a", times=TIMES, grammars=grammars)
        task = asyncio.create_task(ask_for(lab, structured()))
        await until(lambda: grammars.asked)
        grammars.answer()
        await task
        await until(lambda: told(lab)["a"].grammars)
        assert of(scrape(lab), "tenant_grammar_seconds_total", replica="a", tenant="tenant") == 0.25
        costs = told(lab)["a"]
    assert costs.grammars == {"tenant": 0.25}
    used = [costs.idle, *costs.tenants.values()]
    assert sum(one.device_seconds for one in used) == pytest.approx(costs.total.device_seconds, rel=1e-12)


def test_grammars_of_tenants_without_an_account_are_told_together():
    many = {f"t{number}": 1.0 for number in range(engine_costs.MAX_TENANTS + 10)}
    own = engine_costs.EngineCosts(
        engine_costs.EngineUsage(), engine_costs.EngineUsage(), {"t70": engine_costs.EngineUsage()}
    )
    compiled = costs_of(own, many).grammars
    assert sum(compiled.values()) == len(many)
    assert (compiled["t0"], compiled["t70"], compiled[engine_costs.OTHERS]) == (1.0, 1.0, 9.0)


async def test_accounts_of_an_idle_replica_go_on():
    async with Lab() as lab:
        await lab.start("a", times=TIMES)
        await until(lambda: "a" in told(lab))
        before = told(lab)["a"]
        await until(lambda: told(lab)["a"].total.device_seconds > before.total.device_seconds)
        now = told(lab)["a"]
    assert now.idle == now.total
    assert now.total.block_seconds == pytest.approx(511 * now.total.device_seconds)


async def test_router_that_comes_later_is_told_of_what_was_before():
    async with Lab() as lab:
        replica = await lab.start("a", times=TIMES)
        await ask(lab, "early", "r")
        await until(lambda: "early" in told(lab)["a"].tenants)
        async with Lab() as later:
            later.dispatcher.add_link(await replica.link("later"))
            await until(lambda: "a" in told(later))
            assert "early" in told(later)["a"].tenants


async def test_migrated_request_counts_what_its_last_replica_did_for_it():
    async with Lab() as lab:
        await lab.start("a", times=TIMES, pace=0.002)
        chunks = lab.dispatcher.generate(replace(long_request("r"), tenant="t"))
        await anext(chunks)
        lab.kill("a")
        await lab.start("b", times=TIMES, pace=0.002)
        async for _ in chunks:
            pass
        counters = lab.dispatcher.counters
        await until(
            lambda: (
                told(lab)["b"].tenants.get("t", ResourceUsage()).device_seconds
                >= counters.device_seconds.total - 1e-9
            )
        )
        assert counters.migrations == 1
        assert 0 < counters.device_seconds.total == pytest.approx(told(lab)["b"].tenants["t"].device_seconds)


def test_accounts_travel_in_seconds():
    one = engine_costs.EngineUsage
    used = engine_costs.EngineCosts(one(3 * 10**9, 10**22), one(10**9, 1), {"t": one(2, 3)})
    assert costs_of(used) == ReplicaCosts(
        ResourceUsage(3.0, 1e13), ResourceUsage(1.0, 1e-9), {"t": ResourceUsage(2e-9, 3e-9)}
    )
