"""Background responses on one router: made without their client, fetched, streamed again, cancelled, deleted."""

import asyncio
import json

import httpx
import openai
import pytest
from openai.types.responses import Response

from cluster.admission.keys import FixedKeys, KeyEntry, KeyRing, Tenant, hash_key
from cluster.admission.tenants import Tenancy
from cluster.errors import ApiError
from tests.openai_app import MODEL, app_for, client_for, saying, served_model, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=4096)


def asked(**fields):
    return {"model": MODEL, "input": "hi", "background": True, **fields}


def events(text):
    """(id, event) of each frame."""
    found = []
    for block in text.split("\n\n")[:-1]:
        number, name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert number == f"id: {event['sequence_number']}"
        found.append(event)
    return found


async def until_status(client, name, status):
    while (body := (await client.get(f"/v1/responses/{name}")).json())["status"] != status:
        await asyncio.sleep(0.001)
    return body


async def test_it_is_made_without_its_client_and_fetched(model):
    source = saying(model, "hello 🙂 world", hold=3)
    async with client_for(app_for(source, model)) as client:
        begun = (await client.post("/v1/responses", json=asked())).json()
        assert Response.model_validate(begun, strict=True).status in ("queued", "in_progress")
        assert begun["background"] is True and begun["store"] is True
        await until_status(client, begun["id"], "in_progress")
        source.go.set()
        body = await until_status(client, begun["id"], "completed")
    assert Response.model_validate(body, strict=True).output_text == "hello 🙂 world"
    assert body["id"] == begun["id"]


