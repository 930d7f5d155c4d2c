"""What a response was made from is listed in pages, by any router."""

from __future__ import annotations

import openai
import pytest
from openai.types.responses.response_item_list import ResponseItemList

from cluster.admission.keys import FixedKeys, KeyEntry, KeyRing, Tenant, hash_key
from cluster.admission.tenants import Tenancy
from tests.cluster.ingress.router_lab import RouterLab
from tests.cluster.responses.test_router_deaths import begin, client_of
from tests.openai_app import MODEL, app_for, client_for, saying, served_model, serving

ITEMS = [
    {"role": "developer", "content": "be kind"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"role": "assistant", "id": "msg_mine", "content": [{"type": "output_text", "text": "hello"}]},
    {"role": "user", "id": "msg_mine", "content": "more"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"), max_model_len=4096)


async def stored(client, given, **fields):
    answer = await client.post("/v1/responses", json={"model": MODEL, "input": given, "store": True, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def texts(listed):
    return [item["content"][0]["text"] for item in listed["data"]]


async def test_a_text_is_one_message(model):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        name = await stored(client, "hi", instructions="be kind")
        listed = (await client.get(f"/v1/responses/{name}/input_items")).json()
        (item,) = listed["data"]
        assert item["content"] == [{"type": "input_text", "text": "hi"}]
        assert (item["type"], item["role"], item["status"]) == ("message", "user", "completed")
        assert (listed["object"], listed["has_more"]) == ("list", False)
        assert listed["first_id"] == listed["last_id"] == item["id"]
        ResponseItemList.model_validate(listed, strict=True)


async def test_items_are_listed_in_pages_and_both_orders(model):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        path = f"/v1/responses/{await stored(client, ITEMS)}/input_items"
        whole = (await client.get(path)).json()
        ResponseItemList.model_validate(whole, strict=True)
        assert texts(whole) == ["more", "hello", "hi", "be kind"]
        assert whole["data"][1]["content"][0]["type"] == "output_text"
        ids = [item["id"] for item in whole["data"]]
        assert ids[1] == "msg_mine" and len(set(ids)) == 4
        assert (await client.get(path)).json() == whole
        first = (await client.get(f"{path}?order=asc&limit=3")).json()
        assert (texts(first), first["has_more"]) == (["be kind", "hi", "hello"], True)
        last = (await client.get(f"{path}?order=asc&limit=3&after={first['last_id']}")).json()
        assert (texts(last), last["has_more"]) == (["more"], False)
        none = (await client.get(f"{path}?order=asc&after={last['last_id']}")).json()
        assert none == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_the_openai_client_lists_what_came_before_too(model):
    async with (
        serving(app_for(saying(model, "one"), model)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as client,
    ):
        first = await client.responses.create(model=MODEL, input="first", store=True)
        more = {"input": "second", "store": True, "previous_response_id": first.id}
        second = await client.responses.create(model=MODEL, **more)
        pages = client.responses.input_items.list(second.id, order="asc", limit=2)
        items = [item async for item in pages]
    assert [item.content[0].text for item in items] == ["first", "one", "second"]
    assert items[1].id == first.output[0].id


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=msg_1", "include=a", "x=1"])
async def test_a_wrong_query_is_refused_by_name(model, query):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        answer = await client.get(f"/v1/responses/{await stored(client, 'hi')}/input_items?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_what_is_not_kept_or_is_another_tenants_is_not_found(model):
    ring = KeyRing([KeyEntry(hash_key(name), Tenant(name)) for name in ("ann", "bob")])
    ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    app = app_for(saying(model, "hello"), model, tenancy=Tenancy(FixedKeys(ring)))
    async with client_for(app) as client:
        client.headers.update(ann)
        name = await stored(client, "hi")
        assert (await client.get(f"/v1/responses/{name}/input_items", headers=bob)).status_code == 404
        for other in ("resp_1", "msg_1"):
            assert (await client.get(f"/v1/responses/{other}/input_items")).status_code == 404
    async with client_for(app_for(saying(model, "hello"), model, response_retention=0)) as client:
        assert (await client.get("/v1/responses/resp_1/input_items")).status_code == 404


async def test_any_router_lists_them(tmp_path):
    async with RouterLab(tmp_path) as lab:
        one, two = lab.routers
        name = await begin(one)
        async with client_of(two) as client:
            assert texts((await client.get(f"/v1/responses/{name}/input_items")).json()) == ["once"]


@pytest.mark.parametrize("field", ["conversation", "no_such_field"])
@pytest.mark.parametrize("kept", [{"store": True}, {"background": True}, {}])
async def test_what_is_not_supported_is_refused_by_name(model, field, kept):
    async with client_for(app_for(saying(model, "hello"), model)) as client:
        answer = await client.post("/v1/responses", json={"model": MODEL, "input": "hi", field: "conv_1", **kept})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
