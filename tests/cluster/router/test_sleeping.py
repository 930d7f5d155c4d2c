"""Sleep over HTTP: all replicas free their memory, whoever asks meanwhile hears so, and no token is lost."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from cluster.admission.admission_queue import AdmissionQueue
from cluster.admission.key_file import parse_keys
from cluster.admission.keys import FixedKeys, KeyRing
from cluster.admission.tenants import Tenancy
from cluster.errors import ApiError
from cluster.router.sleeping import SleepingModel
from cluster.sleep_orders import SleepOrder
from engine.errors import StepMemoryError
from tests.cluster.cluster_lab import Lab, LabReplica, long_request, oracle, until
from tests.openai_app import app_for, client_for, served_model

KEYS = "- {key: sk-user, tenant: user}\n- {key: sk-admin, tenant: operations, admin: true}\n"
ADMIN = {"authorization": "Bearer sk-admin"}
USER = {"authorization": "Bearer sk-user"}
ASK = {"model": "demo", "prompt": "a", "max_tokens": 3}


class Book:
    """Orders in this process: each is told to everybody at once, as their looks at Ray's store would in a while."""

    def __init__(self) -> None:
        self.order = SleepOrder()
        self.obey: list = []
        self.loop = asyncio.get_running_loop()

    def read(self) -> SleepOrder:
        return self.order

    def write(self, order: SleepOrder) -> None:
        self.order = order
        for one in self.obey:
            self.loop.call_soon_threadsafe(one, order)


class Sleepers:
    """Replicas, a router of theirs, and its HTTP app."""

    def __init__(self, lab: Lab, folder) -> None:
        self.lab = lab
        self.book = Book()
        self.admission = AdmissionQueue(lab.dispatcher, lambda: 64, serving=lab.dispatcher.has_replica)
        self.sleeping = SleepingModel("demo", lab.dispatcher, self.admission, self.book)
        tenancy = Tenancy(FixedKeys(KeyRing(parse_keys(KEYS, "keys.yaml"))))
        app = app_for(
            lab.dispatcher,
            served_model(folder),
            tenancy=tenancy,
            admission=self.admission,
            sleeping=[self.sleeping],
        )
        self.client = client_for(app)

    async def start(self, name: str, **settings) -> LabReplica:
        replica = await self.lab.start(name, **settings)
        self.book.obey.append(replica.core.obey)
        replica.core.obey(self.book.order)
        return replica

    async def post(self, path: str, headers=ADMIN, **query):
        return await self.client.post(path, params=query, headers=headers)

    async def collect(self, request) -> dict[int, list[int]]:
        """As `Lab.collect`, through the queue."""
        tokens: dict[int, list[int]] = {choice: [] for choice in range(request.params.n)}
        async with contextlib.aclosing(self.admission.generate("user", request)) as chunks:
            async for chunk in chunks:
                tokens[chunk.choice].extend(chunk.token_ids)
        return tokens


@pytest.fixture
async def sleepers(tmp_path):
    async with Lab() as lab:
        yield Sleepers(lab, tmp_path)


async def test_all_replicas_sleep_and_wake_and_say_the_same_tokens(sleepers):
    first, second = await sleepers.start("a"), await sleepers.start("b")
    before = await sleepers.collect(long_request("one"))
    answer = await sleepers.post("/sleep", level=2)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "sleeping"
    assert answer.json()["level"] == 2
    told, parts = answer.json()["models"]["demo"]["replicas"], ["weights", "kv_cache"]
    assert told == {name: {"level": 2, "asleep": parts, "released": parts} for name in "ab"}
    assert first.engine.sleep_level == second.engine.sleep_level == 2
    assert (await sleepers.client.get("/is_sleeping", headers=USER)).json()["is_sleeping"] is True
    answer = await sleepers.post("/wake_up")
    assert answer.json() | {"models": None} == {"status": "awake", "tags": None, "models": None}
    assert (await sleepers.client.get("/is_sleeping", headers=USER)).json()["is_sleeping"] is False
    assert not first.engine.is_sleeping
    assert await sleepers.collect(long_request("two")) == before == oracle(long_request("one"))


async def test_who_comes_meanwhile_gets_a_503_that_says_what_to_do(sleepers):
    await sleepers.start("a")
    assert (await sleepers.post("/sleep")).status_code == 200
    answer = await sleepers.client.post("/v1/completions", json=ASK, headers=USER)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    error = answer.json()["error"]
    assert (error["code"], error["retryable"]) == ("asleep", True)
    assert "/wake_up" in error["message"]
    assert sleepers.lab.dispatcher.replicas()[0].asleep == 1
    assert not sleepers.lab.dispatcher.ready