async def test_a_stream_is_gone_on_with_behind_any_event(model):
    source = saying(model, "hello 🙂 world")
    async with client_for(app_for(source, model)) as client:
        whole = events((await client.post("/v1/responses", json=asked(stream=True))).text)
        assert [one["sequence_number"] for one in whole] == list(range(len(whole)))
        assert [one["type"] for one in whole[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        path = f"/v1/responses/{whole[0]['response']['id']}"
        for number in range(len(whole)):
            rest = await client.get(path, params={"stream": "true", "starting_after": number})
            assert events(rest.text) == whole[number + 1 :]
        assert events((await client.get(path, params={"stream": "true"})).text) == whole
    assert len(source.requests) == 1


async def test_a_client_that_reconnects_by_itself_says_the_last_event_in_a_header(model):
    async with client_for(app_for(saying(model, "hello 🙂 world"), model)) as client:
        whole = events((await client.post("/v1/responses", json=asked(stream=True))).text)
        path = f"/v1/responses/{whole[0]['response']['id']}"
        for query in ({"stream": "true"}, {"stream": "true", "starting_after": 2}):
            rest = await client.get(path, params=query, headers={"last-event-id": "5"})
            assert events(rest.text) == whole[6:]


@pytest.mark.parametrize("query", ["stream=true&starting_after=9", "stream=false", ""])
async def test_a_last_event_that_contradicts_the_query_is_refused_by_name(model, query):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        name = (await client.post("/v1/responses", json=asked())).json()["id"]
        answer = await client.get(f"/v1/responses/{name}?{query}", headers={"last-event-id": "5"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "Last-Event-ID"


async def test_the_openai_client_goes_on_behind_the_event_that_it_had(model):
    source = saying(model, "hello world", hold=4)
    async with (
        serving(app_for(source, model)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as client,
    ):
        stream = await client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        name, text, last = "", "", -1
        async for event in stream:
            last, name = event.sequence_number, name or event.response.id
            if event.type == "response.output_text.delta":
                text += event.delta
                break
        await stream.close()
        source.go.set()
        async for event in await client.responses.retrieve(name, stream=True, starting_after=last):
            assert event.sequence_number == last + 1
            last = event.sequence_number
            if event.type == "response.output_text.delta":
                text += event.delta
        assert event.type == "response.completed"
        assert text == event.response.output_text == "hello world"


async def test_it_is_cancelled(model):
    source = saying(model, "hello world", hold=3)
    async with (
        serving(app_for(source, model)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as client,
    ):
        begun = await client.responses.create(model=MODEL, input="hi", background=True)
        ended = await client.responses.cancel(begun.id)
        assert ended.status == "cancelled"
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"
        stream = await client.responses.retrieve(begun.id, stream=True)
        assert [event.type async for event in stream][-1] == "response.cancelled"
    assert source.closed == [begun.id]


async def test_one_whose_client_waits_is_not_cancelled(model):
    source = saying(model, "hello world", hold=3)
    async with client_for(app_for(source, model)) as client:
        body = {"model": MODEL, "input": "hi", "store": True}
        waiting = asyncio.create_task(client.post("/v1/responses", json=body))
        while not source.requests:
            await asyncio.sleep(0)
        refused = await client.post(f"/v1/responses/{source.requests[0].request_id}/cancel")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "response_id"
        source.go.set()
        assert (await waiting).json()["status"] == "completed"


@pytest.mark.parametrize("retryable", [True, False])
async def test_a_waiting_client_gets_the_error_that_ended_it(model, retryable):
    failure = ApiError("of_its_own", "it broke", param="input", status=507, retryable=retryable)
    async with client_for(app_for(saying(model, "hello world", hold=3, error=failure), model)) as client:
        answer = await client.post("/v1/responses", json={"model": MODEL, "input": "hi", "store": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["message"]) == (507, "of_its_own", "it broke")
    assert error["retryable"] is retryable


async def test_one_that_is_complete_stays_so_when_it_is_cancelled(model):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        name = (await client.post("/v1/responses", json=asked())).json()["id"]
        body = await until_status(client, name, "completed")
        assert (await client.post(f"/v1/responses/{name}/cancel")).json() == body


async def test_it_is_deleted_while_it_runs(model):
    source = saying(model, "hello world", hold=3)
    async with client_for(app_for(source, model)) as client:
        name = (await client.post("/v1/responses", json=asked())).json()["id"]
        gone = await client.delete(f"/v1/responses/{name}")
        assert gone.json() == {"id": name, "object": "response", "deleted": True}
        for again in (client.get, client.delete):
            answer = await again(f"/v1/responses/{name}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
    assert source.closed == [name]


async def test_one_that_is_stored_is_made_to_its_end_for_a_client_that_left(model):
    source = saying(model, "hello world", hold=3)
    async with serving(app_for(source, model)) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"model": MODEL, "input": "hi", "store": True, "stream": True}
        async with client.stream("POST", "/v1/responses", json=body) as answer:
            name = ""
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    name = name or json.loads(line.removeprefix("data: "))["response"]["id"]
                if "output_text.delta" in line:
                    break
        source.go.set()
        found = await until_status(client, name, "completed")
        assert found["output"][0]["content"][0]["text"] == "hello world"
        assert found["store"] is True and found["background"] is False


async def test_a_stored_body_is_what_is_fetched(model):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        asked_for = {"model": MODEL, "input": "hi", "store": True}
        first = await client.post("/v1/responses", json=asked_for)
        assert first.json()["status"] == "completed"
        assert (await client.get(f"/v1/responses/{first.json()['id']}")).json() == first.json()


async def test_what_is_not_stored_is_not_found(model):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        first = (await client.post("/v1/responses", json={"model": MODEL, "input": "hi"})).json()
        assert first["store"] is False
        answer = await client.get(f"/v1/responses/{first['id']}")
        assert answer.status_code == 404
        assert "--response-retention" in answer.json()["error"]["message"]


async def test_one_that_is_kept_for_its_key_alone_is_not_found(model):
    source = saying(model, "hello")
    async with client_for(app_for(source, model)) as client:
        body, key = {"model": MODEL, "input": "hi", "store": False}, {"idempotency-key": "one"}
        first = (await client.post("/v1/responses", json=body, headers=key)).json()
        path = f"/v1/responses/{first['id']}"
        for again in (client.get(path), client.delete(path), client.post(f"{path}/cancel")):
            assert (await again).status_code == 404
        more = {"model": MODEL, "input": "more", "previous_response_id": first["id"]}
        assert (await client.post("/v1/responses", json=more)).status_code == 400
        assert (await client.post("/v1/responses", json=body, headers=key)).json() == first
    assert len(source.requests) == 1


async def test_a_failure_is_fetched_as_one(model):
    source = saying(model, "hello", hold=2, error=ValueError("inside"))
    async with client_for(app_for(source, model)) as client:
        name = (await client.post("/v1/responses", json=asked())).json()["id"]
        # Nothing tells what is wrong inside; the last frame of the stream is the one typed error.
        last = (await client.get(f"/v1/responses/{name}", params={"stream": "true"})).text.split("\n\n")[-2]
        assert json.loads(last.split("data: ")[1])["error"]["code"] == "internal_error"


async def test_a_wrong_request_is_refused_at_once_and_not_kept(model):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        answer = await client.post("/v1/responses", json=asked(temperature=-1))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "temperature"
        answer = await client.post("/v1/responses", json=asked(store=False))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "store"
        answer = await client.post("/v1/responses", json=asked(background="yes"))
        assert answer.json()["error"]["param"] == "background"


@pytest.mark.parametrize(
    ("field", "value"), [("background", True), ("store", True), ("previous_response_id", "resp_1")]
)
async def test_where_nothing_is_kept_it_is_refused_by_name(model, field, value):
    async with client_for(app_for(saying(model, "hello"), model, response_retention=0)) as client:
        answer = await client.post("/v1/responses", json={"model": MODEL, "input": "hi", field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        assert "--response-retention" in answer.json()["error"]["message"]
        assert (await client.get("/v1/responses/resp_1")).status_code == 404


async def test_its_time_comes(model):
    async with client_for(app_for(saying(model, "hello"), model, response_retention=0.01)) as client:
        name = (await client.post("/v1/responses", json=asked())).json()["id"]
        while (await client.get(f"/v1/responses/{name}")).status_code != 404:
            await asyncio.sleep(0.01)


async def test_tenants_see_their_own(model):
    ring = KeyRing([KeyEntry(hash_key(name), Tenant(name)) for name in ("ann", "bob")])
    source = saying(model, "hello world", hold=3)
    async with client_for(app_for(source, model, tenancy=Tenancy(FixedKeys(ring)))) as client:
        ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
        name = (await client.post("/v1/responses", json=asked(), headers=ann)).json()["id"]
        path = f"/v1/responses/{name}"
        assert (await client.get(path, headers=bob)).status_code == 404
        assert (await client.post(f"{path}/cancel", headers=bob)).status_code == 404
        assert (await client.delete(path, headers=bob)).status_code == 404
        assert (await client.get(path, headers=ann)).status_code == 200
        assert (await client.delete(path, headers=ann)).status_code == 200


@pytest.mark.parametrize(
    "query",
    [
        "starting_after=3",
        "stream=true&starting_after=x",
        "stream=maybe",
        "include=a",
        "stream=true&stream=true",
        "x=1",
    ],
)
async def test_a_wrong_query_is_refused_by_name(model, query):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        name = (await client.post("/v1/responses", json=asked())).json()["id"]
        answer = await client.get(f"/v1/responses/{name}?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in query


async def test_a_conversation_goes_on_from_a_response_that_is_kept(model):
    source = saying(model, "one")
    async with client_for(app_for(source, model)) as client:
        body = {"model": MODEL, "input": "first", "instructions": "be kind", "store": True}
        first = (await client.post("/v1/responses", json=body)).json()
        body = {"model": MODEL, "input": "second", "store": True, "previous_response_id": first["id"]}
        second = (await client.post("/v1/responses", json=body)).json()
        assert second["previous_response_id"] == first["id"]
        items = [{"role": "user", "content": "third"}]
        body = {"model": MODEL, "input": items, "previous_response_id": second["id"]}
        third = await client.post("/v1/responses", json=body)
        assert third.status_code == 200, third.text
        talk = [
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "second"},
        ]
        talk += [{"role": "assistant", "content": "one"}, {"role": "user", "content": "third"}]
        await client.post("/v1/responses", json={"model": MODEL, "input": talk})
    assert source.requests[2].prompt_token_ids == source.requests[3].prompt_token_ids


async def test_a_conversation_cannot_go_on_from_what_is_not_there_or_failed(model):
    source = saying(model, "one", hold=2)
    async with client_for(app_for(source, model)) as client:
        body = {"model": MODEL, "input": "more", "previous_response_id": "resp_1"}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "previous_response_id"
        name = (await client.post("/v1/responses", json=asked())).json()["id"]
        await client.post(f"/v1/responses/{name}/cancel")
        answer = await client.post("/v1/responses", json=body | {"previous_response_id": name})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "previous_response_id"


async def test_a_conversation_goes_on_whatever_way_its_fields_are_written(model):
    source = saying(model, "one")
    async with client_for(app_for(source, model)) as client:
        first = (await client.post("/v1/responses", json={"model": MODEL, "input": "a", "store": True})).json()
        body = json.dumps({"model": MODEL, "input": "b", "previous_response_id": first["id"]})
        for name in ("previous_response_id", "previous\\u005fresponse_id", "\\u0070revious_response_id"):
            written = body.replace("previous_response_id", name)
            answer = await client.post("/v1/responses", content=written, headers={"content-type": "application/json"})
            assert answer.status_code == 200, answer.text
    assert len({tuple(one.prompt_token_ids) for one in source.requests[1:]}) == 1


async def test_it_waits_for_the_previous_response_no_longer_than_its_deadline(model):
    source = saying(model, "one", hold=2)
    async with client_for(app_for(source, model)) as client:
        name = (await client.post("/v1/responses", json=asked())).json()["id"]
        body = {"model": MODEL, "input": "more", "previous_response_id": name}
        answer = await client.post("/v1/responses", json=body, headers={"x-request-timeout-seconds": "0.05"})
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
