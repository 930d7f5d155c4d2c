"""`/v1/batches`: through OpenAI's client, and what is refused."""

from __future__ import annotations

import asyncio
import threading
import time

import openai
import pytest

from cluster.batch.server import store
from cluster.batch.server.objects import BatchUsage, LineError, Outcome, RequestCounts
from cluster.batch.server.root import open_root
from cluster.batch.server.store import Store
from cluster.http.openapi import OPERATIONS
from tests.openai_app import client_for, served_model, serving
from tests.storage_app import BATCH, FORM, LINES, storing_app, two_tenants, upload_form

COUNTS = RequestCounts(3, 2, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def app(model, tmp_path):
    return storing_app(model, tmp_path)


@pytest.fixture
def batches(tmp_path):
    """What a runner would hold: the same place, opened by another process."""
    return Store(open_root(str(tmp_path)), 1).batches


async def uploaded(client, **headers):
    made = await client.post("/v1/files", content=upload_form(), headers=FORM | headers)
    return made.json()["id"]


def code_of(answer):
    error = answer.json()["error"]
    assert error["request_id"] == answer.headers["x-request-id"]
    return answer.status_code, error["code"], error["param"]


async def test_openais_client_creates_follows_lists_and_cancels(app, batches):
    async with serving(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        file = await client.files.create(file=LINES, purpose="batch")
        made = await client.batches.create(input_file_id=file.id, metadata={"night": "1"}, **BATCH)
        assert (made.status, made.object, made.metadata) == ("validating", "batch", {"night": "1"})
        assert made.expires_at == made.created_at + 86_400
        assert abs(made.created_at - time.time()) < 60
        assert await client.batches.retrieve(made.id) == made
        batches.write(batches.read(made.id).begun(made.created_at + 1, 3, "demo"))
        running = await client.batches.retrieve(made.id)
        assert (running.status, running.request_counts.total, running.model) == ("in_progress", 3, "demo")
        cancelling = await client.batches.cancel(made.id)
        assert (cancelling.status, cancelling.id) == ("cancelling", made.id)
        assert cancelling.cancelling_at >= made.created_at
        outcome = Outcome(COUNTS, "file-x", None, BatchUsage(input_tokens=4, output_tokens=5))
        batches.write(batches.read(made.id).cancelled(cancelling.cancelling_at, outcome))
        ended = await client.batches.retrieve(made.id)
        assert (ended.status, ended.output_file_id, ended.error_file_id) == ("cancelled", "file-x", None)
        assert (ended.usage.total_tokens, ended.usage.input_tokens_details.cached_tokens) == (9, 0)
        assert (await client.batches.cancel(made.id)).status == "cancelled", "asked once more"
        more = [await client.batches.create(input_file_id=file.id, **BATCH) for _ in range(4)]
        newest_first = [made.id, *(one.id for one in more)][::-1]
        assert [one.id async for one in client.batches.list()] == newest_first
        assert [one.id async for one in client.batches.list(limit=2)] == newest_first, "in three pages"
        first = await client.batches.list(limit=2)
        assert (len(first.data), first.has_more) == (2, True)
        assert [one.id async for one in client.batches.list(after=newest_first[2])] == newest_first[3:]


async def test_a_batch_that_ended_tells_why_and_cannot_be_cancelled(app, batches):
    async with serving(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        file = await client.files.create(file=LINES, purpose="batch")
        made = await client.batches.create(input_file_id=file.id, **BATCH)
        why = LineError(code="duplicate_custom_id", message="line 2 has that of line 1", param="custom_id", line=2)
        batches.write(batches.read(made.id).failed(made.created_at, [why]))
        failed = await client.batches.retrieve(made.id)
        assert (failed.status, failed.failed_at) == ("failed", made.created_at)
        (error,) = failed.errors.data
        assert (error.code, error.line, error.param) == ("duplicate_custom_id", 2, "custom_id")
        with pytest.raises(openai.ConflictError, match="is failed: only one that runs can be cancelled"):
            await client.batches.cancel(made.id)
        assert (await client.files.delete(file.id)).deleted


def test_the_client_that_blocks_works_as_well(model, tmp_path):
    async def main():
        async with serving(storing_app(model, tmp_path)) as url:
            await asyncio.to_thread(use, url)

    def use(url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            file = client.files.create(file=LINES, purpose="batch")
            made = client.batches.create(input_file_id=file.id, **BATCH)
            assert client.batches.retrieve(made.id) == made
            assert [one.id for one in client.batches.list(limit=1)] == [made.id]
            assert client.batches.cancel(made.id).status == "cancelling"

    asyncio.run(main())


async def test_whoever_waits_is_told_of_a_new_batch_once_it_is_kept(model, tmp_path, batches):
    told = []
    app = storing_app(model, tmp_path, on_created=lambda record: told.append((record, batches.read(record.id))))
    async with client_for(app) as client:
        file_id = await uploaded(client)
        made = await client.post("/v1/batches", json=BATCH | {"input_file_id": file_id})
        assert made.status_code == 200
        refused = await client.post("/v1/batches", json=BATCH | {"input_file_id": "file-1"})
        assert refused.status_code == 404
    ((record, kept),) = told
    assert record == kept
    assert (record.id, record.tenant) == (made.json()["id"], "default")
    assert [one.id for one in batches.unended()] == [record.id]


WRONG = [
    ({"input_file_id": None}, 400, "missing_required_parameter", "input_file_id"),
    ({"input_file_id": 7}, 400, "invalid_type", "input_file_id"),
    ({"input_file_id": "../../x"}, 404, "not_found", "input_file_id"),
    ({"input_file_id": "file-" + "0" * 32}, 404, "not_found", "input_file_id"),
    ({"endpoint": "/v1/responses"}, 400, "invalid_type", "endpoint"),
    ({"endpoint": None}, 400, "missing_required_parameter", "endpoint"),
    ({"completion_window": "1h"}, 400, "invalid_type", "completion_window"),
    ({"completion_window": None}, 400, "missing_required_parameter", "completion_window"),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 9}},
        400,
        "invalid_type",
        "output_expires_after.seconds",
    ),
    (
        {"output_expires_after": {"anchor": "now", "seconds": 3600}},
        400,
        "invalid_type",
        "output_expires_after.anchor",
    ),
    ({"window": "24h"}, 400, "unknown_parameter", "window"),
    ({"metadata": {"k": 1}}, 400, "invalid_type", "metadata"),
    ({"metadata": ["k"]}, 400, "invalid_type", "metadata"),
    ({"metadata": {f"k{number}": "" for number in range(17)}}, 400, "invalid_type", "metadata"),
    ({"metadata": {"k" * 65: ""}}, 400, "invalid_type", "metadata"),
    ({"metadata": {"k": "v" * 513}}, 400, "invalid_type", "metadata"),
]


@pytest.mark.parametrize(("change", "status", "code", "param"), WRONG)
async def test_a_wrong_batch_is_refused_by_field_and_nothing_is_kept(app, batches, change, status, code, param):
    async with client_for(app) as client:
        body = BATCH | {"input_file_id": await uploaded(client)} | change
        answer = await client.post("/v1/batches", json=body)
        assert code_of(answer) == (status, code, param or next(iter(change)))
        assert (await client.get("/v1/batches")).json()["data"] == []
    assert list(batches.unended()) == []


async def test_labels_at_their_bounds_are_kept(app):
    labels = {"k" * 62 + f"{number:02}": "v" * 512 for number in range(16)}
    async with client_for(app) as client:
        body = BATCH | {"input_file_id": await uploaded(client), "metadata": labels}
        made = await client.post("/v1/batches", json=body)
        assert made.status_code == 200
        assert (await client.get(f"/v1/batches/{made.json()['id']}")).json()["metadata"] == labels


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"limit": "1e2"}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"after": "file-" + "0" * 32}, "after"),
        ({"after": "batch_../"}, "after"),
        ({"order": "asc"}, "order"),
        ([("limit", 1), ("limit", 2)], "limit"),
    ],
)
async def test_a_wrong_query_is_refused_by_name(app, given, param):
    async with client_for(app) as client:
        answer = await client.get("/v1/batches", params=given)
    assert code_of(answer)[::2] == (400, param)