async def test_it_is_refused_while_requests_run_unless_the_mode_says_what_becomes_of_them(sleepers):
    replica = await sleepers.start("a", steps=3)
    running = asyncio.create_task(sleepers.collect(long_request("runs")))
    await replica.until_stats(lambda stats: stats.num_running == 1)
    answer = await sleepers.post("/sleep")
    assert answer.status_code == 409
    assert answer.json()["error"]["param"] == "mode"
    assert not sleepers.sleeping.is_sleeping
    replica.executor.allow(1000)
    assert await running == oracle(long_request("runs"))
    await until(lambda: not sleepers.lab.dispatcher.num_live)
    assert (await sleepers.post("/sleep")).status_code == 200


async def test_wait_lets_them_finish_while_new_ones_are_refused(sleepers):
    replica = await sleepers.start("a", steps=3)
    running = asyncio.create_task(sleepers.collect(long_request("runs")))
    await replica.until_stats(lambda stats: stats.num_running == 1)
    asked = asyncio.create_task(sleepers.post("/sleep", mode="wait"))
    await until(lambda: sleepers.sleeping.is_sleeping)
    with pytest.raises(ApiError) as refused:
        await sleepers.collect(long_request("late"))
    assert refused.value.code == "asleep"
    assert not replica.engine.is_sleeping
    replica.executor.allow(1000)
    assert await running == oracle(long_request("runs"))
    assert (await asked).status_code == 200
    assert replica.engine.is_sleeping


async def test_abort_ends_them_with_an_error(sleepers):
    replica = await sleepers.start("a", steps=3)
    running = asyncio.create_task(sleepers.collect(long_request("runs")))
    await replica.until_stats(lambda stats: stats.num_running == 1)
    asked = asyncio.create_task(sleepers.post("/sleep", mode="abort"))
    with pytest.raises(ApiError) as ended:
        await running
    assert (ended.value.code, ended.value.status) == ("asleep", 503)
    replica.executor.allow(1000)
    assert (await asked).status_code == 200


async def test_keep_goes_on_with_them_after_waking(sleepers):
    replica = await sleepers.start("a", steps=3)
    running = asyncio.create_task(sleepers.collect(long_request("runs")))
    await replica.until_stats(lambda stats: stats.num_running == 1)
    asked = asyncio.create_task(sleepers.post("/sleep", mode="keep", level=2))
    while not asked.done():  # the order comes between two steps
        replica.executor.allow(1)
        await asyncio.sleep(0.02)
    assert (await asked).status_code == 200
    assert not running.done()
    replica.executor.allow(1000)
    await asyncio.sleep(0.05)
    assert not running.done(), "a sleeping engine computes nothing"
    assert (await sleepers.post("/wake_up")).status_code == 200
    assert await running == oracle(long_request("runs"))


@pytest.mark.parametrize("tags", [{}, {"tags": "weights"}])
async def test_other_weights_at_waking_are_another_life_and_no_answer_is_of_two_models(sleepers, tags):
    replica = await sleepers.start("a", steps=3, fingerprint="old")
    running = asyncio.create_task(sleepers.collect(long_request("runs")))
    await replica.until_stats(lambda stats: stats.num_running == 1)
    asked = asyncio.create_task(sleepers.post("/sleep", mode="keep", level=2))
    while not asked.done():
        replica.executor.allow(1)
        await asyncio.sleep(0.02)
    (before,) = sleepers.lab.dispatcher.replicas()
    replica.executor.in_folder = "new"
    replica.executor.allow(1000)
    woken = asyncio.create_task(sleepers.post("/wake_up", **tags))
    await until(lambda: sleepers.lab.lost == [("a", "superseded")] or running.done())
    await sleepers.lab.link(replica)  # as the router's register does
    assert (await woken).status_code == 200
    await sleepers.post("/wake_up")
    with pytest.raises(ApiError) as ended:
        await running
    assert (ended.value.code, ended.value.status, ended.value.retryable) == ("model_changed", 503, True)
    assert sleepers.lab.dispatcher.replicas()[0].incarnation != before.incarnation
    assert replica.core.facts.fingerprint == "new"
    assert await sleepers.collect(long_request("again")) == oracle(long_request("again"))
    await until(lambda: replica.held_blocks == 0)


