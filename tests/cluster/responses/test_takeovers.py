"""What happens to an answer between two steps of the router that takes it over, or is about to begin it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from cluster.admission.keys import OPEN, FixedKeys, KeyEntry, KeyRing, Quota, Tenant, hash_key
from cluster.admission.tenants import Tenancy
from cluster.errors import ApiError
from cluster.replica import answer_keeper
from cluster.responses import making, shelf
from cluster.responses.copies import NoCopies
from cluster.responses.record import Head, Record
from cluster.router.answer_copies import AnswerCopies
from tests.cluster.ingress import router_lab
from tests.cluster.ingress.router_lab import RouterLab
from tests.cluster.responses.test_router_deaths import begin, client_of, fetched, until_tokens
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

NAME = "resp_1"
BODY = {"model": MODEL, "input": "hi", "background": True}
HEAD = Head(NAME, "/v1/responses", json.dumps(BODY).encode(), OPEN.name, "1", background=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=4096)


class SlowCopies(NoCopies):
    """Copies of one answer, which are fetched once `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = asyncio.Event()
        self.record = Record(HEAD)
        self.disclaimed = False

    async def fetch(self, name: str, tenant: str | None) -> Record | None:
        self.asked.set()
        await self.go.wait()
        return self.record if name == NAME else None

    async def orphan(self, name: str) -> Record | None:
        return self.record

    def disclaim(self, name: str) -> None:
        self.disclaimed = True

    def listen(self, orphaned: Callable[[str], None], *_: object) -> None:
        self.orphaned = orphaned


async def test_one_that_runs_takes_the_place_of_answers_that_have_ended(model, monkeypatch):
    monkeypatch.setattr(shelf, "MOST_BYTES", 20_000)
    source, copies = saying(model, "hello world"), SlowCopies()
    copies.go.set()
    async with client_for(app_for(source, model, copies=copies)) as client:
        names = [(await client.post("/v1/responses", json=BODY)).json()["id"] for _ in range(6)]
        while (await client.get(f"/v1/responses/{names[-1]}")).json()["status"] != "completed":
            await asyncio.sleep(0)
        body = json.dumps(BODY | {"input": "x" * 3000}).encode()
        copies.record = Record(structs.replace(HEAD, body=body))
        asked = len(source.requests)
        copies.orphaned(NAME)
        while not (copies.disclaimed or len(source.requests) > asked):
            await asyncio.sleep(0)
        assert not copies.disclaimed, "nobody goes on with it"
        while (await client.get(f"/v1/responses/{NAME}")).json()["status"] != "completed":
            await asyncio.sleep(0)


@pytest.mark.parametrize("way", ["cancel", "delete"])
async def test_one_that_is_ended_while_it_is_taken_over_runs_no_more(model, way):
    source, copies = saying(model, "hello world", hold=3), SlowCopies()
    async with client_for(app_for(source, model, copies=copies)) as client:
        path = f"/v1/responses/{NAME}"
        asked = client.delete(path) if way == "delete" else client.post(f"{path}/cancel")
        ending = asyncio.create_task(asked)
        await copies.asked.wait()
        copies.orphaned(NAME)
        while not source.requests:
            await asyncio.sleep(0)
        copies.go.set()
        assert (await ending).status_code == 200
        while not source.closed:
            await asyncio.sleep(0)
    assert len(source.requests) == len(source.closed) == 1


class TakenAtOnce(NoCopies):
    """Another router has the first answer before its first step here."""

    def __init__(self) -> None:
        self.left = 1

    async def fetch(self, name: str, tenant: str | None) -> Record | None:
        if self.left:
            self.left -= 1
            asyncio.get_running_loop().call_soon(self.superseded, name, 0, True)
        return None

    def listen(self, _: object, superseded: Callable[[str, int, bool], None], *__: object) -> None:
        self.superseded = superseded


async def test_one_that_is_taken_before_its_first_step_leaves_nobody_waiting(model):
    ring = KeyRing([KeyEntry(hash_key("ann"), Tenant("ann", quota=Quota(max_concurrent=1)))])
    app = app_for(saying(model, "hello"), model, tenancy=Tenancy(FixedKeys(ring)), copies=TakenAtOnce())
    async with client_for(app) as client:
        for key in ("one", "one", "two"):
            headers = {"authorization": "Bearer ann", "idempotency-key": key}
            answer = await client.post("/v1/responses", json=BODY | {"background": False}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "completed"


class Slow(AnswerCopies):
    """Copies of a router that takes its time between an offer and its claim's use."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.go = asyncio.Event()
        self.claimed = asyncio.Event()

    async def orphan(self, name: str) -> Record | None:
        found = await super().orphan(name)
        self.claimed.set()
        await self.go.wait()
        return found


async def test_an_answer_is_taken_over_once_however_long_its_next_router_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(router_lab, "AnswerCopies", Slow)
    monkeypatch.setattr(answer_keeper, "TURN", 0.01)
    async with RouterLab(tmp_path, routers=3, pace=0.002) as lab:
        one, *others = lab.routers
        name = await begin(one)
        await until_tokens(one, name, 20)
        lab.kill(one, successor_after=None)
        claimed = [asyncio.create_task(router.copies.claimed.wait()) for router in others]
        await asyncio.wait(claimed, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.5)  # in which it would be offered to the next one some times
        assert sum(task.done() for task in claimed) == 1
        for task in claimed:
            task.cancel()
        for router in others:
            router.copies.go.set()
        await fetched(others[0], name)
        assert sum(router.dispatcher.counters.accepted for router in others) == 1


async def test_an_answer_that_has_ended_is_kept_no_longer_for_being_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(router_lab, "RETENTION", 1.5)
    monkeypatch.setattr(answer_keeper, "TURN", 0.02)
    async with RouterLab(tmp_path) as lab:
        name = await begin(lab.routers[0])
        await fetched(lab.routers[0], name)
        for _ in range(12):  # together much longer than the retention, each of them shorter
            lab.kill(lab.routers[0])
            await asyncio.sleep(0.4)
            async with client_of(lab.routers[0]) as client:
                status = (await client.get(f"/v1/responses/{name}")).status_code
            if status == 404:
                return
        pytest.fail("each takeover gave it its whole time anew")


class Superseded(NoCopies):
    """Another router goes on with the answer when it is told to."""

    def listen(self, _: object, superseded: Callable[[str, int, bool], None], *__: object) -> None:
        self.superseded = superseded


@pytest.mark.parametrize(("epoch", "charged"), [(1, 0), (0, 3)], ids=["taken over", "deleted elsewhere"])
async def test_what_another_router_goes_on_with_is_charged_there(model, epoch, charged, monkeypatch):
    source, copies, paused = saying(model, "hello world", hold=3), Superseded(), asyncio.Event()

    async def pause() -> None:
        paused.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(source, "_pause", pause)
    tenant = Tenant("ann", quota=Quota(tokens_per_minute=1_000_000))
    tenancy = Tenancy(FixedKeys(KeyRing([KeyEntry(hash_key("ann"), tenant)])))
    async with client_for(app_for(source, model, tenancy=tenancy, copies=copies)) as client:
        headers = {"authorization": "Bearer ann"}
        name = (await client.post("/v1/responses", json=BODY, headers=headers)).json()["id"]
        await paused.wait()
        copies.superseded(name, epoch, not charged)
        while tenancy.quotas.running(tenant):
            await asyncio.sleep(0)
    counts = tenancy.counts_of(MODEL, tenant)
    assert counts.output_tokens == charged
    assert counts.prompt_tokens > 0
    (used,) = tenancy.quotas.used().values()
    assert sum(used.values()) == counts.prompt_tokens + charged


class Nowhere(NoCopies):
    """There is no replica that would take a copy."""

    async def settle(self, record: Record) -> bool:
        return False


async def test_the_id_of_an_answer_that_failed_is_given_though_nobody_has_a_copy(model):
    source = saying(model, "hello", hold=1, error=ApiError("replica_lost", "it is gone"))
    async with asyncio.timeout(10), client_for(app_for(source, model, copies=Nowhere())) as client:
        answer = await client.post("/v1/responses", json=BODY)
    assert answer.json()["status"] == "failed"


async def test_an_id_is_waited_for_no_longer_than_it_may_take_until_somebody_has_a_copy(model, monkeypatch):
    monkeypatch.setattr(making, "GRACE", 0.05)
    async with asyncio.timeout(10), client_for(app_for(saying(model, "hello"), model, copies=Nowhere())) as client:
        answer = await client.post("/v1/responses", json=BODY)
    assert answer.json()["status"] == "completed"