async def test_so_many_batches_of_a_tenant_may_be_open(model, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MOST_OPEN", 2)
    async with client_for(storing_app(model, tmp_path, tenancy=two_tenants())) as client:

        async def create(key):
            of = {"authorization": f"Bearer {key}"}
            file = (await client.post("/v1/files", content=upload_form(), headers={**FORM, **of})).json()
            return await client.post("/v1/batches", json={**BATCH, "input_file_id": file["id"]}, headers=of)

        made = [await create("sk-a") for _ in range(3)]
        assert [one.status_code for one in made] == [200, 200, 429]
        error = made[-1].json()["error"]
        assert (error["code"], error["retryable"], made[-1].headers["retry-after"]) == (
            "too_many_batches",
            True,
            "60",
        )
        assert (await create("sk-b")).status_code == 200


async def test_the_usual_page_has_twenty(app):
    async with client_for(app) as client:
        body = BATCH | {"input_file_id": await uploaded(client)}
        made = [(await client.post("/v1/batches", json=body)).json()["id"] for _ in range(21)]
        page = (await client.get("/v1/batches")).json()
        assert [one["id"] for one in page["data"]] == made[:0:-1]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (made[-1], made[1], True)
        whole = (await client.get("/v1/batches", params={"limit": 100})).json()
        assert (len(whole["data"]), whole["has_more"]) == (21, False)


async def test_a_wish_to_cancel_has_no_fields(app):
    async with client_for(app) as client:
        made = await client.post("/v1/batches", json=BATCH | {"input_file_id": await uploaded(client)})
        path = f"/v1/batches/{made.json()['id']}/cancel"
        assert code_of(await client.post(path, json={"now": True})) == (400, "unknown_parameter", "now")
        listed = await client.post(path, content=b"[]", headers={"content-type": "application/json"})
        assert code_of(listed) == (400, "invalid_json", None)
        assert (await client.get(path.removesuffix("/cancel"))).json()["status"] == "validating"
        for body in ({"content": b""}, {"json": {}}, {}):
            assert (await client.post(path, **body)).json()["status"] == "cancelling"


async def test_tenants_see_their_own_and_need_a_key(model, tmp_path, batches):
    app = storing_app(model, tmp_path, tenancy=two_tenants())
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("sk-a", "sk-b"))
    async with client_for(app) as client:
        body = BATCH | {"input_file_id": await uploaded(client, **mine)}
        assert (await client.post("/v1/batches", json=body)).status_code == 401
        assert code_of(await client.post("/v1/batches", json=body, headers=theirs))[0] == 404
        made = (await client.post("/v1/batches", json=body, headers=mine)).json()
        for method, rest in (("GET", ""), ("POST", "/cancel")):
            path = f"/v1/batches/{made['id']}{rest}"
            assert (await client.request(method, path)).status_code == 401
            assert code_of(await client.request(method, path, headers=theirs)) == (404, "not_found", None)
        assert (await client.get("/v1/batches", headers=theirs)).json()["data"] == []
        assert (await client.get("/v1/batches", headers=mine)).json()["data"] == [made]
    assert (batches.read(made["id"]).tenant, batches.read(made["id"]).status) == ("a", "validating")


