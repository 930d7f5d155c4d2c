"""What is kept has bounds: the oldest answers that have ended go first, then nothing new is taken."""

import asyncio
import json
from functools import partial

import pytest

from cluster.admission.keys import FixedKeys, KeyEntry, KeyRing, Tenant, hash_key
from cluster.admission.tenants import Tenancy
from cluster.responses import making, shelf
from cluster.token_source import NO_CONTEXT
from tests.cluster.responses.test_background import asked, events, until_status
from tests.fake_source import FakeSource
from tests.openai_app import MODEL, app_for, client_for, saying, served_model

SIZE = 50_000  # bytes of each request


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=400_000)


@pytest.fixture(autouse=True)
def room(monkeypatch):
    monkeypatch.setattr(shelf, "MOST_BYTES", 5 * SIZE)


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


def two_tenants():
    """Beside the first test's one."""
    return Tenancy(FixedKeys(KeyRing([KeyEntry(hash_key(name), Tenant(name)) for name in ("ann", "bob")])))


def of(name):
    return {"authorization": f"Bearer {name}"}


async def test_what_another_tenant_stores_drops_none_of_a_tenants_answers(model):
    async with client_for(app_for(saying(model, "hello"), model, tenancy=two_tenants())) as client:
        names = {"ann": [], "bob": []}
        for who in ["ann"] * 2 + ["bob"] * 8:
            body = asked(input="x" * SIZE, background=False, store=True)
            names[who].append((await client.post("/v1/responses", json=body, headers=of(who))).json()["id"])
        found = {
            who: [(await client.get(f"/v1/responses/{one}", headers=of(who))).status_code for one in ones]
            for who, ones in names.items()
        }
        assert found == {"ann": [200] * 2, "bob": [404] * 6 + [200] * 2}


async def test_where_another_tenants_running_ones_fill_it_a_tenant_within_its_share_is_served(model):
    source = saying(model, "hello world", hold=3)
    async with client_for(app_for(source, model, tenancy=two_tenants())) as client:
        begin = partial(client.post, "/v1/responses", json=asked(input="x" * SIZE))
        told = [(await begin(headers=of(who))).status_code for who in ["bob"] * 6 + ["ann"] * 2 + ["bob"]]
        assert told == [200] * 4 + [429] * 2 + [200] * 2 + [429]
        source.go.set()


async def test_blanks_in_a_body_take_no_room(model):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        names = []
        for _ in range(8):
            body = json.dumps(asked(background=False, store=True)).replace(",", "," + " " * SIZE)
            answer = await client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
            names.append(answer.json()["id"])
        assert {(await client.get(f"/v1/responses/{name}")).status_code for name in names} == {200}


@pytest.mark.parametrize("follows", [False, True])
async def test_what_is_kept_of_a_body_says_what_was_asked(model, follows):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        first = (await client.post("/v1/responses", json=asked(background=False, store=True))).json()
        more = {"previous_response_id": first["id"]} if follows else {}
        body = json.dumps(asked(store=True, temperature=float("nan")) | more)
        answer = await client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature"), answer.text


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


async def test_an_answer_that_outgrows_its_bound_fails_and_its_reader_is_told(model, monkeypatch):
    monkeypatch.setattr(shelf, "MOST_OF_ONE", 3000)
    async with client_for(app_for(saying(model, "hello world " * 50), model)) as client:
        whole = events((await client.post("/v1/responses", json=asked(stream=True))).text)
        assert [one["type"] for one in whole[-2:]] == ["response.failed", "error"]
        assert whole[-1]["error"]["code"] == "answer_too_large"
        assert whole[-1]["error"]["retryable"] is False
        assert [one["sequence_number"] for one in whole] == list(range(len(whole)))
        found = (await client.get(f"/v1/responses/{whole[0]['response']['id']}")).json()
        assert (found["status"], found["error"]["message"]) == ("failed", whole[-1]["error"]["message"])
        for had in (0, 3, 10, 10_000):  # of a client whose connection was cut before the error
            path = f"/v1/responses/{whole[0]['response']['id']}?stream=true&starting_after={had}"
            failed, error = told((await client.get(path)).text)[-2:]
            assert (failed["type"], error["error"]["code"]) == ("response.failed", "answer_too_large")


class Stuck(FakeSource):
    """Says nothing to long prompts, and a text to others."""

    async def generate(self, request, context=NO_CONTEXT):
        if len(request.prompt_token_ids) >= SIZE:
            await asyncio.Event().wait()
        async for chunk in super().generate(request, context):
            yield chunk


TEXT = "hello world " * 100


@pytest.fixture
def full(model):
    """A server whose room is nearly taken by answers that run."""
    eos = model.tokenizer.eos_token_id
    tokens = [*model.tokenizer.encode(TEXT), eos]
    return Stuck(lambda *_: tokens, eos=eos, hold=1)


def told(text):
    """What the events say."""
    return [json.loads(line.partition("data: ")[2]) for line in text.splitlines() if "data: {" in line]


@pytest.mark.parametrize("background", [True, False])
async def test_a_running_answer_that_finds_no_more_room_fails_and_all_its_readers_are_told(model, full, background):
    async with client_for(app_for(full, model)) as client:
        others = [(await begin(client)).json()["id"] for _ in range(4)]
        body = {"model": MODEL, "input": "hi", "stream": True, "background": background, "store": True}
        reading = asyncio.create_task(client.post("/v1/responses", json=body))
        while not full.requests and not reading.done():
            await asyncio.sleep(0)
        path = f"/v1/responses/{full.requests[0].request_id}"
        waiting = asyncio.create_task(client.get(f"{path}?stream=true"))
        await asyncio.sleep(0)
        full.go.set()
        for text in ((await reading).text, (await waiting).text):
            failed, error = told(text)[-2:]
            assert (failed["type"], error["error"]["code"]) == ("response.failed", "overloaded")
            assert error["error"]["retryable"] is True
        found = await client.get(path)
        assert (found.status_code, found.json()["status"]) == (200, "failed")
        assert found.json()["error"]["code"] == "rate_limit_exceeded"
        for other in others:
            assert (await client.delete(f"/v1/responses/{other}")).status_code == 200


@pytest.mark.parametrize(("stream", "size"), [(True, 30_000), (False, 40_000)])
async def test_a_keyed_chat_that_finds_no_more_room_is_made_once_there_is_some(
    model, full, stream, size, monkeypatch
):
    monkeypatch.setattr(making, "NOTE_EVERY", 0.0)
    async with client_for(app_for(full, model)) as client:
        others = [(await begin(client)).json()["id"] for _ in range(4)]
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x" * size}], "stream": stream}
        ask = partial(client.post, "/v1/chat/completions", json=body, headers={"idempotency-key": "one"})
        reading = asyncio.create_task(ask())
        while not full.requests and not reading.done():
            await asyncio.sleep(0)
        full.go.set()
        assert '"code":"overloaded"' in (await reading).text
        for other in others:
            assert (await client.delete(f"/v1/responses/{other}")).status_code == 200
        again = await ask()
        assert again.status_code == 200
        if stream:
            assert "".join(one["choices"][0]["delta"].get("content") or "" for one in told(again.text)) == TEXT
        else:
            assert again.json()["choices"][0]["message"]["content"] == TEXT