async def test_parts_are_woken_one_after_the_other(sleepers):
    replica = await sleepers.start("a")
    await sleepers.post("/sleep", level=2)
    answer = await sleepers.post("/wake_up", tags="weights")
    assert answer.json()["status"] == "sleeping"
    assert replica.engine.asleep == ("kv_cache",)
    assert (await sleepers.client.post("/v1/completions", json=ASK, headers=USER)).status_code == 503
    answer = await sleepers.post("/wake_up", tags="kv_cache")
    assert answer.json()["status"] == "awake"
    assert not replica.engine.is_sleeping


async def test_a_replica_that_dies_asleep_comes_back_asleep(sleepers):
    await sleepers.start("a")
    await sleepers.post("/sleep")
    sleepers.lab.kill("a")
    await until(lambda: not sleepers.lab.dispatcher.linked)
    again = await sleepers.start("b")
    await until(lambda: again.engine.is_sleeping)
    await until(lambda: sleepers.lab.dispatcher.replicas()[0].asleep == 1)
    assert (await sleepers.post("/wake_up")).status_code == 200
    assert await sleepers.collect(long_request("x")) == oracle(long_request("x"))


async def test_another_routers_order_counts_before_this_one_has_looked(sleepers):
    """Whoever wakes a model may use it at once, whichever router the next request comes to."""
    await sleepers.start("a")
    await sleepers.post("/sleep")
    told = sleepers.book.obey
    sleepers.book.write(sleepers.book.order.waking(("weights", "kv_cache")))  # by a router that this one is not
    await until(lambda: not sleepers.lab.dispatcher.replicas()[0].asleep)
    assert len(told) == 1, "the replica alone has looked"
    assert sleepers.sleeping.order.asleep
    assert await sleepers.collect(long_request("x")) == oracle(long_request("x"))
    answer = await sleepers.post("/sleep", level=2)
    assert answer.json()["level"] == 2, "it has looked before it gives an order of its own"


async def test_where_a_replica_cannot_sleep_all_are_awake_again(sleepers, monkeypatch):
    fine, full = await sleepers.start("a"), await sleepers.start("b")

    def sleep(level):
        raise StepMemoryError("no room on the host")

    monkeypatch.setattr(full.executor, "sleep", sleep)
    answer = await sleepers.post("/sleep")
    assert answer.status_code == 503
    assert "no room on the host" in answer.json()["error"]["message"]
    await until(lambda: not fine.engine.is_sleeping)
    await until(lambda: not sleepers.sleeping.is_sleeping)
    assert await sleepers.collect(long_request("x")) == oracle(long_request("x"))


async def test_deeper_sleep_needs_waking_first_and_the_same_again_is_nothing(sleepers):
    await sleepers.start("a")
    assert (await sleepers.post("/wake_up")).json()["status"] == "awake"
    await sleepers.post("/sleep", level=1)
    assert (await sleepers.post("/sleep", level=1)).status_code == 200
    answer = await sleepers.post("/sleep", level=2)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "level")
    await sleepers.post("/wake_up", tags="weights")
    answer = await sleepers.post("/sleep", level=1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "level")


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/sleep", {"level": "0"}, "level"),
        ("/sleep", {"level": "deep"}, "level"),
        ("/sleep", {"mode": "now"}, "mode"),
        ("/sleep", {"lvel": "1"}, "lvel"),
        ("/wake_up", {"tags": "cache"}, "tags[0]"),
        ("/sleep", {"model": "other"}, "model"),
        ("/sleep", {"model": "7" * 6000}, "model"),
        ("/sleep", {"level": "7" * 6000}, "level"),
        ("/sleep", {"level": "\u0661"}, "level"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(sleepers, path, query, param):
    answer = await sleepers.post(path, **query)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param
    assert not sleepers.sleeping.is_sleeping


@pytest.mark.parametrize(("headers", "status"), [({}, 401), (USER, 403)])
@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
async def test_who_is_no_operator_neither_puts_to_sleep_nor_wakes(sleepers, path, headers, status):
    assert (await sleepers.post(path, headers=headers)).status_code == status
    assert not sleepers.sleeping.is_sleeping


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/is_sleeping"])
async def test_without_the_flag_the_routes_name_it(tmp_path, path):
    async with Lab() as lab:
        client = client_for(app_for(lab.dispatcher, served_model(tmp_path)))
        answer = await client.request("GET" if path == "/is_sleeping" else "POST", path)
        assert answer.status_code == 404
        assert "--enable-sleep-mode" in answer.json()["error"]["message"]