@pytest.mark.parametrize("path", ["..%2F..%2Fx", "%2e%2e", "batch_%00", "x" * 3000, "batch_" + "0" * 32, "ü"])
async def test_no_spelling_of_an_id_gets_anywhere(app, path):
    async with client_for(app) as client:
        for method, rest in (("GET", ""), ("POST", "/cancel")):
            answer = await client.request(method, f"http://localhost/v1/batches/{path}{rest}")
            assert code_of(answer) == (404, "not_found", None)
            assert len(answer.content) < 500


async def test_two_routers_on_one_place_say_the_same(model, tmp_path):
    one, other = storing_app(model, tmp_path), storing_app(model, tmp_path)
    async with client_for(one) as first, client_for(other) as second:
        file_id = await uploaded(first)
        made = (await second.post("/v1/batches", json=BATCH | {"input_file_id": file_id})).json()
        assert (await first.post(f"/v1/batches/{made['id']}/cancel")).json()["status"] == "cancelling"
        (seen,) = (await second.get("/v1/batches")).json()["data"]
        assert (seen["id"], seen["status"]) == (made["id"], "cancelling")


async def test_a_place_behind_a_url_does_as_well(model, tmp_path):
    app = storing_app(model, f"memory://routes-{tmp_path.name}")
    async with client_for(app) as client:
        file_id = await uploaded(client)
        assert (await client.get(f"/v1/files/{file_id}/content")).content == LINES
        made = (await client.post("/v1/batches", json=BATCH | {"input_file_id": file_id})).json()
        assert (await client.get("/v1/batches")).json()["data"] == [made]
        assert (await client.delete(f"/v1/files/{file_id}")).status_code == 409
        assert (await client.post(f"/v1/batches/{made['id']}/cancel")).json()["status"] == "cancelling"


async def test_the_loop_goes_on_while_the_disk_is_slow(app, monkeypatch):
    entered, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(*_):
        loop.call_soon_threadsafe(entered.set)
        assert go.wait(30)
        return []

    monkeypatch.setattr("cluster.batch.server.root.LocalRoot.names", slow)
    async with client_for(app) as client:
        listing = asyncio.create_task(client.get("/v1/batches"))
        await entered.wait()
        assert (await client.get("/health")).status_code == 200
        assert not listing.done()
        go.set()
        assert (await listing).json()["data"] == []


def test_the_document_names_every_route_once():
    names = [one.name for one in OPERATIONS]
    assert len(names) == len(set(names))
    assert {"get_v1_files", "post_v1_files", "delete_v1_files_id", "post_v1_batches_id_cancel"} <= set(names)
