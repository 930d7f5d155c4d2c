"""What is kept has bounds: the oldest answers that have ended go first, then nothing new is taken."""

import pytest

from cluster.responses import store
from tests.cluster.responses.test_background import asked, until_status
from tests.openai_app import app_for, client_for, saying, served_model

SIZE = 50_000  # bytes of each request


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=400_000)


@pytest.fixture(autouse=True)
def room(monkeypatch):
    monkeypatch.setattr(store, "MOST_BYTES", 5 * SIZE)


async def begin(client):
    return await client.post("/v1/responses", json=asked(input="x" * SIZE))


async def test_the_oldest_that_have_ended_go_first(model):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        names = []
        for _ in range(8):
            names.append((await begin(client)).json()["id"])
            await until_status(client, names[-1], "completed")
        found = [(await client.get(f"/v1/responses/{name}")).status_code for name in names]
    assert found == sorted(found, reverse=True)
    assert found[0] == 404
    assert found[-1] == 200


async def test_where_running_ones_fill_it_new_ones_are_refused_for_now(model):
    source = saying(model, "hello world", hold=3)
    async with client_for(app_for(source, model)) as client:
        answers = [await begin(client) for _ in range(6)]
        assert [one.status_code for one in answers[:4]] == [200] * 4
        refused = answers[-1]
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) > 0
        source.go.set()
        for one in answers[:4]:
            await until_status(client, one.json()["id"], "completed")
        assert (await begin(client)).status_code == 200


async def test_an_answer_that_outgrows_its_bound_is_ended_and_its_reader_told(model, monkeypatch):
    monkeypatch.setattr(store, "MOST_OF_ONE", 3000)
    async with client_for(app_for(saying(model, "hello world " * 50), model)) as client:
        answer = await client.post("/v1/responses", json=asked(stream=True))
        name = answer.text.partition('"id":"')[2].partition('"')[0]
        assert '"error":{' in answer.text.split("\n\n")[-2]
        assert (await client.get(f"/v1/responses/{name}")).status_code == 404
