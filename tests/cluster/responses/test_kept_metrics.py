"""What a router keeps is counted at `/metrics`."""

from __future__ import annotations

import asyncio

import pytest

from cluster.responses import shelf, store
from tests.cluster.ingress.router_lab import RouterLab
from tests.cluster.responses.test_background import asked, until_status
from tests.cluster.responses.test_router_deaths import begin, client_of, fetched
from tests.openai_app import app_for, client_for, saying, served_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=40_000)


async def figures(client) -> dict[str, float]:
    """Samples by name and label, without the model's."""
    found = {}
    for line in (await client.get("/metrics")).text.splitlines():
        if line.startswith("squadron_kept_answer"):
            name, _, rest = line.removeprefix("squadron_").partition("{")
            labels, value = rest.rsplit("} ", 1)
            values = [one for one in labels.split('"')[1::2] if one != "demo"]
            found[" ".join([name, *values])] = float(value)
    return found


async def test_answers_are_counted_while_they_run_and_after(model, monkeypatch):
    monkeypatch.setattr(shelf, "MOST_BYTES", 65_000)
    source = saying(model, "hello", hold=1)
    async with client_for(app_for(source, model)) as client:
        assert not any((await figures(client)).values())
        names = [(await client.post("/v1/responses", json=asked(input="x" * 15_000))).json()["id"] for _ in range(3)]
        assert (await client.post("/v1/responses", json=asked(input="x" * 15_000))).status_code == 429
        await client.post(f"/v1/responses/{names[0]}/cancel")
        await client.delete(f"/v1/responses/{names[1]}")
        now = await figures(client)
        assert (now["kept_answers running"], now["kept_answers ended"]) == (1, 1)
        assert 30_000 < now["kept_answer_bytes"] < 50_000
        assert now["kept_answers_refused_total"] == 1
        assert now["kept_answers_stopped_total response_cancelled"] == 1
        assert now["kept_answers_dropped_total deleted"] == 1
        source.go.set()
        await until_status(client, names[2], "completed")
        await client.post("/v1/responses", json=asked(input="x" * 35_000))
        assert (await figures(client))["kept_answers_dropped_total evicted"] == 1


async def test_those_whose_time_has_come_are_counted(model, monkeypatch):
    monkeypatch.setattr(store, "SWEEP", 0.01)
    async with client_for(app_for(saying(model, "hello"), model, response_retention=0.01)) as client:
        await client.post("/v1/responses", json=asked())
        while (await figures(client))["kept_answers_dropped_total expired"] != 1:
            await asyncio.sleep(0.001)
        assert (await figures(client))["kept_answer_bytes"] == 0


async def test_those_that_are_taken_over_are_counted(tmp_path):
    async with RouterLab(tmp_path, pace=0.002) as lab:
        one, two = lab.routers
        name = await begin(one)
        async with client_of(two) as client:
            lab.kill(one, successor_after=None)
            await fetched(two, name)
            assert (await figures(client))["kept_answers_taken_over_total"] == 1
